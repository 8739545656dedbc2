from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, TransactionTestCase

from django_pgstreams import committer, receivers
from django_pgstreams.exceptions import InvalidPayload, OffsetConflict, StreamClosed, StreamMissing
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.concurrency import run_all, start
from tests.following import in_thread, sessions
from tests.waiting import wait_until
from tests.writing import held, is_stored, make_streams, stored


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="written")


@pytest.fixture
async def astream(alive):
    return await Stream.objects.acreate(key="written")


# Appending -----------------------------------------------------------------------------------------


def test_append_returns_the_offset_once_it_is_committed(stream):
    with StreamWriter(stream) as writer:
        for number in range(5):
            assert writer.append({"number": number}) == number
            assert stored(stream)[-1] == {"number": number}


def test_append_nowait_returns_a_future_of_the_offset(stream):
    with StreamWriter(stream) as writer:
        futures = [writer.append_nowait(number) for number in range(3000)]
        assert all(isinstance(future, Future) for future in futures)
        assert not futures[0].cancel()
    assert [future.result(0) for future in futures] == list(range(3000))
    assert stored(stream) == list(range(3000))


async def test_aappend_returns_the_offset_once_it_is_committed(astream):
    async with StreamWriter(astream) as writer:
        for number in range(3):
            assert await writer.aappend(number) == number
            assert (await in_thread(stored)(astream))[-1] == number
        offsets = await asyncio.gather(*(writer.aappend(number) for number in range(3, 3000)))
    assert offsets == list(range(3, 3000))
    assert await in_thread(stored)(astream) == list(range(3000))


def test_a_writer_needs_no_block(stream):
    writer = StreamWriter(stream)
    assert writer.append("a") == 0
    assert writer.append_nowait("b").result(30) == 1


@pytest.mark.parametrize(
    ("content_type", "values"),
    [
        ("application/json", [None, 1.5, "\0", {"ä": [1, {}]}]),
        ("text/plain", ["", "ä\0€", "x" * 100_000]),
        ("application/octet-stream", [b"", b"\0\xff", b"x" * 100_000]),
    ],
)
def test_values_are_those_of_the_streams_content_type(live, content_type, values):
    stream = Stream.objects.create(key="typed", content_type=content_type)
    with StreamWriter(stream) as writer:
        for value in values:
            writer.append(value)
    assert [chunk.data for chunk in stream.read()] == values


def test_what_is_appended_is_announced_and_wakes_followers(stream, ear):
    chunks = iter(subscribe(stream))
    with StreamWriter(stream) as writer:
        writer.append("a")
        assert next(chunks).data == "a"
        writer.append("b")
        assert next(chunks).data == "b"
    chunks.close()
    receivers.release()
    wait_until(lambda: ear.heard(f"{stream.pk}:2"), "the last wake-up is heard")


def test_only_a_saved_stream_can_be_written_to():
    with pytest.raises(TypeError, match="Stream, not int"):
        StreamWriter(17)
    with pytest.raises(ValueError, match="must be saved"):
        StreamWriter(Stream(key="unsaved"))


# What fails, fails alone ---------------------------------------------------------------------------


def test_a_value_that_cannot_be_stored_is_refused_before_anything_is_sent(stream, settings):
    settings.PGSTREAMS = {"MAX_CHUNK_BYTES": 100}
    with StreamWriter(stream) as writer:
        for bad in (object(), float("nan"), "\ud800", "x" * 100):
            for append in (writer.append, writer.append_nowait):
                with pytest.raises(InvalidPayload):
                    append(bad)
        assert not committer.get("default").batches
        assert writer.append("good") == 0


def test_an_ended_or_missing_stream_fails_its_own_appends_only(live):
    good, closed, deleted = streams = make_streams(3)
    Stream.objects.get(pk=closed.pk).close()
    Stream.objects.filter(pk=deleted.pk).delete()
    blocks = [StreamWriter(stream) for stream in streams]
    futures = [writer.append_nowait(number) for number in range(100) for writer in blocks]
    results = [[future.exception(30) for future in futures[place::3]] for place in range(3)]
    assert results[0] == [None] * 100
    assert {type(error) for error in results[1]} == {StreamClosed}
    assert {error.state for error in results[1]} == {"completed"}
    assert {type(error) for error in results[2]} == {StreamMissing}
    assert stored(good) == list(range(100))
    assert stored(closed) == []


def test_a_stream_that_is_deleted_while_it_is_written_to_is_missing(live):
    stream, other = make_streams(2)
    writer, beside = StreamWriter(stream), StreamWriter(other)
    assert writer.append("a") == 0
    stream.delete()
    assert stream.pk is None
    with pytest.raises(StreamMissing, match="stream/0"):
        writer.append("b")
    assert beside.append("c") == 0


def test_a_stream_that_is_not_committed_yet_is_explained(live):
    with transaction.atomic():
        stream = Stream.objects.create(key="uncommitted")
        future = StreamWriter(stream).append_nowait("too early")
        with pytest.raises(StreamMissing, match=r"not been committed.*TransactionTestCase"):
            future.result(30)


# The block -----------------------------------------------------------------------------------------


def test_leaving_the_block_waits_and_raises_what_failed(stream):
    with pytest.raises(StreamClosed) as caught, StreamWriter(stream) as writer:  # noqa: PT012
        writer.append("a")
        Stream.objects.get(pk=stream.pk).cancel("enough")
        futures = [writer.append_nowait(number) for number in range(3)]
    assert all(future.done() for future in futures)
    assert caught.value.reason == "enough"
    assert "2 later appends" in " ".join(caught.value.__notes__)
    with StreamWriter(stream):
        pass


async def test_leaving_the_async_block_waits_and_raises_what_failed(astream):
    with pytest.raises(StreamClosed):  # noqa: PT012
        async with StreamWriter(astream) as writer:
            first = writer.append_nowait("a")
            await asyncio.wrap_future(first)
            await (await Stream.objects.aget(pk=astream.pk)).acancel()
            last = writer.append_nowait("b")
    assert last.done()


def test_an_error_of_the_body_is_not_hidden_and_what_is_pending_is_stored(stream):
    with pytest.raises(KeyError, match="the body"), StreamWriter(stream) as writer:  # noqa: PT012
        future = writer.append_nowait("a")
        raise KeyError("the body")
    assert future.result(0) == 0
    Stream.objects.get(pk=stream.pk).close()
    with pytest.raises(KeyError, match="the body"), StreamWriter(stream) as writer:  # noqa: PT012
        writer.append_nowait("b")
        raise KeyError("the body")


async def test_an_error_of_the_async_body_is_not_hidden(astream):
    await astream.aclose()
    with pytest.raises(KeyError, match="the body"):  # noqa: PT012
        async with StreamWriter(astream) as writer:
            writer.append_nowait("b")
            raise KeyError("the body")


# Order ---------------------------------------------------------------------------------------------


def test_appends_of_all_threads_keep_their_order(live):
    """20 threads × 100 appends, waited for or not: each offset holds its caller's value (C14)."""
    stream = Stream.objects.create(key="threads")
    writer = StreamWriter(stream)

    def write(thread):
        done = []
        for number in range(100):
            if thread % 2:
                done.append(writer.append([thread, number]))
            else:
                done.append(writer.append_nowait([thread, number]))
        return [one if isinstance(one, int) else one.result(30) for one in done]

    offsets = run_all(*(lambda thread=thread: write(thread) for thread in range(20)))
    values = stored(stream)
    assert len(values) == 2000
    for thread, own in enumerate(offsets):
        assert own == sorted(own)
        assert [values[offset] for offset in own] == [[thread, number] for number in range(100)]


async def test_appends_of_all_tasks_and_loops_keep_their_order(astream):
    writer = StreamWriter(astream)

    async def write(task):
        return [await writer.aappend([task, number]) for number in range(30)]

    def another_loop(first):
        async def both():
            return await asyncio.gather(*(write(task) for task in range(first, first + 10)))

        return asyncio.run(both())

    theirs = [start(another_loop, first) for first in (10, 20)]
    offsets = await asyncio.gather(*(write(task) for task in range(10)))
    offsets += [own for future in theirs for own in await asyncio.wrap_future(future)]
    values = await in_thread(stored)(astream)
    assert len(values) == 900
    for task, own in enumerate(offsets):
        assert own == sorted(own)
        assert [values[offset] for offset in own] == [[task, number] for number in range(30)]


def test_what_is_written_in_both_ways_to_one_stream_has_no_hole(live):
    stream = Stream.objects.create(key="both")
    writer = StreamWriter(stream)

    def through_the_orm(number):
        own = Stream.objects.get(pk=stream.pk)
        for _ in range(40):
            with contextlib.suppress(ZeroDivisionError), transaction.atomic():
                own.append(number)
                assert number != 0 or 1 / 0
        return 40 if number else 0

    def through_the_writer():
        return len({writer.append("w") for _ in range(100)})

    counts = run_all(*(lambda n=n: through_the_orm(n) for n in range(3)), *[through_the_writer] * 3)
    assert len(stored(stream)) == sum(counts) == 380


# Callers that go -----------------------------------------------------------------------------------


async def test_a_cancelled_callers_append_is_stored(astream):
    writer = StreamWriter(astream)
    async with contextlib.AsyncExitStack() as stack:
        await in_thread(stack.enter_context)(held(astream))
        tasks = [asyncio.create_task(writer.aappend(number)) for number in range(3)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert {type(result) for result in await asyncio.gather(*tasks, return_exceptions=True)} == {
            asyncio.CancelledError
        }
    assert await writer.aappend(3) == 3
    assert await in_thread(stored)(astream) == [0, 1, 2, 3]


def test_an_event_loop_that_is_closed_ends_nothing(stream):
    writer = StreamWriter(stream)

    async def leave():
        task = asyncio.create_task(writer.aappend("left"))
        await asyncio.sleep(0)
        task.cancel()

    with held(stream):
        asyncio.run(leave())
    assert writer.append("next") == 1
    assert stored(stream) == ["left", "next"]


def test_all_callers_of_a_loop_are_woken_once_per_batch(stream):
    class CountingLoop(asyncio.SelectorEventLoop):
        woken = 0

        def call_soon_threadsafe(self, *args, **kwargs):
            self.woken += 1
            return super().call_soon_threadsafe(*args, **kwargs)

    loop = CountingLoop()
    writer = StreamWriter(stream)

    async def many():
        return await asyncio.gather(*(writer.aappend(number) for number in range(1000)))

    assert loop.run_until_complete(many()) == list(range(1000))
    assert loop.woken <= committer.get("default").batches <= 20
    loop.close()


# Transactions --------------------------------------------------------------------------------------


def test_nothing_waits_inside_atomic(stream):
    writer = StreamWriter(stream)
    with transaction.atomic():
        for attempt in (lambda: writer.append(1), lambda: writer.pipe([1]), writer.__enter__):
            with pytest.raises(TransactionManagementError, match=r"not wait inside atomic.*stream\.append"):
                attempt()
    assert stored(stream) == []
    assert Stream.objects.get(pk=stream.pk).state == "open"
    assert writer.append(1) == 0


def test_what_is_not_waited_for_is_no_part_of_the_transaction(stream):
    writer = StreamWriter(stream)
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        assert writer.append_nowait("stays").result(30) == 0
        raise ZeroDivisionError
    assert stored(stream) == ["stays"]


class InATestCase(TestCase):
    """Its transactions are no obstacle, but nobody else sees what they created."""

    def tearDown(self):
        receivers.release()

    def test_an_append_may_wait_and_is_told_why_it_sees_no_stream(self):
        stream = Stream.objects.create(key="uncommitted")
        with pytest.raises(StreamMissing, match="TransactionTestCase"):
            StreamWriter(stream).append(1)
        with pytest.raises(StreamMissing, match="TransactionTestCase"):
            StreamWriter(stream).pipe([1])
        with StreamWriter(stream):
            pass

    def test_atomic_inside_of_it_is_an_obstacle(self):
        stream = Stream.objects.create(key="uncommitted")
        with transaction.atomic(), pytest.raises(TransactionManagementError):
            StreamWriter(stream).append(1)


class InATransactionTestCase(TransactionTestCase):
    def tearDown(self):
        receivers.release()

    def test_a_writer_works(self):
        stream = Stream.objects.create(key="committed")
        with StreamWriter(stream) as writer:
            assert writer.append("a") == 0
        assert [chunk.data for chunk in stream.read()] == ["a"]


# Expected offsets ----------------------------------------------------------------------------------


def test_an_append_can_expect_its_offset(stream):
    writer = StreamWriter(stream)
    for number in range(5):
        assert writer.append(number, expected_offset=number) == number
    with pytest.raises(OffsetConflict, match="offset 5, not at the expected 3") as caught:
        writer.append("again", expected_offset=3)
    assert (caught.value.expected, caught.value.actual) == (3, 5)
    assert writer.append_nowait("b", expected_offset=5).result(30) == 5
    assert isinstance(writer.append_nowait("c", expected_offset=5).exception(30), OffsetConflict)
    assert stored(stream) == [0, 1, 2, 3, 4, "b"]


def test_a_conflict_leaves_an_outer_transaction_usable(stream):
    """Nothing is stored, and what the transaction does beside is (C20)."""
    writer = StreamWriter(stream)
    writer.append("a")
    with transaction.atomic():
        other = Stream.objects.create(key="beside")
        with pytest.raises(OffsetConflict):
            writer.append_nowait("b", expected_offset=0).result(30)
        with pytest.raises(OffsetConflict):
            stream.append("c", expected_offset=0)
        other.append("d")
    assert (stored(stream), stored(other)) == (["a"], ["d"])


async def test_aappend_can_expect_its_offset(astream):
    writer = StreamWriter(astream)
    first = [writer.aappend(number, expected_offset=number) for number in range(100)]
    again = [writer.aappend("again", expected_offset=number) for number in range(100)]
    results = await asyncio.gather(*first, *again, return_exceptions=True)
    assert results[:100] == list(range(100))
    assert {type(result) for result in results[100:]} == {OffsetConflict}
    assert await in_thread(stored)(astream) == list(range(100))


def test_a_conflict_in_a_batch_fails_itself_and_what_follows_is_stored(live):
    stream, other = make_streams(2)
    writer, beside = StreamWriter(stream), StreamWriter(other)
    with held(stream):
        plan = [("a", None), ("b", 1), ("x", 7), ("c", 2), ("d", None), ("y", 0), ("e", None), ("f", 5)]
        futures = [writer.append_nowait(value, expected_offset=offset) for value, offset in plan]
        assert beside.append(0) == 0
    results = [future.exception(30) or future.result() for future in futures]
    assert [result for result in results if isinstance(result, int)] == [0, 1, 2, 3, 4, 5]
    assert [type(results[place]) for place in (2, 5)] == [OffsetConflict] * 2
    assert stored(stream) == ["a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize("expected", [2**63, "1", 1.0, -(2**70)])
def test_what_is_no_offset_is_refused_alone(stream, expected):
    writer = StreamWriter(stream)
    other = writer.append_nowait("good")
    with pytest.raises((TypeError, ValueError)):
        writer.append_nowait("bad", expected_offset=expected)
    with pytest.raises(OffsetConflict):
        writer.append("bad", expected_offset=-1)
    assert other.result(30) == 0


def percentile(times, part):
    return sorted(times)[int(len(times) * part)]


# C21 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [6])
async def test_token_streams_do_not_slow_their_producers_and_arrive_in_time(alive, ear, settings, seconds):
    """20 streams of 60 tokens a second each (C21): what a browser's consumer waits for is a subscription."""
    settings.PGSTREAMS = {"FLUSH_INTERVAL_SECONDS": 0.05}
    streams = await in_thread(make_streams)(20, content_type="text/plain")
    loop = asyncio.get_running_loop()
    committed, lags, blocked, delays = {}, [], [], []
    total = 60 * seconds

    async def see_how_late_the_loop_is():
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            delays.append(loop.time() - before - 0.01)

    async def produce(stream):
        async with StreamWriter(stream) as writer:
            began = loop.time()
            for number in range(total):
                await asyncio.sleep(max(0, began + number / 60 - loop.time()))
                before = loop.time()
                future = writer.append_nowait(f"token {number} ")
                future.add_done_callback(
                    lambda done: committed.setdefault((stream.pk, done.result()), loop.time())
                )
                blocked.append(loop.time() - before)
        stored = await Stream.objects.aget(pk=stream.pk)
        assert stored.next_offset == total
        await stored.aclose()

    async def follow(stream):
        text = []
        async for chunk in subscribe(stream):
            arrived = loop.time()
            assert chunk.offset == len(text)
            text.append(chunk.data)
            known = committed.get((stream.pk, chunk.offset), arrived)
            lags.append(arrived - known)
        assert text == [f"token {number} " for number in range(total)]

    began = loop.time()
    seeing = asyncio.create_task(see_how_late_the_loop_is())
    await asyncio.gather(*(work(stream) for stream in streams for work in (produce, follow)))
    seeing.cancel()
    took = loop.time() - began
    await sync_to_async(receivers.release)()
    heard = await in_thread(ear.hear)()
    # A busy machine makes everything late.
    late = percentile(delays, 0.95)
    assert percentile(lags, 0.95) < 0.25 + 4 * late
    assert percentile(blocked, 0.95) < 0.01 + late
    assert len(heard) <= took / 0.05 + 2


def test_threads_of_the_writer_are_few(live):
    streams = make_streams(30)
    run_all(*(lambda stream=stream: StreamWriter(stream).append(1) for stream in streams))
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("pgstreams-writer")]
    assert names == ["pgstreams-writer"]
    assert len(sessions("writer")) == 1
    assert all(is_stored(stream, 1) for stream in streams)
