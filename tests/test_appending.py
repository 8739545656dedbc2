"""Appending and closing against a real Postgres, with real threads and real commits."""

from __future__ import annotations

import decimal
import functools
import itertools
import json
import random
import threading
import time
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest
from django.core import serializers
from django.core.management import call_command
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pgstreams import codec, receivers
from django_pgstreams.exceptions import (
    InvalidPayload,
    OffsetConflict,
    StreamBusy,
    StreamClosed,
    StreamGap,
    StreamMissing,
)
from django_pgstreams.models import Chunk, Stream
from django_pgstreams.writer import StreamWriter
from tests.concurrency import DEADLINE_SECONDS, in_this_thread, run_all, start
from tests.following import connect, query
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

WAITING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
"""Sessions that wait for another one's lock."""


@pytest.fixture
def stream() -> Stream:
    return Stream.objects.create(key="s")


def stored(stream: Stream) -> list[tuple[int, object]]:
    return [(chunk.offset, chunk.data) for chunk in Chunk.objects.filter(stream=stream).order_by("offset")]


def execute(statement: str, *parameters: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)


def value(statement: str, *parameters: object) -> object:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchone()[0]


def insert_behind_its_back(stream: Stream, *offsets: int) -> None:
    """A raw INSERT that does not advance the counter."""
    for offset in offsets:
        execute("INSERT INTO pgstreams_chunk VALUES (%s, %s, %s)", stream.pk, offset, b'"stray"')


class Holder:
    """Another session that appends to a stream and keeps its transaction open until released."""

    def __init__(self, stream: Stream) -> None:
        self._stream_id = stream.pk
        self._holds = threading.Event()
        self._release = threading.Event()
        self._future: Future = start(self._run)
        assert self._holds.wait(DEADLINE_SECONDS), self._future

    def _run(self) -> None:
        with transaction.atomic():
            Stream.objects.get(pk=self._stream_id).append("held")
            self._holds.set()
            assert self._release.wait(4 * DEADLINE_SECONDS)

    def release(self) -> None:
        self._release.set()
        self._future.result(DEADLINE_SECONDS)


@pytest.fixture
def hold():
    holders: list[Holder] = []

    def take(stream: Stream) -> Holder:
        holders.append(Holder(stream))
        return holders[-1]

    yield take
    for holder in holders:
        holder.release()


# Many at once --------------------------------------------------------------------------------------


def test_twenty_threads_append_a_hundred_each(stream):
    def append(number: int) -> list[tuple[int, dict]]:
        mine = Stream.objects.get(key="s")
        return [(mine.append({"by": number, "i": i}).offset, {"by": number, "i": i}) for i in range(100)]

    returned = list(itertools.chain(*run_all(*(functools.partial(append, n) for n in range(20)))))
    assert sorted(returned, key=lambda pair: pair[0]) == stored(stream)
    assert [offset for offset, _ in stored(stream)] == list(range(2000))
    stream.refresh_from_db()
    assert stream.next_offset == 2000


def test_the_same_within_transactions_that_write_other_rows_and_roll_back(stream):
    def append(number: int) -> list[tuple[int, object]]:
        chance, kept = random.Random(number), []
        mine = Stream.objects.get(key="s")
        for i in range(25):
            undone = chance.random() < 0.2
            with transaction.atomic():
                Stream.objects.create(key=f"work/{number}/{i}")
                chunks = [mine.append([number, i]), *mine.append_many([[number, i, 1], [number, i, 2]])]
                Stream.objects.filter(key=f"work/{number}/{i}").update(metadata={"done": True})
                transaction.set_rollback(undone)
            kept += [] if undone else [(chunk.offset, chunk.data) for chunk in chunks]
        return kept

    returned = list(itertools.chain(*run_all(*(functools.partial(append, n) for n in range(12)))))
    assert sorted(returned, key=lambda pair: pair[0]) == stored(stream)
    assert [offset for offset, _ in stored(stream)] == list(range(len(returned)))
    assert 0 < len(returned) < 12 * 25 * 3
    assert Stream.objects.filter(metadata={"done": True}).count() == len(returned) // 3


@pytest.mark.parametrize("attempt", range(10))
def test_two_threads_create_the_stream_by_their_first_append(attempt):
    def append(data: str) -> int:
        mine, _ = Stream.objects.get_or_create(key="new")
        return mine.append(data).offset

    offsets = run_all(lambda: append("a"), lambda: append("b"))
    assert sorted(offsets) == [0, 1]
    assert sorted(data for _, data in stored(Stream.objects.get())) == ["a", "b"]


def test_within_atomic_the_first_append_of_two_creates_too():
    def append(data: str) -> int:
        with transaction.atomic():
            mine, _ = Stream.objects.get_or_create(key="new")
            return mine.append(data).offset

    assert sorted(run_all(lambda: append("a"), lambda: append("b"))) == [0, 1]
    assert len(stored(Stream.objects.get(key="new"))) == 2


# Locks ---------------------------------------------------------------------------------------------


def test_a_deadlock_ends_with_one_retriable_error_and_no_hole():
    a, b = Stream.objects.create(key="a"), Stream.objects.create(key="b")
    both_hold_one = threading.Barrier(2)

    def append(first: Stream, second: Stream, data: str) -> float | None:
        """The time until it was told of the deadlock, or None when it committed."""
        one, two = Stream.objects.get(pk=first.pk), Stream.objects.get(pk=second.pk)
        begun = 0.0
        try:
            with transaction.atomic():
                one.append(data)
                both_hold_one.wait(DEADLINE_SECONDS)
                begun = time.monotonic()
                two.append(data)
        except OperationalError as error:
            if not isinstance(error.__cause__, psycopg.errors.DeadlockDetected):
                raise
            return time.monotonic() - begun
        return None

    told = run_all(lambda: append(a, b, "t1"), lambda: append(b, a, "t2"))
    assert sorted(waited is None for waited in told) == [False, True]
    deadlock_timeout = float(
        value("SELECT extract(epoch FROM current_setting('deadlock_timeout')::interval)")
    )
    assert next(filter(None, told)) < deadlock_timeout + 5
    winner, loser = ("t1", "t2") if told[0] is None else ("t2", "t1")
    for stream in (a, b):
        assert stored(stream) == [(0, winner)]
        assert stream.append(f"{loser} again").offset == 1


def test_bulk_create_over_the_same_streams_in_any_order_never_deadlocks():
    a, b = Stream.objects.create(key="a"), Stream.objects.create(key="b")

    def append(keys: list[str]) -> None:
        streams = [Stream.objects.get(key=key) for key in keys]
        for number in range(500):
            Chunk.objects.bulk_create([Chunk(stream=stream, data=number) for stream in streams])

    run_all(lambda: append(["a", "b"]), lambda: append(["b", "a"]))
    for stream in (a, b):
        assert [offset for offset, _ in stored(stream)] == list(range(1000))


def test_readers_and_lists_do_not_wait_for_a_writer(stream, hold):
    stream.append("before")
    hold(stream)
    with transaction.atomic():
        execute("SET LOCAL lock_timeout = '1ms'")  # any wait for a lock is an error now
        assert [chunk.data for chunk in stream.read()] == ["before"]
        assert list(Stream.objects.select_related("owner").order_by("-pk")[:100]) == [stream]
        assert Chunk.objects.filter(stream=stream).order_by("-offset")[0].data == "before"
        assert Stream.objects.create(key="another").append("not held up").offset == 0


def test_a_row_lock_of_one_stream_does_not_hold_up_another(stream, hold):
    other = Stream.objects.create(key="other")
    holder = hold(stream)
    assert [other.append(n).offset for n in range(3)] == [0, 1, 2]
    waiting = start(lambda: Stream.objects.get(key="s").append("waited").offset)
    assert not waiting.done()
    holder.release()
    assert waiting.result(DEADLINE_SECONDS) == 1


# Refusals ------------------------------------------------------------------------------------------


def closed(stream: Stream) -> Stream:
    stream.fail("no disk")
    return stream


def closed_elsewhere(stream: Stream) -> Stream:
    Stream.objects.get(pk=stream.pk).fail("no disk")
    return stream


def deleted(stream: Stream) -> Stream:
    stream.delete()
    return stream


def deleted_elsewhere(stream: Stream) -> Stream:
    Stream.objects.all().delete()
    return stream


def never_saved(stream: Stream) -> Stream:
    return Stream(key="s", pk=stream.pk + 1000)


def never_saved_and_without_id(stream: Stream) -> Stream:
    return Stream(key="s")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (closed, StreamClosed, r"'s' is failed \(no disk\)"),
        (closed_elsewhere, StreamClosed, r"'s' is failed \(no disk\)"),
        (deleted, StreamMissing, "'s' does not exist"),
        (deleted_elsewhere, StreamMissing, "'s' does not exist"),
        (never_saved, StreamMissing, "'s' does not exist"),
        (never_saved_and_without_id, StreamMissing, "'s' does not exist"),
    ],
)
def test_a_stream_that_takes_no_chunks_says_so_and_leaves_the_transaction_usable(
    stream, make, error, message
):
    unusable = make(stream)
    other = Stream.objects.create(key="other")
    with transaction.atomic():
        for refused in (
            lambda: unusable.append(1),
            lambda: unusable.append(1, close=True),
            lambda: unusable.append(1, expected_offset=0),
            lambda: unusable.append_many([1, 2]),
            lambda: unusable.append_many([], close=True),
            lambda: unusable.append_many([], expected_offset=0),
            lambda: Chunk.objects.create(stream=unusable, data=1),
            lambda: unusable.chunks.create(data=1) if unusable.pk else unusable.append(1),
            unusable.close,
            lambda: unusable.fail("again"),
            unusable.cancel,
        ):
            with pytest.raises(error, match=message):
                refused()
            assert other.append(1)
        with pytest.raises(error, match=message):
            Chunk.objects.bulk_create([Chunk(stream=other, data=1), Chunk(stream=unusable, data=1)])
    assert len(stored(other)) == 11
    assert value("SELECT count(*) FROM pgstreams_chunk") == 11


def test_a_closed_stream_tells_how_it_ended(stream):
    other = Stream.objects.get()
    stream.cancel("enough")
    with pytest.raises(StreamClosed) as caught:
        other.append(1)
    assert (caught.value.state, caught.value.reason) == ("cancelled", "enough")


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"t": "\ud83d"}, "data['t']"),
        ({"\udc00": 1}, r"data['\udc00'] (the key)"),
        ({"x": float("nan")}, "data['x']"),
        ({"x": [1, float("-inf")]}, "data['x'][1]"),
        ({"x": decimal.Decimal("NaN")}, "data['x']"),
        ([type("Float64", (float,), {})("nan")], "data[0]"),
        ({"x": object()}, "data['x']"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_sql_with_its_place(stream, data, place):
    with transaction.atomic():
        with CaptureQueriesContext(connection) as queries:
            for refused in (
                lambda: stream.append(data),
                lambda: Chunk.objects.create(stream=stream, data=data),
                lambda: Chunk(stream=stream, data=data).save(),
            ):
                with pytest.raises(InvalidPayload) as caught:
                    refused()
                assert str(caught.value).startswith(place)
            with pytest.raises(InvalidPayload) as caught:
                stream.append_many(["ok", data, "ok"])
            assert str(caught.value).startswith(f"Value 1: {place}")
        assert len(queries) == 0
        assert stream.append("next").offset == 0
    assert stored(stream) == [(0, "next")]


@pytest.mark.parametrize(
    "data", [{"t": "\0"}, {"a\0": 1}, "😀", {"😀": "👩\u200d🚀"}, "\\u0000", {"t": "\\u0000 \0 \\\0"}]
)
def test_what_jsonb_could_not_store_is_stored_and_delivered_unchanged(stream, data):
    stream.append(data)
    [chunk] = stream.read()
    assert chunk.data == data
    assert json.loads(codec.splice(stream.content_type, chunk.payload)) == data


@pytest.mark.parametrize(
    ("content_type", "data"),
    [("application/json", "x" * 99), ("text/plain", "x" * 101), ("image/png", b"x" * 101)],
)
def test_a_chunk_over_the_limit_is_refused_with_its_size_and_the_setting(settings, content_type, data):
    settings.PGSTREAMS = {"MAX_CHUNK_BYTES": 100}
    stream = Stream.objects.create(key="big", content_type=content_type)
    payload = codec.encode(content_type, data)
    with transaction.atomic():
        for refused in (
            lambda: stream.append(data),
            lambda: stream.append_many([data[:5], data]),
            lambda: Chunk(stream=stream, payload=payload).save(),
            lambda: Chunk.objects.bulk_create([Chunk(stream=stream, payload=payload)]),
        ):
            with pytest.raises(InvalidPayload, match=r"101 bytes.*MAX_CHUNK_BYTES.*100") as caught:
                refused()
        assert "101" in str(caught.value)
        assert stream.append(data[:-1]).offset == 0
    assert stored(stream) == [(0, data[:-1])]


def test_the_limit_is_one_mebibyte_and_counts_bytes():
    stream = Stream.objects.create(key="big", content_type="text/plain")
    assert stream.append("x" * 1024 * 1024).offset == 0
    with pytest.raises(InvalidPayload, match=r"1,048,577 bytes.*MAX_CHUNK_BYTES.*1,048,576"):
        stream.append("x" * 1024 * 1024 + "y")
    with pytest.raises(InvalidPayload, match=r"2,000,000 bytes"):
        stream.append("é" * 1_000_000)
    assert len(stored(stream)) == 1


def test_a_batch_larger_than_a_statement_is_still_all_or_nothing(stream, monkeypatch):
    monkeypatch.setattr("django_pgstreams.store._STATEMENT_BYTES", 1000)
    chunks = stream.append_many(["x" * 300] * 10, expected_offset=0, close=True)
    assert [chunk.offset for chunk in chunks] == list(range(10))
    stream.refresh_from_db()
    assert (stream.next_offset, stream.state) == (10, "completed")
    other = Stream.objects.create(key="other")
    insert_behind_its_back(other, 5)
    assert [chunk.offset for chunk in other.append_many(["x" * 300] * 10)] == list(range(6, 16))


# Conditions ----------------------------------------------------------------------------------------


def test_an_expected_offset_makes_an_append_conditional(stream):
    assert stream.append("a", expected_offset=0).offset == 0
    assert [chunk.offset for chunk in stream.append_many(["b", "c"], expected_offset=1)] == [1, 2]
    stream.append_many(["d", "e"])
    with transaction.atomic():
        for append in (
            lambda: stream.append("x", expected_offset=3),
            lambda: stream.append("x", expected_offset=6),
            lambda: stream.append("x", expected_offset=3, close=True),
            lambda: stream.append_many(["x", "y"], expected_offset=3),
            lambda: stream.append_many([], expected_offset=3),
        ):
            with pytest.raises(OffsetConflict, match="at offset 5") as caught:
                append()
            assert caught.value.actual == 5
        assert stream.append("f", expected_offset=5).offset == 5
    assert [data for _, data in stored(stream)] == list("abcdef")


def test_a_task_that_runs_twice_stores_once(stream):
    def task() -> int:
        return sum(
            stream.append(data, expected_offset=offset) is not None
            for offset, data in enumerate("abc")
            if offset >= Stream.objects.get().next_offset
        )

    assert [task(), task()] == [3, 0]
    assert [data for _, data in stored(stream)] == list("abc")


def test_of_many_writers_that_expect_the_same_offset_one_wins(stream):
    def append(number: int) -> tuple[int, int] | None:
        """The expected and the actual offset of a conflict, or None when it stored."""
        try:
            Stream.objects.get().append(number, expected_offset=0)
        except OffsetConflict as error:
            return error.expected, error.actual
        return None

    conflicts = run_all(*(functools.partial(append, n) for n in range(8)))
    assert sorted(conflicts, key=str) == [(0, 1)] * 7 + [None]
    assert stored(stream) == [(0, conflicts.index(None))]


# Several at once -----------------------------------------------------------------------------------


def test_append_many_takes_consecutive_offsets_even_of_an_iterator(stream):
    chunks = stream.append_many(iter([1, 2, 3]))
    assert [(chunk.offset, chunk.data) for chunk in chunks] == stored(stream) == [(0, 1), (1, 2), (2, 3)]
    assert all(chunk.stream is stream and not chunk._state.adding for chunk in chunks)
    assert stream.next_offset == 3


def test_an_empty_append_many_does_nothing_or_only_closes(stream, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert stream.append_many([]) == []
    assert stream.append_many([], expected_offset=0) == []
    assert stream.append_many(iter(()), close=True) == []
    stream.refresh_from_db()
    assert (stream.state, stream.next_offset, stream.appended_at) == ("completed", 0, None)


def test_bulk_create_serves_several_streams_in_the_order_given(stream):
    other = Stream.objects.create(key="other")
    stream.append("first")
    order = [other, stream, other, other, stream]
    chunks = Chunk.objects.bulk_create([Chunk(stream=s, data=n) for n, s in enumerate(order)])
    assert [(chunk.stream.key, chunk.offset) for chunk in chunks] == [
        *[("other", 0), ("s", 1), ("other", 1), ("other", 2), ("s", 2)]
    ]
    assert stored(stream) == [(0, "first"), (1, 1), (2, 4)]
    assert stored(other) == [(0, 0), (1, 2), (2, 3)]
    assert (stream.next_offset, other.next_offset) == (3, 3)


def test_bulk_create_is_all_or_nothing_and_can_be_tried_again(stream):
    other = Stream.objects.create(key="other")
    other.close()
    chunks = [Chunk(stream=stream, data=1), Chunk(stream=other, data=2)]
    with pytest.raises(StreamClosed):
        Chunk.objects.bulk_create(chunks)
    assert stored(stream) == []
    assert [chunk.offset for chunk in chunks] == [None, None]
    assert stream.next_offset == 0
    assert Chunk.objects.bulk_create(chunks[:1])[0].offset == 0


def test_bulk_create_of_nothing_and_over_instances_of_one_stream(stream):
    assert Chunk.objects.bulk_create([]) == []
    one, two = Stream.objects.get(), Stream.objects.get()
    Chunk.objects.bulk_create([Chunk(stream=one, data=1), Chunk(stream=two, data=2)], batch_size=1)
    assert stored(stream) == [(0, 1), (1, 2)]
    assert (one.next_offset, two.next_offset) == (2, 2)


# Transactions --------------------------------------------------------------------------------------


def test_an_append_is_one_statement(stream):
    for append, count in (
        (lambda: stream.append(1), 1),
        (lambda: stream.append(2, expected_offset=1), 1),
        (lambda: stream.append_many(range(500)), 1),
        (lambda: stream.append(3, close=True), 1),
    ):
        with CaptureQueriesContext(connection) as queries:
            append()
        assert len(queries) == count, [query["sql"][:100] for query in queries]


def test_a_rolled_back_append_leaves_no_hole(stream):
    with transaction.atomic():
        assert [stream.append(n).offset for n in range(3)] == [0, 1, 2]
        transaction.set_rollback(True)
    with transaction.atomic():
        assert stream.append("kept").offset == 0
        with transaction.atomic():
            assert stream.append("undone").offset == 1
            transaction.set_rollback(True)
        assert stream.append("kept too").offset == 1
    assert stored(stream) == [(0, "kept"), (1, "kept too")]


def test_above_read_committed_a_conflict_is_postgres_error_and_a_retry_works(stream):
    def attempt(*, conflict: bool) -> int:
        with transaction.atomic():
            execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            assert Stream.objects.count() == 1  # takes the snapshot
            if conflict:
                run_all(lambda: Stream.objects.get().append("theirs"))
            return stream.append("mine").offset

    with pytest.raises(OperationalError) as caught:
        attempt(conflict=True)
    assert isinstance(caught.value.__cause__, psycopg.errors.SerializationFailure)
    assert attempt(conflict=False) == 1
    assert stored(stream) == [(0, "theirs"), (1, "mine")]


def test_serializable_writers_that_retry_store_everything_once(stream):
    def append(number: int) -> None:
        for i in range(10):
            while True:
                try:
                    with transaction.atomic():
                        execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                        Stream.objects.get().append([number, i])
                    break
                except OperationalError as error:
                    if not isinstance(error.__cause__, psycopg.errors.SerializationFailure):
                        raise

    run_all(*(functools.partial(append, n) for n in range(4)))
    assert [offset for offset, _ in stored(stream)] == list(range(40))
    assert sorted(data for _, data in stored(stream)) == [[n, i] for n in range(4) for i in range(10)]


def test_counter_updates_stay_on_their_page_and_touch_no_index(stream):
    def updates() -> tuple[int, int]:
        execute("SELECT pg_stat_force_next_flush()")
        execute("SELECT pg_stat_clear_snapshot()")
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'pgstreams_stream'"
            )
            return cursor.fetchone()

    streams = [stream, *(Stream.objects.create(key=f"hot/{n}") for n in range(9))]

    def share_of_hot_updates() -> float:
        before = updates()
        for _ in range(30):
            for each in streams:
                each.append("x")
        wait_until(lambda: updates()[0] - before[0] >= 300, "the statistics have arrived")
        all_updates, hot_updates = (after - then for after, then in zip(updates(), before, strict=True))
        return hot_updates / all_updates

    # An autovacuum at that moment holds a snapshot, so that old versions have to stay for a while.
    wait_until(lambda: share_of_hot_updates() > 0.95, "counter updates are HOT")


def test_the_statements_take_bound_parameters_as_well_as_literal_ones(stream):
    """Django binds on the client's side, unless `server_side_binding` is set; raw connections do not."""
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    connection.settings_dict["OPTIONS"] = {**options, "server_side_binding": True}
    try:
        assert stream.append("a").offset == 0
        assert [chunk.offset for chunk in stream.append_many(["b", "c"], expected_offset=1)] == [1, 2]
        assert [chunk.data for chunk in stream.read(1)] == ["b", "c"]
        with pytest.raises(OffsetConflict):
            stream.append("x", expected_offset=1)
        with pytest.raises(StreamMissing):
            Stream(key="never saved").append("x")
        insert_behind_its_back(stream, 3)
        assert stream.append("d").offset == 4
        stream.cancel("enough")
        with pytest.raises(StreamClosed):
            stream.append("x")
        stream.delete()
    finally:
        connection.close()
        connection.settings_dict["OPTIONS"] = options
    assert value("SELECT count(*) FROM pgstreams_chunk") == 0


# Closing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (lambda stream: stream.close(), "completed", ""),
        (lambda stream: stream.fail("no disk"), "failed", "no disk"),
        (lambda stream: stream.cancel(), "cancelled", ""),
        (lambda stream: stream.cancel("enough"), "cancelled", "enough"),
        (lambda stream: stream.close(lock_timeout_seconds=1), "completed", ""),
        (lambda stream: stream.append("last", close=True), "completed", ""),
        (lambda stream: stream.append_many(["last"], close=True), "completed", ""),
    ],
)
def test_a_stream_ends_once(stream, end, state, reason):
    other = Stream.objects.get()
    end(stream)
    assert (stream.state, stream.reason) == (state, reason)
    stream.refresh_from_db()
    assert (stream.state, stream.reason) == (state, reason)
    assert stream.closed_at is not None
    ended_at = stream.closed_at
    for again in (stream.close, lambda: stream.fail("x"), stream.cancel, other.close, other.cancel):
        with pytest.raises(StreamClosed) as caught:
            again()
        assert (caught.value.state, caught.value.reason) == (state, reason)
    stream.refresh_from_db()
    assert (stream.state, stream.reason, stream.closed_at) == (state, reason, ended_at)


def test_of_many_that_end_a_stream_one_succeeds(stream):
    def end(number: int) -> str | None:
        mine = Stream.objects.get()
        try:
            mine.fail(f"by {number}")
        except StreamClosed as error:
            return error.reason
        return None

    told = run_all(*(functools.partial(end, n) for n in range(8)))
    assert told.count(None) == 1
    assert set(told) == {None, f"by {told.index(None)}"}


def test_a_reason_that_postgres_cannot_store_still_ends_the_stream(stream):
    stream.fail("exit 1: \0 and half \ud83d, 😀")
    stream.refresh_from_db()
    assert (stream.state, stream.reason) == ("failed", "exit 1: \ufffd and half \ufffd, 😀")


def test_the_writer_is_told_that_it_was_cancelled(stream):
    writer = Stream.objects.get()
    writer.append(1)
    stream.cancel("enough")
    assert stream.next_offset == 1
    with pytest.raises(StreamClosed) as caught:
        writer.append(2)
    assert (caught.value.state, caught.value.reason) == ("cancelled", "enough")


@in_this_thread
async def test_the_async_twins_of_ending():
    for key, end, state in (
        ("a", lambda s: s.aclose(), "completed"),
        ("b", lambda s: s.afail("no disk"), "failed"),
        ("c", lambda s: s.acancel("enough"), "cancelled"),
        ("d", lambda s: s.aappend("last", close=True, expected_offset=0), "completed"),
        ("e", lambda s: s.aappend_many(["last"], close=True, expected_offset=0), "completed"),
        ("f", lambda s: s.acancel(lock_timeout_seconds=1), "cancelled"),
        ("g", lambda s: s.aclose(lock_timeout_seconds=1), "completed"),
    ):
        stream = await Stream.objects.acreate(key=key)
        await end(stream)
        await stream.arefresh_from_db()
        assert stream.state == state
        with pytest.raises(StreamClosed):
            await stream.aappend("late")


# Cancelling behind a long transaction --------------------------------------------------------------


def test_cancel_behind_a_writers_transaction_is_busy_after_the_timeout(stream, hold, settings):
    settings.PGSTREAMS = {"LOCK_TIMEOUT_SECONDS": 0.3}
    holder = hold(stream)
    for end in (stream.cancel, lambda: stream.close(lock_timeout_seconds=0.3)):
        begun = time.monotonic()
        with pytest.raises(StreamBusy, match=r"'s' for 0\.3 s; try again"):
            end()
        assert 0.3 <= time.monotonic() - begun < 10
    holder.release()
    stream.cancel()
    assert (stream.state, stream.next_offset) == ("cancelled", 1)


@pytest.mark.parametrize("seconds", [0, 0.0001])
def test_a_timeout_near_zero_is_no_endless_one(stream, hold, seconds):
    hold(stream)
    begun = time.monotonic()
    with pytest.raises(StreamBusy):
        stream.cancel(lock_timeout_seconds=seconds)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("before", ["0", "1234ms", "5s"])
def test_a_busy_cancel_leaves_the_callers_transaction_and_lock_timeout(stream, hold, before):
    other = Stream.objects.create(key="other")
    hold(stream)
    with transaction.atomic():
        execute(f"SET LOCAL lock_timeout = '{before}'")
        other.append(1)
        with pytest.raises(StreamBusy):
            stream.cancel(lock_timeout_seconds=0.05)
        assert value("SHOW lock_timeout") == before
        other.cancel()
        assert value("SHOW lock_timeout") == before
    assert value("SHOW lock_timeout") == "0"
    other.refresh_from_db()
    assert (other.state, other.next_offset) == ("cancelled", 1)
    stream.refresh_from_db()
    assert stream.state == "open"


def test_a_sessions_own_lock_timeout_survives_a_cancel(stream, hold):
    hold(stream)
    execute("SET lock_timeout = '7s'")
    try:
        with pytest.raises(StreamBusy):
            stream.cancel(lock_timeout_seconds=0.05)
        assert value("SHOW lock_timeout") == "7s"
        Stream.objects.create(key="other").cancel()
        assert value("SHOW lock_timeout") == "7s"
    finally:
        connection.close()


# What did not come through the app -----------------------------------------------------------------


def test_an_append_goes_on_after_rows_that_skipped_the_counter(stream):
    stream.append("mine")
    insert_behind_its_back(stream, 1, 2, 3)
    assert stream.append("mine again").offset == 4
    assert [offset for offset, _ in stored(stream)] == list(range(5))
    insert_behind_its_back(stream, 5)
    with transaction.atomic():
        Stream.objects.create(key="other work")
        assert [chunk.offset for chunk in stream.append_many([1, 2])] == [6, 7]
    insert_behind_its_back(stream, 8)
    assert Chunk.objects.bulk_create([Chunk(stream=stream, data=1)])[0].offset == 9
    assert stream.next_offset == 10


def test_an_expected_offset_where_a_stray_row_is_conflicts(stream):
    insert_behind_its_back(stream, 0)
    with transaction.atomic():
        with pytest.raises(OffsetConflict, match="at offset 1") as caught:
            stream.append("x", expected_offset=0)
        assert (caught.value.expected, caught.value.actual) == (0, 1)
        assert stream.append("x", expected_offset=1).offset == 1


def test_a_row_beyond_the_tail_is_in_the_way_of_several_only(stream):
    far = 10**15
    insert_behind_its_back(stream, far)
    assert [stream.append("one").offset, stream.append("by one").offset] == [0, 1]
    assert [chunk.offset for chunk in stream.append_many(["two", "more"])] == [far + 1, far + 2]
    with pytest.raises(StreamGap) as caught:
        list(stream.read())
    assert (caught.value.requested, caught.value.first) == (2, far)
    assert [chunk.data for chunk in stream.read(far)] == ["stray", "two", "more"]


@pytest.mark.parametrize("given", [{}, {"close": True}, {"expected_offset": 0}], ids=str)
def test_an_append_waits_for_a_row_in_its_way_that_is_not_committed_yet(stream, given):
    with connect() as own:
        with own.transaction():
            own.execute("INSERT INTO pgstreams_chunk VALUES (%s, 0, %s)", (stream.pk, b'"stray"'))
            appending = start(lambda: append_in_a_transaction(stream, given))
            wait_until(lambda: query(WAITING), "the append waits")
        assert appending.result(60) == ("conflict" if "expected_offset" in given else 1)
    stream.refresh_from_db()
    assert stream.state == ("completed" if "close" in given else "open")


def append_in_a_transaction(stream: Stream, given: dict[str, Any]) -> int | str:
    """The offset, or "conflict"; fails unless the transaction is usable afterwards."""
    with transaction.atomic():
        try:
            return Stream.objects.get(pk=stream.pk).append("mine", **given).offset
        except OffsetConflict:
            return "conflict"
        finally:
            assert value("SELECT 1") == 1


@pytest.fixture
def tallied(stream):
    """Each chunk that is stored is counted in its stream's row, by a trigger."""
    execute(
        """
        CREATE FUNCTION tally() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            UPDATE pgstreams_stream SET metadata = jsonb_build_object('last', new."offset")
            WHERE id = new.stream_id;
            RETURN NULL;
        END $$;
        CREATE TRIGGER tally AFTER INSERT ON pgstreams_chunk FOR EACH ROW EXECUTE FUNCTION tally();
        """
    )
    yield
    receivers.release()
    execute("DROP FUNCTION tally CASCADE")


@pytest.mark.usefixtures("tallied")
def test_a_trigger_on_chunks_may_update_the_streams_row(stream):
    assert value("SELECT pgstreams_append('s', '1')") == 0
    insert_behind_its_back(stream, 1)
    assert value("SELECT pgstreams_append('s', '2')") == 2
    assert stream.append(3).offset == 3
    assert [chunk.offset for chunk in stream.append_many([4, 5])] == [4, 5]
    assert StreamWriter(stream).append(6) == 6
    stream.append(7, close=True)
    stream.refresh_from_db()
    assert (stream.next_offset, stream.state, stream.metadata) == (8, "completed", {"last": 7})
    assert [chunk.data for chunk in stream.read()] == [1, "stray", 2, 3, 4, 5, 6, 7]


def test_threads_that_meet_stray_rows_at_once_all_go_on(stream):
    insert_behind_its_back(stream, *range(10))

    def append(number: int) -> list[int]:
        mine = Stream.objects.get()
        return [mine.append([number, i]).offset for i in range(10)]

    offsets = itertools.chain(*run_all(*(functools.partial(append, n) for n in range(8))))
    assert sorted(offsets) == list(range(10, 90))


def test_a_raw_insert_that_advances_the_counter_in_its_statement_is_an_append(stream):
    execute(
        """
        WITH taken AS (
            UPDATE pgstreams_stream SET next_offset = next_offset + 1 WHERE key = 's' AND state = 'open'
            RETURNING id, next_offset - 1 AS "offset"
        )
        INSERT INTO pgstreams_chunk (stream_id, "offset", payload)
        SELECT id, "offset", convert_to('"by hand"', 'UTF8') FROM taken
        """
    )
    assert stream.append("by Django").offset == 1
    assert stored(stream) == [(0, "by hand"), (1, "by Django")]
    assert all(chunk.created_at is not None for chunk in stream.read())


@pytest.mark.parametrize(
    ("count", "counted"), [(10_000, True), (500, False)], ids=["with the stream's counter", "without"]
)
def test_after_loaddata_the_next_append_goes_on(stream, tmp_path, count, counted):
    stream.append_many(range(count))
    objects = json.loads(serializers.serialize("json", [stream, *Chunk.objects.all()]))
    if not counted:
        del objects[0]["fields"]["next_offset"]
    fixture = tmp_path / "chunks.json"
    fixture.write_text(json.dumps(objects))
    stream.delete()
    call_command("loaddata", fixture, verbosity=0)
    loaded = Stream.objects.get()
    assert loaded.epoch == stream.epoch
    assert loaded.append("next").offset == count
    assert [chunk.data for chunk in loaded.read()] == [*range(count), "next"]


def test_loading_a_fixture_over_its_stream_does_not_make_it_fail(stream, tmp_path):
    stream.append_many(range(3))
    fixture = tmp_path / "stream.json"
    fixture.write_text(serializers.serialize("json", [stream]))
    stream.append_many(range(3, 6))
    call_command("loaddata", fixture, verbosity=0)  # rewinds the counter, as everything in the row
    assert Stream.objects.get().append(6).offset == 6
    assert [data for _, data in stored(stream)] == list(range(7))
