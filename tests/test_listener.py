from __future__ import annotations

import logging
import threading
import time

import psycopg
import pytest

from django_pgstreams import background, listener
from django_pgstreams.buffer import Batch, WakeUp
from django_pgstreams.listener import Listener
from tests.aliases import alias
from tests.following import connect, conninfo, query, sessions, terminate
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("live")


class Heard:
    """Remembers the batches that it was woken with."""

    def __init__(self):
        self.batches = []

    def __call__(self, batch):
        self.batches.append(batch)

    @property
    def everythings(self):
        return sum(batch.everything for batch in self.batches)

    @property
    def wake_ups(self):
        return [wake_up for batch in self.batches for wake_up in batch.wake_ups]


@pytest.fixture
def make(live):
    """Makes listeners that are closed at the end."""
    made = []

    def build(using="default", **settings):
        given = {"channel": "pgstreams", "health_check_seconds": 15.0, "idle_seconds": 30.0}
        made.append(Listener(using, **{**given, **settings}))
        return made[-1]

    yield build
    for one in made:
        one._callbacks = ()
        background.submit(one.close()).result(10)


def notify(payload, channel="pgstreams"):
    query("SELECT pg_notify(%s, %s)", channel, payload)


def test_everything_comes_right_after_listening_has_begun_and_then_each_wake_up(make):
    heard = Heard()
    make().attach(heard)
    wait_until(lambda: heard.batches, "something is heard")
    assert heard.batches == [Batch((), everything=True)]
    notify("17:204 18:3!")
    wait_until(lambda: len(heard.batches) == 2, "the notification is heard")
    assert heard.wake_ups == [WakeUp(17, 204), WakeUp(18, 3, changed=True)]


def test_whoever_notifies_between_listening_and_everything_is_heard_too(make):
    """A wake-up that is sent as soon as the server knows the listener is never missed."""
    heard = Heard()
    stop = threading.Event()
    sent = []

    def load():
        with connect() as own:
            while not stop.is_set():
                sent.append(len(sent) + 1)
                own.execute("SELECT pg_notify('pgstreams', %s)", [f"1:{sent[-1]}"])

    thread = threading.Thread(target=load)
    thread.start()
    make().attach(heard)
    wait_until(lambda: len(heard.wake_ups) > 200, "many are heard")
    stop.set()
    thread.join()
    wait_until(lambda: heard.wake_ups[-1].tail == sent[-1], "the last is heard")
    tails = [wake_up.tail for wake_up in heard.wake_ups]
    assert tails == list(range(tails[0], sent[-1] + 1))
    assert heard.batches[0].everything or heard.everythings == 1


def test_all_who_are_attached_share_one_session_that_is_idle(make):
    listening = make()
    heard = [Heard() for _ in range(20)]
    for one in heard:
        listening.attach(one)
    wait_until(lambda: listening.connects, "it listens")
    notify("1:1")
    wait_until(lambda: all(one.wake_ups for one in heard), "all are woken")
    activity = (
        "SELECT state, xact_start, query FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'pgstreams-listener'"
    )
    # Its backend is in a transaction of its own for the moment in which it takes a notification.
    wait_until(
        lambda: query(activity) == [("idle", None, 'LISTEN "pgstreams"')], "one session, and it is idle"
    )


def test_whoever_fails_does_not_keep_the_others_from_being_woken(make, caplog):
    listening = make()
    heard = Heard()

    def fail(batch):
        raise ValueError("broken")

    listening.attach(fail)
    listening.attach(heard)
    wait_until(lambda: listening.connects, "it listens")
    notify("1:1")
    wait_until(lambda: heard.wake_ups, "the other is woken")
    assert "could not be woken" in caplog.text
    assert listening.connects == 1


def test_it_disconnects_a_while_after_the_last_has_left(make):
    listening = make(idle_seconds=0.3)
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: heard.batches, "it listens")
    listening.detach(heard)
    wait_until(lambda: not sessions("listener"), "the session is gone")
    listening.attach(heard)
    wait_until(lambda: len(heard.batches) == 2, "it listens again")


def test_whoever_comes_before_that_finds_the_same_session(make):
    listening = make(idle_seconds=0.5)
    first, second = Heard(), Heard()
    listening.attach(first)
    wait_until(lambda: first.batches, "it listens")
    left_at = time.monotonic()
    listening.detach(first)
    listening.attach(second)
    wait_until(lambda: time.monotonic() - left_at > 1, "the time of idleness is over")
    notify("1:1")
    wait_until(lambda: second.wake_ups, "the second is woken")
    assert not first.wake_ups
    assert listening.connects == 1


def test_coming_and_going_in_quick_turns_leaves_it_listening(make):
    listening = make(idle_seconds=0.001)
    for turn in range(300):
        heard = Heard()
        listening.attach(heard)
        if turn % 30 == 0:
            wait_until(lambda heard=heard: _is_woken(heard), "it is woken")
        listening.detach(heard)
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: len(sessions("listener")) == 1, "one session")
    wait_until(lambda: _is_woken(heard), "it is woken")


def _is_woken(heard):
    notify("5:5")
    return WakeUp(5, 5) in heard.wake_ups


def test_closed_before_its_first_step_it_listens_when_somebody_comes(make):
    listening = make()
    for _ in range(50):
        heard = Heard()
        listening.attach(heard)
        listening.detach(heard)
        background.submit(listening.close()).result(10)
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: heard.batches, "it listens")


def test_after_each_broken_connection_everything_comes_again(make, caplog):
    caplog.set_level(logging.INFO, logger="django_pgstreams.listener")
    listening = make()
    heard = Heard()
    listening.attach(heard)
    for times in range(1, 11):
        wait_until(lambda times=times: heard.everythings == times, "everything comes")
        [pid] = wait_until(lambda: len(found := sessions("listener")) == 1 and found, "one session is left")
        query("SELECT pg_terminate_backend(%s)", pid)
    wait_until(lambda: heard.everythings == 11, "everything comes")
    assert len(sessions("listener")) == 1
    assert caplog.text.count("Not listening") == 10
    assert caplog.text.count("Listening on") == 11


def test_while_the_server_is_away_it_tries_again_for_ever_and_logs_once(make, proxy, caplog):
    listening = make(proxy.alias)
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: heard.everythings == 1, "it listens")
    proxy.go_down()
    tried = proxy.accepted
    wait_until(lambda: proxy.accepted >= tried + 4, "it tries again and again")
    assert len([r for r in caplog.records if "Not listening" in r.message]) == 1
    proxy.come_up()
    wait_until(lambda: heard.everythings == 2, "it listens")


def test_a_connection_that_is_open_but_dead_is_noticed_by_its_health_check(make, proxy, monkeypatch, caplog):
    monkeypatch.setattr(listener, "_CONNECT_TIMEOUT_SECONDS", 2.0)
    listening = make(proxy.alias, health_check_seconds=2.0)
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: listening.is_proved, "it listens, and no other connection is under way")
    proxy.hold()
    tried = proxy.accepted
    wait_until(lambda: proxy.accepted > tried, "another connection is tried")
    proxy.come_up()
    wait_until(lambda: heard.everythings == 2, "it listens")
    notify("1:1")
    wait_until(lambda: heard.wake_ups, "it is woken")
    warnings = [record.message for record in caplog.records if "Not listening" in record.message]
    assert len(warnings) == 1
    assert "did not answer in time" in warnings[0]


def test_closing_does_not_wait_for_a_dead_connection(make, proxy):
    listening = make(proxy.alias, health_check_seconds=0.2)
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: heard.everythings == 1, "it listens")
    proxy.hold()
    listening.detach(heard)
    began = time.monotonic()
    background.submit(listening.close()).result(20)
    assert time.monotonic() - began < 15


# Whether it hears ----------------------------------------------------------------------------------


@pytest.fixture
def another_database():
    """An alias that leads to another database of the server."""
    with alias("another", NAME="postgres") as name:
        yield name


def test_each_connection_is_proved_by_another_one_which_is_closed_again(make, caplog):
    caplog.set_level(logging.INFO, logger="django_pgstreams.listener")
    with connect() as own:
        own.execute("LISTEN pgstreams")
        listening = make()
        heard = Heard()
        listening.attach(heard)
        [probe] = own.notifies(timeout=60, stop_after=1)
    [listener_pid] = sessions("listener")
    assert probe.pid != listener_pid
    wait_until(lambda: not sessions("probe"), "the other connection is closed")
    notify("1:1")
    wait_until(lambda: heard.wake_ups, "it is woken")
    assert heard.batches == [Batch((), everything=True), Batch((WakeUp(1, 1),), everything=False)]
    assert listening.wake_ups == 1
    assert [record.getMessage() for record in caplog.records] == ["Listening on 'default'"]


def test_one_that_hears_nothing_says_so_once_and_tries_again_with_longer_waits(
    make, another_database, caplog, monkeypatch
):
    monkeypatch.setattr(listener, "_PROBE_SECONDS", 0.2)
    listening = make(by=another_database)
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: listening.listening == "deaf", "it notices")
    assert not listening.hears
    wait_until(lambda: listening.connects >= 4, "it tries again")
    assert listening._failures >= 3
    assert heard.everythings >= 4
    [message] = [record.getMessage() for record in caplog.records]
    assert f"""PGSTREAMS["LISTEN_DATABASE"], '{another_database}',""" in message
    assert "'default'" in message


def test_one_that_was_deaf_and_hears_again_says_so(make, another_database, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="django_pgstreams.listener")
    monkeypatch.setattr(listener, "_PROBE_SECONDS", 0.2)
    listening = make(by=another_database)
    listening.attach(Heard())
    wait_until(lambda: listening.listening == "deaf", "it notices")
    listening._by = "default"
    wait_until(lambda: listening.listening == "yes", "it hears")
    assert listening.hears
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR", "INFO"]


def test_one_whose_probe_cannot_be_sent_listens_on_and_is_proved_later(make, proxy, caplog):
    caplog.set_level(logging.INFO, logger="django_pgstreams.listener")
    proxy.go_down()
    listening = make(proxy.alias, by="default", health_check_seconds=0.4)
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: "Not known yet" in caplog.text, "the probe fails")
    notify("1:1")
    wait_until(lambda: heard.wake_ups, "it is woken")
    assert (listening.listening, listening.connects) == ("yes", 1)
    tried = proxy.accepted
    wait_until(lambda: proxy.accepted > tried, "it is tried again")
    proxy.come_up()
    wait_until(lambda: listening.is_proved, "it is proved")
    assert listening.connects == 1


def test_wake_ups_are_passed_on_while_a_connection_is_proved(make, proxy):
    proxy.hold()
    listening = make(proxy.alias, by="default")
    heard = Heard()
    listening.attach(heard)
    wait_until(lambda: proxy.accepted, "the probe is under way")
    notify("1:1")
    wait_until(lambda: heard.wake_ups, "it is woken")
    assert not listening.is_proved
    proxy.come_up()
    wait_until(lambda: listening.is_proved, "it is proved")


def test_a_probe_that_is_queued_behind_wake_ups_is_not_lost(make, proxy, monkeypatch, caplog):
    """A busy process: the wake-ups before the probe take it far longer than a probe may."""
    monkeypatch.setattr(listener, "_PROBE_SECONDS", 0.2)
    proxy.hold()
    listening = make(proxy.alias, by="default")
    heard = Heard()

    def work(batch):
        time.sleep(0.02)
        heard(batch)

    listening.attach(work)
    wait_until(lambda: proxy.accepted, "the probe is under way")
    query(
        "SELECT count(pg_notify('pgstreams', '1:' || n || repeat(' ', 7000))) "
        "FROM generate_series(1, 100) AS n"
    )
    wait_until(lambda: heard.wake_ups, "the first is heard")
    proxy.come_up()
    wait_until(lambda: listening.is_proved, "it is proved")
    assert [wake_up.tail for wake_up in heard.wake_ups] == list(range(1, 101))
    assert (listening.listening, listening.connects) == ("yes", 1)
    assert not caplog.records


def test_one_that_hears_others_for_ever_but_not_its_probe_is_deaf(make, another_database, monkeypatch):
    """What it hears is said in the other database."""
    monkeypatch.setattr(listener, "_PROBE_SECONDS", 0.2)
    monkeypatch.setattr(listener, "_QUEUED_PROBE_SECONDS", 1.0)
    listening = make(by=another_database)
    heard = Heard()
    with psycopg.connect(conninfo(), dbname="postgres", autocommit=True) as own:

        def is_deaf():
            own.execute("SELECT pg_notify('pgstreams', '1:1')")
            return listening.listening == "deaf"

        listening.attach(heard)
        wait_until(lambda: heard.batches, "it listens")
        wait_until(is_deaf, "it notices")
    assert heard.wake_ups


def test_a_short_interruption_is_none_and_a_long_one_is(make, proxy, monkeypatch):
    monkeypatch.setattr(listener, "_PATIENCE_SECONDS", 1.0)
    listening = make(proxy.alias)
    assert listening.hears  # nobody wants it to
    listening.attach(Heard())
    wait_until(lambda: listening.is_proved, "it listens")
    proxy.go_down()
    down_at = time.monotonic()
    wait_until(lambda: listening.listening == "no", "it notices")
    wait_until(lambda: not listening.hears, "too long")
    assert time.monotonic() - down_at >= 1
    proxy.come_up()
    wait_until(lambda: listening.hears, "it listens again")


def test_the_alias_for_listening_stands_for_the_one_that_streams_are_written_to(settings):
    settings.PGSTREAMS = {"LISTEN_DATABASE": "direct"}
    assert listener.alias_of("default") == "direct"
    assert listener.alias_of("replica") == "replica"
    settings.PGSTREAMS = {}
    assert listener.alias_of("default") == "default"


# The channel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", ['Stream"s', "ströme", "x" * 63])
def test_a_channel_may_have_any_name(make, channel):
    heard = Heard()
    make(channel=channel).attach(heard)
    wait_until(lambda: heard.batches, "it listens")
    notify("3:4", channel)
    wait_until(lambda: heard.wake_ups == [WakeUp(3, 4)], "it is woken")


@pytest.mark.parametrize("payload", ["*", "rubbish", "17:", ":4", "1:2:3", "-1:4", "17:x"])
def test_a_payload_that_is_no_list_of_wake_ups_stands_for_everything(make, payload):
    heard = Heard()
    make().attach(heard)
    wait_until(lambda: heard.everythings == 1, "it listens")
    notify(payload)
    wait_until(lambda: heard.everythings == 2, "everything is heard")


def test_the_notification_queue_does_not_fill_up(make):
    heard = Heard()
    make().attach(heard)
    wait_until(lambda: heard.batches, "it listens")
    query(
        "SELECT count(pg_notify('pgstreams', '1:' || n || repeat(' ', 1000))) "
        "FROM generate_series(1, 20000) AS n"
    )
    wait_until(lambda: len(heard.wake_ups) == 20_000, "all are heard")
    wait_until(lambda: query("SELECT pg_notification_queue_usage()") == [(0.0,)], "the queue is empty")


def test_a_process_has_one_listener_of_a_database(settings):
    settings.PGSTREAMS = {"CHANNEL": "other"}
    assert listener.get("default") is listener.get("default")
    heard = Heard()
    listener.get("default").attach(heard)
    wait_until(lambda: heard.batches, "it listens")
    assert query(
        "SELECT query FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'pgstreams-listener'"
    ) == [('LISTEN "other"',)]
    listener.get("default").detach(heard)
    listener.close_all()
    assert not sessions("listener")
    assert terminate("listener") == 0
