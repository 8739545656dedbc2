from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest

from django_pgstreams import notifier
from django_pgstreams.buffer import WakeUp
from django_pgstreams.models import Chunk, Stream
from django_pgstreams.notifier import Notifier
from tests.following import connect, query, sessions, terminate
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("live")


@pytest.fixture
def make(live):
    """Makes notifiers that are closed at the end."""
    made = []

    def build(using="default", **settings):
        given = {
            "channel": "pgstreams",
            "flush_interval_seconds": 0.01,
            "timeout_seconds": 10.0,
            "idle_seconds": 30.0,
            **settings,
        }
        made.append(Notifier(using, **given))
        return made[-1]

    yield build
    for one in made:
        one.close(5)


def test_the_first_announcement_of_an_idle_notifier_is_flushed_at_once(make, ear):
    announced = make(flush_interval_seconds=60)
    announced.announce([WakeUp(17, 204), WakeUp(18, 3, changed=True)])
    wait_until(lambda: ear.hear(0.05), "the announcement is heard")
    assert ear.payloads == ["17:204 18:3!"]
    assert announced.flushes == 1


def test_an_announcement_after_a_quiet_time_waits_for_nothing(make, ear):
    announced = make(flush_interval_seconds=0.2)
    delays = []
    for tail in range(1, 6):
        time_of_flush = time.monotonic()
        announced.announce([WakeUp(1, tail)])
        wait_until(lambda tail=tail: ear.heard(f"1:{tail}"), "it is heard")
        delays.append(time.monotonic() - time_of_flush)
        wait_until(lambda: time.monotonic() - time_of_flush > 0.4, "the notifier is idle again")  # noqa: B023
    assert sorted(delays)[2] < 0.1


def test_what_is_announced_during_a_rest_goes_in_one_notification(make, ear):
    announced = make(flush_interval_seconds=0.5)
    announced.announce([WakeUp(1, 1)])
    wait_until(lambda: announced.flushes == 1, "the first flush")
    for tail in range(2, 1000):
        announced.announce([WakeUp(1 + tail % 3, tail)])
    wait_until(lambda: announced.flushes == 2, "the second flush")
    wait_until(lambda: len(ear.hear(0.05)) == 2, "both are heard")
    assert sorted(ear.payloads[1].split()) == ["1:999", "2:997", "3:998"]


def test_under_load_there_is_at_most_one_flush_in_an_interval(make):
    announced = make(flush_interval_seconds=0.05)
    stop = threading.Event()

    def load():
        tail = 0
        while not stop.is_set():
            tail += 1
            announced.announce([WakeUp(1, tail)])

    threads = [threading.Thread(target=load) for _ in range(3)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    wait_until(lambda: announced.flushes >= 10, "ten flushes")
    stop.set()
    for thread in threads:
        thread.join()
    announced.close(5)
    assert announced.flushes <= (time.monotonic() - began) / 0.05 + 2


def test_many_notifiers_on_a_cluster_share_the_rate(make):
    name = "pgstreams-notifier"
    others = [connect(application_name=name) for _ in range(30)]
    try:
        announced = make()
        tail = 0
        began = time.monotonic()
        while announced.flushes < 12:
            tail += 1
            announced.announce([WakeUp(1, tail)])
        # The first flush counts; each of the ten rests between the others lasts 31 ms at least.
        assert time.monotonic() - began > 10 * 0.031
    finally:
        for other in others:
            other.close()


def test_notifiers_that_start_together_soon_know_of_each_other(make):
    announced = make()
    announced.announce([WakeUp(1, 1)])
    wait_until(lambda: announced._count_at > 0, "it has counted, when the others were not there yet")
    name = "pgstreams-notifier"
    others = [connect(application_name=name) for _ in range(30)]
    try:
        began = time.monotonic()
        tails = itertools.count(2)

        def counted():
            announced.announce([WakeUp(1, next(tails))])
            return announced._sessions > len(others)

        wait_until(counted, "it knows of the others")
        # On a quiet machine within 50 ms; it was half a minute.
        assert time.monotonic() - began < 10
    finally:
        for other in others:
            other.close()


def test_counting_becomes_rarer_but_at_most_ten_times_a_second_for_all_together(make):
    announced = make()
    intervals = []
    for tail in range(1, 13):
        announced._count_at = 0
        announced.announce([WakeUp(1, tail)])
        wait_until(lambda: announced._count_at > 0, "it has counted")
        intervals.append(announced._count_interval_seconds)
    assert intervals[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert intervals[-1] == max(1.0, announced._sessions * 0.1)


def test_the_pace_has_no_upper_bound_but_the_number_of_notifiers(make):
    announced = make()
    announced._durations.append(0.002)
    assert announced._pace() == pytest.approx(0.01)
    announced._durations.append(0.02)
    announced._durations.append(0.02)
    assert announced._pace() == pytest.approx(0.08)
    announced._durations.extend([9.0] * 32)
    assert announced._pace() == pytest.approx(0.25)
    announced._sessions = 700
    assert announced._pace() == pytest.approx(0.7)


def test_thousands_of_streams_in_one_transaction_fill_few_notifications(ear):
    streams = [Stream(key=f"Ключ/{number}/" + "ж" * 200) for number in range(2000)]
    Stream.objects.bulk_create(streams)
    Chunk.objects.bulk_create(Chunk(stream=stream, data=1) for stream in streams)
    expected = {f"{stream.pk}:1" for stream in streams}
    wait_until(lambda: expected <= set(ear.words()), "every stream is announced")
    assert max(len(payload.encode()) for payload in ear.payloads) <= 7900
    assert len(ear.payloads) < 50


def test_a_flush_is_one_statement_outside_any_transaction_that_writes_nothing(make, ear):
    with connect() as own:
        loaded = own.execute("SHOW shared_preload_libraries").fetchone()[0]
        if "pg_stat_statements" not in loaded:
            pytest.skip("the server does not load pg_stat_statements")
        own.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        own.execute("SELECT pg_stat_statements_reset()")
    announced = make(idle_seconds=60)
    for tail in range(1, 4):
        announced.announce([WakeUp(1, tail)])
        wait_until(lambda tail=tail: announced.flushes == tail, "it is flushed")
    [(_, state, begun)] = query(
        "SELECT pid, state, xact_start FROM pg_stat_activity "
        "WHERE application_name = 'pgstreams-notifier' AND datname = current_database()"
    )
    assert (state, begun) == ("idle", None)
    found = query(
        "SELECT calls, wal_records FROM pg_stat_statements "
        "WHERE query LIKE 'SELECT pg_notify%%' AND dbid = "
        "(SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    assert found == [(3, 0)]


def test_a_flush_that_fails_is_made_up_for_and_logged_once(make, ear, caplog):
    caplog.set_level(logging.INFO, logger="django_pgstreams")
    announced = make()
    announced.announce([WakeUp(1, 1)])
    wait_until(lambda: ear.heard("1:1"), "the first is heard")
    [pid] = sessions("notifier")
    query("SELECT pg_terminate_backend(%s)", pid)
    announced.announce([WakeUp(2, 2)])
    wait_until(lambda: ear.heard("2:2"), "the second is heard all the same")
    assert announced.failed_flushes == 1
    assert sessions("notifier") != [pid]

    def messages():
        return [record.message for record in caplog.records if record.name.endswith("notifier")]

    wait_until(lambda: "Wake-ups of 'default' are sent again" in messages(), "it says so")
    assert len([text for text in messages() if "the flush failed" in text]) == 1


def test_while_the_server_is_away_wake_ups_gather_and_appends_succeed(proxy, make, ear):
    announced = make(proxy.alias)
    proxy.go_down()
    stream = Stream.objects.create(key="away")
    for tail in range(1, 200):
        began = time.monotonic()
        announced.announce([WakeUp(stream.pk, tail)])
        assert time.monotonic() - began < 5
    wait_until(lambda: announced.failed_flushes >= 2, "flushes fail")
    assert not ear.hear(0.1)
    proxy.come_up()
    wait_until(lambda: ear.heard(f"{stream.pk}:199"), "the highest tail is heard")
    assert ear.words() == [f"{stream.pk}:199"]


def test_an_append_does_not_fail_and_does_not_wait_when_nothing_can_be_announced(proxy, ear):
    stream = Stream.objects.using(proxy.alias).create(key="append")
    stream.append(0)
    announced = notifier.get(proxy.alias)
    wait_until(lambda: announced.flushes, "the first is flushed")
    proxy.refuse()  # the connection that appends stays; the notifier's is ended, and finds no other
    terminate("notifier")
    chunks = [stream.append(value) for value in range(1, 50)]
    wait_until(lambda: announced.failed_flushes, "the flush fails")
    chunks += [stream.append(value) for value in range(50, 100)]
    assert [chunk.offset for chunk in chunks] == list(range(1, 100))
    assert [chunk.data for chunk in stream.read()] == list(range(100))
    proxy.come_up()
    wait_until(lambda: ear.heard(f"{stream.pk}:100"), "the highest tail is heard")


def test_a_server_that_is_gone_without_a_word_is_given_up_after_the_deadline(proxy, make, ear):
    announced = make(proxy.alias, timeout_seconds=0.5)
    announced.announce([WakeUp(1, 1)])
    wait_until(lambda: ear.heard("1:1"), "the first is heard")
    proxy.hold()
    announced.announce([WakeUp(2, 2)])
    wait_until(lambda: announced.failed_flushes, "the flush is given up")
    before = proxy.accepted
    wait_until(lambda: proxy.accepted > before, "another connection is tried")
    proxy.come_up()
    wait_until(lambda: ear.heard("2:2"), "the second is heard")


def test_closing_is_bounded_in_time_when_the_server_does_not_answer(proxy, make):
    announced = make(proxy.alias, timeout_seconds=1)
    announced.announce([WakeUp(1, 1)])
    wait_until(lambda: announced.flushes, "the first is flushed")
    proxy.hold()
    announced.announce([WakeUp(2, 2)])
    began = time.monotonic()
    announced.close(3)
    assert time.monotonic() - began < 10


def test_closing_flushes_what_waits_in_the_calling_thread(make, ear):
    announced = make(flush_interval_seconds=60)
    announced.announce([WakeUp(1, 1)])
    wait_until(lambda: announced.flushes == 1, "the first flush")
    announced.announce([WakeUp(1, 2)])
    announced.close(5)
    wait_until(lambda: ear.heard("1:2"), "it is heard")
    assert not sessions("notifier")


def test_a_closed_notifier_takes_no_more_and_the_process_gets_another(ear):
    first = notifier.get("default")
    notifier.close_all()
    assert first.announce([WakeUp(1, 1)]) is False
    notifier.announce("default", [WakeUp(1, 1)])
    assert notifier.get("default") is not first
    wait_until(lambda: ear.heard("1:1"), "it is heard")


def test_too_many_streams_become_one_word_for_everything(proxy, make, ear):
    announced = make(proxy.alias)
    proxy.go_down()
    announced.announce([WakeUp(1, 1)])
    wait_until(lambda: announced.failed_flushes, "the flush fails")
    announced.announce(WakeUp(stream_id, 1) for stream_id in range(50_001))
    assert len(announced._buffer) < 50_001
    proxy.come_up()
    wait_until(lambda: ear.heard("*"), "everything is heard")
    assert len(ear.payloads) < 10


def test_an_idle_connection_is_closed_and_comes_back(make, ear):
    announced = make(idle_seconds=0.3)
    announced.announce([WakeUp(1, 1)])
    wait_until(lambda: ear.heard("1:1"), "the first is heard")
    wait_until(lambda: not sessions("notifier"), "the session is closed")
    announced.announce([WakeUp(1, 2)])
    wait_until(lambda: ear.heard("1:2"), "the second is heard")


def test_its_thread_starts_with_the_first_announcement(make):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "pgstreams-notifier"]

    announced = make()
    assert threads() == []
    announced.announce([WakeUp(1, 1)])
    assert len(threads()) == 1
    announced.announce([WakeUp(1, 2)])
    assert len(threads()) == 1
    announced.close(5)
    assert threads() == []


def test_a_second_process_hears_what_this_one_announces(ear):
    stream = Stream.objects.create(key="announced")
    stream.append("x")
    stream.append_many(["y", "z"])
    stream.close()
    wait_until(lambda: ear.heard(f"{stream.pk}:3!"), "the end is heard")
