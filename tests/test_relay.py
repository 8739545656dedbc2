"""`manage.py pgstreams relay`, in processes of its own, on what raw SQL writes."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from tests.aliases import alias
from tests.concurrency import start
from tests.following import (
    connect,
    database_url,
    is_listening,
    query,
    sessions,
    store,
    terminate,
)
from tests.relay_process import RelayProcess
from tests.waiting import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("live")

LATE_SECONDS = 10.0
"""Much less than the poll takes in these tests, much more than the relay takes on a busy machine."""


@pytest.fixture
def relays(live):
    """Starts relays, which are gone at the end."""
    with contextlib.ExitStack() as ending:

        def run(*options, **more):
            made = RelayProcess(*options, **more)
            ending.callback(made.close)
            return made

        yield run


@pytest.fixture
def relay(relays, ear):
    """A relay that runs."""
    made = relays()
    wait_until(lambda: ear.heard("*"), "the relay announces everything at its start")
    ear.payloads.clear()
    return made


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="relayed")


@pytest.fixture
def _no_other_way(settings):
    """Neither this process nor the poll helps."""
    settings.PGSTREAMS = {"NOTIFIER": "relay", "POLL_INTERVAL_SECONDS": 1000.0}


def append(key: str, payload: bytes = b"1") -> None:
    query("SELECT pgstreams_append(%s, %s)", key, payload)


def insert(own, key: str, state: str = "open") -> int:
    """Make a stream by SQL; its id."""
    return own.execute(
        "INSERT INTO pgstreams_stream (key, epoch, metadata, state) VALUES (%s, 'e', '{}', %s) RETURNING id",
        (key, state),
    ).fetchone()[0]


# What is announced -----------------------------------------------------------------------------------


def test_what_raw_sql_appends_is_announced(relay, ear, stream):
    append("relayed")
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "the append is heard")
    store(stream, 5)
    wait_until(lambda: ear.heard(f"{stream.pk}:6"), "the raw statement is heard")


@pytest.mark.usefixtures("_no_other_way")
def test_a_live_subscriber_gets_what_raw_sql_appends(relay, stream):
    subscription = subscribe(stream)
    reading = start(lambda: [chunk.data for chunk in subscription])
    wait_until(is_listening, "the subscriber's process listens")
    delays = []
    for count in range(1, 6):
        append("relayed")
        began = time.monotonic()
        wait_until(lambda count=count: subscription.position == count, "the chunk arrives")
        delays.append(time.monotonic() - began)
    query("UPDATE pgstreams_stream SET state = 'completed', closed_at = now() WHERE id = %s", stream.pk)
    assert reading.result(DEADLINE_SECONDS) == [1] * 5
    assert subscription.state == "completed"
    assert max(delays) < LATE_SECONDS


def test_a_transaction_that_commits_late_is_announced_when_it_does(relay, ear, stream):
    other = Stream.objects.create(key="other")
    with connect() as own:
        with own.transaction():
            own.execute("SELECT pgstreams_append('relayed', '1')")
            made = insert(own, "made in it")
            own.execute("SELECT pgstreams_append('made in it', '1')")
            with own.transaction():
                own.execute("SELECT pgstreams_append('made in it', '2')")
            for tail in range(1, 4):
                append("other")
                wait_until(
                    lambda tail=tail: ear.heard(f"{other.pk}:{tail}"), "others are announced meanwhile"
                )
            assert {f"{stream.pk}:1", f"{made}:2"} & set(ear.words()) == set()
        began = time.monotonic()
        wait_until(lambda: {f"{stream.pk}:1", f"{made}:2"} <= set(ear.words()), "both are heard")
        assert time.monotonic() - began < LATE_SECONDS


def test_what_is_rolled_back_is_not_announced(relay, ear, stream):
    other = Stream.objects.create(key="other")
    with connect() as own, own.transaction(force_rollback=True):
        own.execute("SELECT pgstreams_append('relayed', '1')")
    append("other")
    wait_until(lambda: ear.heard(f"{other.pk}:1"), "the other is heard")
    assert ear.words() == [f"{other.pk}:1"]


def test_the_last_chunk_and_the_end_in_one_transaction_are_announced_as_a_change(relay, ear, stream):
    append("relayed")
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "the append is heard")
    with connect() as own, own.transaction():
        own.execute("SELECT pgstreams_append('relayed', '2')")
        own.execute("UPDATE pgstreams_stream SET state = 'completed' WHERE id = %s", (stream.pk,))
    wait_until(lambda: any(ear.heard(f"{stream.pk}:{tail}!") for tail in (1, 2)), "the end is heard")


def test_a_deletion_is_announced_as_a_change(relay, ear, stream):
    append("relayed")
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "the append is heard")
    query("DELETE FROM pgstreams_stream WHERE id = %s", stream.pk)
    wait_until(lambda: ear.heard(f"{stream.pk}:1!"), "the deletion is heard")


def test_a_stream_that_is_made_anew_is_another(relay, ear, stream):
    append("relayed")
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "the append is heard")
    with connect() as own, own.transaction():
        own.execute("DELETE FROM pgstreams_chunk WHERE stream_id = %s", (stream.pk,))
        own.execute("DELETE FROM pgstreams_stream WHERE id = %s", (stream.pk,))
        anew = insert(own, "relayed")
        own.execute("SELECT pgstreams_append('relayed', '1')")
    wait_until(lambda: ear.heard(f"{stream.pk}:1!") and ear.heard(f"{anew}:1"), "both are heard")


def test_a_stream_that_was_never_seen_open_is_announced(relay, ear):
    """As one that is made and ends between two looks."""
    with connect() as own:
        made = insert(own, "at once", "failed")
    wait_until(lambda: ear.heard(f"{made}:0!"), "the end is heard")


@pytest.mark.usefixtures("_no_other_way")
def test_subscribers_of_streams_that_live_for_a_moment_see_their_end(relay):
    with connect() as own:
        for number in range(30):
            key = f"moment/{number}"
            insert(own, key)
            subscription = subscribe(key)
            reading = start(lambda subscription=subscription: [chunk.data for chunk in subscription])
            own.execute("SELECT pgstreams_append(%s, '1')", (key,))
            own.execute("UPDATE pgstreams_stream SET state = 'completed' WHERE key = %s", (key,))
            assert reading.result(DEADLINE_SECONDS) == [1]


def test_thousands_of_streams_fill_few_notifications(relay, ear):
    query(
        "INSERT INTO pgstreams_stream (key, epoch, metadata, next_offset) "
        "SELECT 'many/' || n, 'e', '{}', 1 FROM generate_series(1, 5000) AS n"
    )
    expected = {f"{pk}:1" for pk in Stream.objects.values_list("pk", flat=True)}
    wait_until(lambda: expected <= set(ear.words()), "every stream is announced")
    assert len(ear.payloads) < 50
    few = sorted(Stream.objects.values_list("pk", flat=True))[::1000]
    ear.payloads.clear()
    query("UPDATE pgstreams_stream SET next_offset = 2 WHERE id = ANY (%s)", few)
    wait_until(lambda: {f"{pk}:2" for pk in few} <= set(ear.words()), "what moves is announced")
    assert len(ear.words()) == len(few)
    query("DELETE FROM pgstreams_stream WHERE key LIKE 'many/%%'")
    wait_until(lambda: len(ear.words()) == 5000 + len(few), "every deletion is announced")


# Its life --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly(relay, number):
    assert len(sessions("relay")) == 1
    began = time.monotonic()
    code, log = relay.stop(number)
    assert time.monotonic() - began < LATE_SECONDS
    assert code == 0
    assert [line.partition("The relay of ")[2] for line in log.splitlines()] == [
        "'default' watches 0 open streams",
        "'default' has stopped",
    ]
    wait_until(lambda: not sessions("relay"), "its session is gone")


def test_it_stops_when_the_server_does_not_answer(relays, proxy, ear):
    relay = relays(**database_url(host="127.0.0.1", port=proxy.port))
    wait_until(lambda: ear.heard("*"), "it runs")
    proxy.hold()
    stuck = (
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'pgstreams-relay' "
        "AND datname = current_database() AND clock_timestamp() - state_change > interval '1 second'"
    )
    wait_until(lambda: query(stuck), "its next look gets no answer")
    began = time.monotonic()
    code, log = relay.stop()
    assert time.monotonic() - began < LATE_SECONDS
    assert code == 0
    assert "did not stop in 1.0 s" in log


def test_between_looks_it_holds_no_transaction(relay):
    statement = (
        "SELECT state, xact_start IS NULL FROM pg_stat_activity WHERE application_name = 'pgstreams-relay' "
        "AND datname = current_database() AND state <> 'active'"
    )
    assert wait_until(lambda: query(statement), "it rests") == [("idle", True)]


def test_what_happens_while_the_server_is_away_is_announced_when_it_is_back(relays, proxy, ear, stream):
    relay = relays(**database_url(host="127.0.0.1", port=proxy.port))
    wait_until(lambda: ear.heard("*"), "it runs")
    ending = Stream.objects.create(key="ending")
    append("relayed")
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "the append is heard")
    wait_until(lambda: sessions("relay"), "it is connected")
    proxy.go_down()
    wait_until(lambda: not sessions("relay"), "it is cut off")
    append("relayed")
    with connect() as own:
        own.execute("UPDATE pgstreams_stream SET state = 'failed' WHERE id = %s", (ending.pk,))
        made = insert(own, "made and ended meanwhile", "failed")
    refused = proxy.accepted
    wait_until(lambda: proxy.accepted >= refused + 2, "it tries again")
    proxy.come_up()
    expected = {f"{stream.pk}:2", f"{ending.pk}:0!", f"{made}:0!"}
    wait_until(lambda: expected <= set(ear.words()), "all of it is heard")
    assert ear.words().count("*") == 1
    code, log = relay.stop()
    assert code == 0
    assert "Traceback" not in log
    assert [log.count(text) for text in ("watches", "cannot look, and tries again", "works again")] == [
        1,
        1,
        1,
    ]


def test_it_starts_while_the_server_is_away(relays, proxy, ear, stream):
    proxy.go_down()
    relays(**database_url(host="127.0.0.1", port=proxy.port))
    wait_until(lambda: proxy.accepted >= 2, "it tries")
    proxy.come_up()
    wait_until(lambda: ear.heard("*"), "it runs")
    append("relayed")
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "the append is heard")


def test_a_session_that_is_ended_comes_back(relay, ear, stream):
    for tail in range(1, 4):
        assert terminate("relay") == 1
        append("relayed")
        wait_until(lambda tail=tail: ear.heard(f"{stream.pk}:{tail}"), "the append is heard")
        wait_until(lambda: sessions("relay"), "it is back")


@pytest.mark.usefixtures("_no_other_way")
def test_two_relays_do_no_harm_and_one_that_is_left_goes_on(relays, ear, stream):
    first, _second = relays(), relays()
    wait_until(lambda: ear.words().count("*") == 2, "both run")
    subscription = subscribe(stream)
    reading = start(lambda: [chunk.data for chunk in subscription])
    wait_until(is_listening, "the subscriber's process listens")
    for number in range(100):
        append("relayed", b"%d" % number)
    wait_until(lambda: subscription.position == 100, "the chunks arrive")
    assert first.stop()[0] == 0
    append("relayed", b"100")
    wait_until(lambda: subscription.position == 101, "another arrives")
    stream.close()
    assert reading.result(DEADLINE_SECONDS) == list(range(101))


# The setting -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_other_way")
def test_where_a_relay_announces_processes_send_nothing_and_wake_their_own_subscribers(ear, stream):
    subscription = subscribe(stream)
    reading = start(lambda: [chunk.data for chunk in subscription])
    wait_until(is_listening, "this process listens")
    for number in range(5):
        stream.append(number)
        wait_until(lambda number=number: subscription.position == number + 1, "it is woken directly")
    with transaction.atomic():
        stream.append_many([5, 6])
    stream.close()
    assert reading.result(DEADLINE_SECONDS) == list(range(7))
    assert ear.hear(0.2) == []
    assert sessions("notifier") == []


@pytest.mark.usefixtures("_no_other_way")
def test_where_a_relay_announces_other_processes_hear_of_appends_by_it(relay, ear, stream):
    stream.append(0)
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "the append is heard")
    assert ear.words() == [f"{stream.pk}:1"]


# The command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["relay", "--database", "nowhere"], "invalid choice: 'nowhere'"),
        (["relay", "--interval-seconds", "0"], "'0' is not a number of seconds above 0"),
        (["relay", "--interval-seconds", "soon"], "'soon' is not a number of seconds above 0"),
        (["relay", "--idle-interval-seconds", "nan"], "'nan' is not a number of seconds above 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(CommandError, match=message):
        call_command("pgstreams", *options)


def test_another_database_than_postgres_is_refused(settings):
    with (
        alias("lite", ENGINE="django.db.backends.sqlite3") as lite,
        pytest.raises(CommandError, match=f"'{lite}' is sqlite, not Postgres"),
    ):
        call_command("pgstreams", "relay", database=lite)


def test_its_intervals_can_be_set(relays, ear, stream):
    relays("--interval-seconds", "0.3", "--idle-interval-seconds", "0.3", "--database", "default")
    wait_until(lambda: ear.heard("*"), "it runs")
    end = time.monotonic() + 2
    while time.monotonic() < end:
        append("relayed")
    assert 2 <= len(ear.hear()) <= 10


def test_verbosity_0_is_silent(relays, ear):
    relay = relays(verbosity=0)
    wait_until(lambda: ear.heard("*"), "it runs")
    assert relay.stop() == (0, "")
