from __future__ import annotations

import asyncio
import threading
import time

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError, connection, transaction

from django_pgstreams import committer, receivers
from django_pgstreams.exceptions import (
    AppendFailed,
    AppendUnknown,
    StreamBusy,
    StreamClosed,
    StreamMissing,
    WriterFull,
)
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.aliases import alias
from tests.concurrency import run_all, start
from tests.following import connect, in_thread, query, sessions, store, waiting_for_lock
from tests.waiting import wait_until
from tests.writing import held, is_stored, make_streams, stored, writer_rows

pytestmark = pytest.mark.usefixtures("live")


# Batches -------------------------------------------------------------------------------------------


def test_what_gathers_while_a_batch_commits_is_the_next():
    streams = make_streams(50)
    writers = [StreamWriter(stream) for stream in streams]
    futures = [writer.append_nowait(number) for number in range(60) for writer in writers]
    assert [future.result(30) for future in futures] == [number for number in range(60) for _ in writers]
    assert committer.get("default").batches <= 12
    for stream in streams:
        assert stored(stream) == list(range(60))


def test_a_batch_is_bounded_in_bytes():
    [stream] = make_streams(1)
    with StreamWriter(stream) as writer:
        for _ in range(30):
            writer.append_nowait("x" * 500_000)
    assert committer.get("default").batches >= 4
    assert stored(stream) == ["x" * 500_000] * 30


# What the database refuses -------------------------------------------------------------------------


@pytest.fixture
def constraint():
    """No stream takes the payload "poison"."""
    query("ALTER TABLE pgstreams_chunk ADD CONSTRAINT no_poison CHECK (payload <> '\"poison\"'::bytea)")
    yield
    query("ALTER TABLE pgstreams_chunk DROP CONSTRAINT no_poison")


def test_a_batch_that_the_database_refuses_fails_for_the_stream_that_is_refused(constraint):
    streams = make_streams(20)
    writers = [StreamWriter(stream) for stream in streams]
    futures = [
        writer.append_nowait("poison" if (place, number) in {(3, 1), (11, 0)} else number)
        for number in range(3)
        for place, writer in enumerate(writers)
    ]
    errors = [future.exception(30) for future in futures]
    assert {type(errors[place]) for place in range(60) if place % 20 not in (3, 11)} == {type(None)}
    for place in (23, 11):
        assert isinstance(errors[place], AppendFailed)
        assert "no_poison" in str(errors[place])
        assert f"'stream/{place % 20}'" in str(errors[place])
    for place, stream in enumerate(streams):
        if place not in (3, 11):
            assert stored(stream) == [0, 1, 2]
        else:
            assert "poison" not in stored(stream)
    assert writers[3].append("good") == len(stored(streams[3])) - 1


def test_rows_in_the_way_are_stepped_over():
    stream, other = make_streams(2)
    writer, beside = StreamWriter(stream), StreamWriter(other)
    assert writer.append("a") == 0
    query(
        'INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at) '
        "SELECT %s, n, '1', now() FROM generate_series(1, 3) AS n",
        stream.pk,
    )
    futures = [writer.append_nowait("b"), beside.append_nowait("c"), writer.append_nowait("d")]
    assert [future.result(30) for future in futures] == [4, 0, 5]
    assert stored(stream) == ["a", 1, 1, 1, "b", "d"]


def test_rows_that_get_in_the_way_again_while_the_stream_is_locked_again_cost_no_append():
    """Stepped over in the parked session, whose next try finds the row locked: it waits on."""
    [stream] = make_streams(1)
    writer = StreamWriter(stream)
    query(
        "INSERT INTO pgstreams_chunk (stream_id, \"offset\", payload, created_at) VALUES (%s, 0, '1', now())",
        stream.pk,
    )
    with held(stream) as own:
        waiting = writer.append_nowait("a")
        for _ in range(30):
            wait_until(lambda: waiting.done() or waiting_for_lock("writer"), "it waits for the row")
            own.execute("COMMIT")
            own.execute("BEGIN")
            own.execute("SELECT FROM pgstreams_stream WHERE id = %s FOR UPDATE", [stream.pk])
    assert waiting.result(30) == 1


def test_rows_in_the_way_of_a_locked_stream_hold_nobody_up():
    stream, other = make_streams(2)
    writer, beside = StreamWriter(stream), StreamWriter(other)
    query(
        "INSERT INTO pgstreams_chunk (stream_id, \"offset\", payload, created_at) VALUES (%s, 0, '1', now())",
        stream.pk,
    )
    with held(stream):
        waiting = writer.append_nowait("a")
        for number in range(20):
            assert beside.append_nowait(number).result(30) == number
        assert not waiting.done()
    assert waiting.result(30) == 1


# Locks ---------------------------------------------------------------------------------------------


def p99(times):
    return sorted(times)[int(len(times) * 0.99)]


def appended_for(seconds, writers):
    """Append to each at 20/s; how long each append took."""

    async def produce(place, writer):
        loop, times = asyncio.get_running_loop(), []
        began = loop.time() + place / 1000
        for number in range(int(seconds * 20)):
            await asyncio.sleep(max(0, began + number / 20 - loop.time()))
            before = loop.time()
            await writer.aappend(number)
            times.append(loop.time() - before)
        return times

    async def all_of_them():
        return await asyncio.gather(*(produce(*each) for each in enumerate(writers)))

    return [one for times in asyncio.run(all_of_them()) for one in times]


def test_a_row_that_is_locked_elsewhere_stalls_nobody_else():
    """A's row is held for 5 s while there are appends to A and to 50 others throughout."""
    locked, *others = make_streams(51)
    writer = StreamWriter(locked)
    writers = [StreamWriter(stream) for stream in others]
    unlocked = appended_for(2, writers)
    over = threading.Event()
    futures = []

    def append_to_the_locked_one():
        while not over.wait(0.01):
            futures.append(writer.append_nowait(len(futures)))

    with held(locked):
        appending = start(append_to_the_locked_one)
        times = appended_for(5, writers)
        assert not any(future.done() for future in futures)
    over.set()
    appending.result(30)
    assert [future.result(30) for future in futures] == list(range(len(futures)))
    assert len(futures) > 100
    assert stored(locked) == list(range(len(futures)))
    # 50 ms, but for what the machine does anyway; whoever waits for the lock waits for seconds.
    unlocked += appended_for(2, writers)
    assert p99(times) < max(0.05, 10 * p99(unlocked))


@pytest.mark.parametrize("query_timeout_seconds", [30.0, 0.4])
def test_after_the_lock_timeout_the_stream_is_busy_and_its_appends_fail(settings, query_timeout_seconds):
    settings.PGSTREAMS = {
        "WRITER_LOCK_TIMEOUT_SECONDS": 1.0,
        "QUERY_TIMEOUT_SECONDS": query_timeout_seconds,
    }
    locked, other = make_streams(2)
    writer, beside = StreamWriter(locked), StreamWriter(other)
    with held(locked):
        began = time.monotonic()
        futures = [writer.append_nowait(number) for number in range(3000)]
        marked = start(lambda: writer.__exit__(None, None, None))
        assert beside.append("meanwhile") == 0
        errors = [future.exception(30) for future in futures]
        assert 0.9 < time.monotonic() - began < 20
        assert {type(error) for error in errors} == {StreamBusy}
        assert "held stream 'stream/0' for 1 s" in str(errors[0])
        assert isinstance(marked.exception(30), StreamBusy)
        with pytest.raises(StreamBusy):
            writer.append("busy")
    assert writer.append("free") == 0
    assert stored(locked) == ["free"]


def test_many_locked_streams_wait_side_by_side():
    streams = make_streams(30)
    writers = [StreamWriter(stream) for stream in streams]
    with held(*streams[5:]), held(*streams[:5]) as early:
        futures = [writer.append_nowait(number) for number in range(10) for writer in writers]
        wait_until(lambda: waiting_for_lock("writer"), "one of them is waited for")
        early.execute("ROLLBACK")
        for place, future in enumerate(futures):
            if place % 30 < 5:
                assert future.result(30) == place // 30
        assert len(sessions("writer")) == 2
        assert not any(future.done() for place, future in enumerate(futures) if place % 30 >= 5)
    for place, future in enumerate(futures):
        assert future.result(30) == place // 30


def test_a_stream_that_ends_or_goes_while_its_row_is_held_is_found_so():
    closed, deleted = make_streams(2)
    with connect() as own:
        with own.transaction():
            own.execute(
                "UPDATE pgstreams_stream SET state = 'cancelled', reason = 'no' WHERE id = %s",
                [closed.pk],
            )
            own.execute("DELETE FROM pgstreams_stream WHERE id = %s", [deleted.pk])
            futures = [StreamWriter(stream).append_nowait(1) for stream in (closed, deleted)]
            wait_until(lambda: waiting_for_lock("writer"), "one of them is waited for")
        assert isinstance(futures[0].exception(30), StreamClosed)
        assert isinstance(futures[1].exception(30), StreamMissing)


def test_a_foreign_key_to_a_stream_in_an_open_transaction_is_no_obstacle():
    [stream] = make_streams(1)
    writer = StreamWriter(stream)
    query("CREATE TABLE pointing (stream bigint REFERENCES pgstreams_stream)")
    try:
        with connect() as own, own.transaction():
            own.execute("INSERT INTO pointing VALUES (%s)", [stream.pk])
            before = len(sessions("writer"))
            for number in range(5):
                assert writer.append_nowait(number).result(30) == number
            assert len(sessions("writer")) == max(before, 1)
            with connect() as another, another.transaction():
                another.execute("INSERT INTO pointing VALUES (%s)", [stream.pk])
    finally:
        query("DROP TABLE pointing")


def test_callers_who_append_to_two_streams_in_opposite_orders_never_meet_it_in_a_deadlock():
    """They meet each other in one: Postgres ends one of the two, and it tries again."""
    one, two = make_streams(2)
    over = threading.Event()
    deadlocks = []

    def append_to_both(first, second):
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL deadlock_timeout = '50ms'")
            for stream in (first, second):
                Stream.objects.get(pk=stream.pk).append("orm")
                time.sleep(0.002)

    def both(first, second):
        for _ in range(10):
            while True:
                try:
                    append_to_both(first, second)
                    break
                except OperationalError as error:
                    deadlocks.append(str(error))

    def write():
        writers = [StreamWriter(two), StreamWriter(one)]
        count = 0
        while not over.is_set():
            futures = [writer.append_nowait("writer") for writer in writers for _ in range(10)]
            for future in futures:
                future.result(60)
            count += 10
        return count

    writing = [start(write) for _ in range(2)]
    run_all(*[lambda: both(one, two), lambda: both(two, one)] * 2)
    over.set()
    count = sum(future.result(60) for future in writing)
    assert deadlocks
    assert all("deadlock detected" in text for text in deadlocks)
    for stream in (one, two):
        values = stored(stream)
        assert (values.count("orm"), values.count("writer")) == (40, count)


# Bounded memory ------------------------------------------------------------------------------------


@pytest.fixture
def small(settings):
    settings.PGSTREAMS = {"WRITER_MAX_PENDING_BYTES": 20_000}


def filled(writer):
    futures = []
    with pytest.raises(WriterFull, match="bytes wait"):  # noqa: PT012
        for number in range(1000):
            futures.append(writer.append_nowait(number))
    return futures


def test_a_full_writer_takes_no_more_without_waiting(small):
    stream, other = make_streams(2)
    writer, beside = StreamWriter(stream), StreamWriter(other)
    with held(stream):
        futures = filled(writer)
        assert 30 < len(futures) < 60
        with pytest.raises(WriterFull):
            beside.append_nowait("x")
        waiting = [start(lambda number=number: writer.append(["waits", number])) for number in range(5)]
        wait_until(lambda: len(committer.get("default")._pending._outside) == 5, "five stand outside")
        assert not any(future.done() for future in waiting)
        with pytest.raises(WriterFull):
            writer.append_nowait("x")
    assert [future.result(30) for future in futures] == list(range(len(futures)))
    offsets = sorted(future.result(30) for future in waiting)
    assert offsets == list(range(len(futures), len(futures) + 5))
    assert writer.append("last") == len(futures) + 5
    assert len(stored(stream)) == len(futures) + 6


def test_those_that_wait_for_room_go_on_in_order(small):
    [stream] = make_streams(1)
    writer = StreamWriter(stream)

    async def many():
        return await asyncio.gather(*(writer.aappend(number) for number in range(2000)))

    assert asyncio.run(many()) == list(range(2000))
    assert stored(stream) == list(range(2000))


def test_who_is_cancelled_while_it_waits_for_room_is_not_stored(small):
    [stream] = make_streams(1)
    writer = StreamWriter(stream)

    async def give_up():
        task = asyncio.create_task(writer.aappend("gave up"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    with held(stream):
        futures = filled(writer)
        asyncio.run(give_up())
    assert futures[-1].result(30) == len(futures) - 1
    assert writer.append("last") == len(futures)
    assert "gave up" not in stored(stream)


def test_a_pipe_waits_for_room(small):
    [stream] = make_streams(1)
    taken = []

    def pieces():
        for number in range(300):
            taken.append(number)
            yield number

    with held(stream):
        piping = start(StreamWriter(stream).pipe, pieces())
        wait_until(lambda: committer.get("default").is_full, "it is full")
        assert len(taken) < 70
    piping.result(30)
    assert stored(stream) == list(range(300))


# Its life ------------------------------------------------------------------------------------------


def test_an_idle_connection_is_closed_and_comes_back(settings):
    settings.PGSTREAMS = {"IDLE_SECONDS": 0.3}
    stream, other = make_streams(2)
    writer, beside = StreamWriter(stream), StreamWriter(other)
    with held(other):
        waiting = beside.append_nowait(0)
        assert writer.append(0) == 0
    assert waiting.result(30) == 0
    wait_until(lambda: not sessions("writer"), "both sessions are closed")
    with held(other):
        waiting = beside.append_nowait(1)
        assert writer.append(1) == 1
    assert waiting.result(30) == 1
    assert stored(stream) == stored(other) == [0, 1]


def test_closing_stores_what_waits_and_removes_its_row_and_its_sessions():
    stream, other = make_streams(2)
    futures = [StreamWriter(stream).append_nowait(number) for number in range(5000)]
    with held(other):
        locked = StreamWriter(other).append_nowait(0)
        wait_until(lambda: waiting_for_lock("writer"), "it is waited for")
        assert len(writer_rows()) == 2
    receivers.release()
    assert [future.result(0) for future in futures] == list(range(5000))
    assert locked.result(0) == 0
    assert (sessions("writer"), writer_rows()) == ([], [])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pgstreams-writer")]
    assert StreamWriter(stream).append("anew") == 5000


def test_what_is_found_locked_while_it_closes_is_waited_for():
    [stream] = make_streams(1)
    writer = StreamWriter(stream)
    for number in range(5):
        with held(stream) as own:
            future = writer.append_nowait(number)
            closing = start(committer.close_all, 30)
            wait_until(lambda: waiting_for_lock("writer"), "it is waited for")
            own.execute("COMMIT")
        closing.result(60)
        assert future.result(0) == number


def test_closing_is_bounded_in_time_and_leaves_nobody_without_an_answer():
    stream, other = make_streams(2)
    with held(stream):
        futures = [StreamWriter(stream).append_nowait(number) for number in range(5000)]
        beside = StreamWriter(other).append_nowait(0)
        waiting = start(StreamWriter(stream).append, "waits")
        wait_until(lambda: waiting_for_lock("writer"), "it is waited for")
        began = time.monotonic()
        committer.close_all(1.0)
        assert time.monotonic() - began < 10
        assert beside.result(0) == 0
        for future in futures:
            assert isinstance(future.exception(30), AppendFailed)
        assert isinstance(waiting.exception(30), AppendFailed)
        wait_until(lambda: not sessions("writer"), "its sessions are gone")
    assert stored(stream) == []
    assert StreamWriter(stream).append(0) == 0


def test_closing_leaves_none_outside_without_an_answer(small):
    [stream] = make_streams(1)
    writer = StreamWriter(stream)
    with held(stream):
        futures = filled(writer)
        waiting = [start(writer.append, number) for number in range(60)]
        wait_until(lambda: len(committer.get("default")._pending._outside) == 60, "they stand outside")
        committer.close_all(0.5)
        errors = [future.exception(30) for future in futures + waiting]
    # On a busy machine the time may be over before the server says that it has given up.
    unknown = [error for error in errors if isinstance(error, AppendUnknown)]
    assert {type(error) for error in errors} - {AppendUnknown} == {AppendFailed}
    assert len(stored(stream)) <= len(unknown)


def test_appends_meet_a_committer_that_is_being_closed_and_nothing_is_lost():
    [stream] = make_streams(1)
    writer = StreamWriter(stream)
    over = threading.Event()

    def close():
        while not over.wait(0.02):
            committer.close_all()

    closing = start(close)
    futures = [writer.append_nowait(number) for number in range(200)]
    offsets = [writer.append(number) for number in range(200, 300)]
    over.set()
    closing.result(30)
    assert sorted(future.result(30) for future in futures) + offsets == list(range(300))
    assert sorted(stored(stream)) == list(range(300))


def test_a_callback_may_append_and_fail(caplog):
    [stream] = make_streams(1)
    writer = StreamWriter(stream)
    more = []

    def go_on(_):
        more.append(writer.append_nowait("more"))
        raise SystemExit

    writer.append_nowait("first").add_done_callback(go_on)
    wait_until(lambda: more, "it is called")
    assert more[0].result(30) == 1
    assert writer.append("last") == 2
    assert "could not be told" in caplog.text


def test_a_callback_that_would_wait_for_itself_is_refused():
    [stream] = make_streams(1)
    writer = StreamWriter(stream)
    refused = []

    def wait(_):
        for attempt in (lambda: writer.append("never"), lambda: writer.__exit__(None, None, None)):
            with pytest.raises(RuntimeError, match="must not wait") as caught:
                attempt()
            refused.append(caught.value)

    writer.append_nowait("first").add_done_callback(wait)
    assert writer.append("next") == 1
    assert len(refused) == 2


def test_a_database_that_is_no_postgres_is_explained():
    [stream] = make_streams(1)
    with (
        alias("lite", ENGINE="django.db.backends.sqlite3", NAME=":memory:") as lite,
        pytest.raises(AppendFailed, match="Streams need Postgres"),
    ):
        StreamWriter(stream, using=lite).append(1)


def test_it_lets_go_of_a_database_that_django_is_about_to_drop():
    [stream] = make_streams(1)
    StreamWriter(stream).append(1)
    assert sessions("writer")
    with connection._nodb_cursor():
        wait_until(lambda: not sessions("writer"), "its session is gone")


def test_other_writers_and_other_programs_share_its_streams():
    """Two processes' worth of committers, the ORM and raw SQL, on the same three streams."""
    streams = make_streams(3)
    User.objects.create(username="beside")
    other = committer.Committer(
        "default",
        timeout_seconds=30,
        idle_seconds=30,
        lock_timeout_seconds=30,
        outage_seconds=30,
        exit_seconds=2,
        max_pending_bytes=2**20,
    )
    futures = []

    def through(add, name):
        for number in range(200):
            for stream in streams:
                futures.append((stream, [name, number], add(stream, [name, number])))

    class Beside(StreamWriter):
        def _add(self, data, reply, loop=None, expected_offset=None, waits=True):
            append = committer.Append(self._stream_id, self._key, b"%d" % data[1], reply)
            assert other.add(append, waits)

    run_all(
        lambda: through(lambda stream, value: StreamWriter(stream).append_nowait(value), "one"),
        lambda: through(lambda stream, value: Beside(stream).append_nowait(value), "two"),
        lambda: [Stream.objects.get(pk=stream.pk).append("orm") for _ in range(30) for stream in streams],
        lambda: [store(stream, 1) for _ in range(30) for stream in streams],
    )
    values = {}
    for stream, value, future in futures:
        offset = future.result(60)
        values = {**values, stream.pk: stored(stream)} if stream.pk not in values else values
        if offset >= len(values[stream.pk]):
            values[stream.pk] = stored(stream)
        assert values[stream.pk][offset] == (value if value[0] == "one" else value[1])
    other.close(5)
    assert [len(stored(stream)) for stream in streams] == [460] * 3


async def test_two_event_loops_share_it():
    stream = await in_thread(Stream.objects.create)(key="loops")
    writer = StreamWriter(stream)

    async def write(name):
        return [await writer.aappend([name, number]) for number in range(100)]

    there = start(lambda: asyncio.run(write("there")))
    here = await write("here")
    offsets = here + await asyncio.wrap_future(there)
    assert sorted(offsets) == list(range(200))
    assert await in_thread(is_stored)(stream, 200)
