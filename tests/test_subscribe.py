from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction

from django_pgstreams import hub, listener
from django_pgstreams.buffer import Batch, WakeUp
from django_pgstreams.exceptions import StreamGap, StreamMissing, StreamReset
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Chunk, Stream
from tests.concurrency import start
from tests.following import (
    connect,
    in_thread,
    is_listening,
    query,
    sessions,
    store,
    trim,
    until,
    waiting_for_lock,
    writer,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("live")


@pytest.fixture
def stream(live):
    """A stream with the chunks 0 … 9, each with its offset as its value."""
    made = Stream.objects.create(key="chat/17")
    made.append_many(range(10))
    return made


def followers():
    return sum(one.followers for one in hub._all())


def offsets(chunks):
    return [chunk.offset for chunk in chunks]


def take(subscription, count):
    """The offsets of the next chunks, as a blocking reader gets them."""
    taken = []
    for chunk in subscription:
        taken.append(chunk.offset)
        if len(taken) == count:
            break
    return taken


async def atake(subscription, count):
    taken = []
    async for chunk in subscription:
        taken.append(chunk.offset)
        if len(taken) == count:
            break
    return taken


# What a subscription yields ------------------------------------------------------------------------


def test_it_yields_what_is_stored_and_then_what_comes_until_the_end(stream):
    reading = start(lambda: [(chunk.offset, chunk.data) for chunk in subscribe(stream)])
    wait_until(followers, "the reader follows")
    stream.append(10)
    stream.append_many([11, 12])
    stream.append(13, close=True)
    assert reading.result(30) == [(offset, offset) for offset in range(14)]


def test_chunks_are_complete_instances(stream):
    [chunk] = subscribe("chat/17", -1).batches().__iter__().__next__()
    stored = Chunk.objects.get(stream=stream, offset=9)
    assert (chunk, chunk.payload, chunk.created_at) == (stored, b"9", stored.created_at)
    assert chunk.stream.key == "chat/17"


async def test_async_for_does_the_same(alive):
    stream = await in_thread(Stream.objects.create)(key="chat/17")
    await in_thread(stream.append_many)(range(5))

    async def read():
        return [(chunk.offset, chunk.data) async for chunk in subscribe(stream)]

    reading = asyncio.create_task(read())
    await until(followers, "the reader follows")
    await in_thread(stream.append)(5)
    await in_thread(stream.append)(6, close=True)
    assert await reading == [(offset, offset) for offset in range(7)]


def test_batches_are_lists_as_they_were_read(stream, settings):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 4}
    stream.close()
    subscription = subscribe(stream)
    positions = []
    batches = []
    for batch in subscription.batches():
        batches.append(offsets(batch))
        positions.append(subscription.position)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert positions == [4, 8, 10]


async def test_async_batches_are_lists_too(alive, settings):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 4}
    stream = await in_thread(Stream.objects.create)(key="chat/17")
    await in_thread(stream.append_many)(range(6))
    await in_thread(stream.close)()
    subscription = subscribe(stream)
    assert [offsets(batch) async for batch in subscription.batches()] == [[0, 1, 2, 3], [4, 5]]
    assert subscription.position == 6


@pytest.mark.parametrize(
    ("start_at", "first"), [(0, 0), (3, 3), (9, 9), (10, 10), (-1, 9), (-4, 6), (-99, 0), ("tail", 10)]
)
def test_it_starts_where_it_was_told(stream, start_at, first):
    subscription = subscribe(stream, start_at)
    reading = start(list, subscription)
    wait_until(followers, "the reader follows")
    stream.append(10, close=True)
    assert offsets(reading.result(30)) == list(range(first, 11))
    assert subscription.position == 11


def test_the_last_chunks_are_counted_from_the_tail_not_below_the_first(stream):
    trim(stream, 7)
    stream.close()
    assert offsets(subscribe(stream, -5)) == [7, 8, 9]


@pytest.mark.parametrize("wrong", ["head", 1.5, None, True, 2**64])
def test_a_start_that_is_none_is_refused_at_once(stream, wrong):
    with pytest.raises(ValueError, match="offset"):
        subscribe(stream, wrong)


def test_a_start_kept_as_tail_is_a_position_after_the_first_look(stream):
    subscription = subscribe(stream, "tail")
    reading = start(take, subscription, 1)
    wait_until(followers, "the reader follows")
    subscription.close()
    assert reading.result(30) == []
    store(stream, 3)
    stream.close()
    again = subscribe(stream, subscription.position, epoch=subscription.epoch)
    assert offsets(again) == [10, 11, 12]


def test_position_is_after_the_chunk_that_was_yielded_and_iterating_again_goes_on(stream):
    stream.close()
    subscription = subscribe(stream)
    assert take(subscription, 4) == [0, 1, 2, 3]
    assert subscription.position == 4
    assert take(subscription, 2) == [4, 5]
    assert offsets(subscription) == [6, 7, 8, 9]
    assert (subscription.position, subscription.state) == (10, "completed")
    assert offsets(subscription) == []


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (lambda stream: stream.close(), "completed", ""),
        (lambda stream: stream.fail("out of paper"), "failed", "out of paper"),
        (lambda stream: stream.cancel("enough"), "cancelled", "enough"),
    ],
)
def test_state_and_reason_tell_how_the_stream_ended(stream, end, state, reason):
    subscription = subscribe(stream)
    assert (subscription.state, subscription.reason) == ("", "")
    end(stream)
    assert offsets(subscription) == list(range(10))
    assert (subscription.state, subscription.reason) == (state, reason)


def test_a_stream_that_ended_without_a_chunk_ends_at_once():
    stream = Stream.objects.create(key="empty")
    stream.close()
    subscription = subscribe(stream)
    assert list(subscription) == []
    assert (subscription.position, subscription.state) == (0, "completed")


def test_an_empty_stream_is_waited_for():
    stream = Stream.objects.create(key="empty")
    reading = start(list, subscribe(stream))
    wait_until(followers, "the reader follows")
    stream.append("first", close=True)
    assert offsets(reading.result(30)) == [0]


def test_a_stream_that_does_not_exist_is_missing(stream):
    with pytest.raises(StreamMissing, match="'chat/18'"):
        list(subscribe("chat/18"))
    Stream.objects.filter(pk=stream.pk).delete()
    with pytest.raises(StreamMissing):
        list(subscribe(stream))


def test_a_stream_that_is_deleted_while_it_is_followed_is_missing(stream):
    reading = start(list, subscribe(stream, "tail"))
    wait_until(followers, "the reader follows")
    stream.delete()
    with pytest.raises(StreamMissing, match="deleted while"):
        reading.result(30)


# Gaps and other lives of a stream ------------------------------------------------------------------


@pytest.fixture
def trimmed(live):
    """Offsets 0 … 500 are deleted (C31), 501 … 509 stored."""
    made = Stream.objects.create(key="trimmed")
    store(made, 510)
    trim(made, 501)
    return made


@pytest.mark.parametrize("position", [0, 100, 500])
def test_a_position_that_was_trimmed_away_is_a_gap(trimmed, position):
    subscription = subscribe(trimmed, position)
    with pytest.raises(StreamGap) as caught:
        list(subscription)
    assert (caught.value.requested, caught.value.first) == (position, 501)
    assert subscription.position == position
    assert take(subscribe(trimmed, caught.value.first), 2) == [501, 502]


def test_the_first_stored_position_is_none(trimmed):
    trimmed.close()
    assert offsets(subscribe(trimmed, 501)) == list(range(501, 510))


def test_trimming_between_two_pages_is_a_gap_and_no_silent_jump(stream, settings):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 2}
    batches = iter(subscribe(stream).batches())
    assert offsets(next(batches)) == [0, 1]
    trim(stream, 6)
    with pytest.raises(StreamGap) as caught:
        next(batches)
    assert (caught.value.requested, caught.value.first) == (2, 6)


def test_a_stream_of_which_everything_was_trimmed_has_a_gap_up_to_its_end(stream):
    trim(stream, 10)
    stream.close()
    with pytest.raises(StreamGap) as caught:
        list(subscribe(stream))
    assert caught.value.first == 10
    assert list(subscribe(stream, 10)) == []


def test_a_position_beyond_the_tail_is_a_reset(stream):
    with pytest.raises(StreamReset) as caught:
        list(subscribe(stream, 11))
    assert caught.value.epoch == stream.epoch


def test_a_position_of_another_epoch_is_a_reset(stream):
    with pytest.raises(StreamReset):
        list(subscribe(stream, 5, epoch="another"))
    assert take(subscribe(stream, 5, epoch=stream.epoch), 1) == [5]


def test_a_key_that_was_deleted_and_made_again_is_a_reset_for_whoever_knows_the_epoch(stream):
    old = subscribe("chat/17")
    take(old, 3)
    stream.delete()
    new = Stream.objects.create(key="chat/17")
    new.append_many(["a", "b", "c", "d", "e"])
    new.close()
    again = subscribe("chat/17", old.position, epoch=old.epoch)
    with pytest.raises(StreamReset) as caught:
        list(again)
    assert caught.value.epoch == new.epoch != old.epoch
    assert offsets(subscribe("chat/17", 0, epoch=caught.value.epoch)) == [0, 1, 2, 3, 4]
    assert offsets(subscribe("chat/17", old.position)) == [3, 4]


# What it holds -------------------------------------------------------------------------------------


def test_a_thread_that_follows_keeps_no_connection_of_djangos(stream):
    def follow():
        [offset] = take(subscribe(stream, "tail"), 1)
        return offset, connections["default"].connection

    reading = start(follow)
    wait_until(followers, "the reader follows")
    stream.append(10)
    assert reading.result(30) == (10, None)


async def test_a_plain_loop_in_an_event_loop_is_refused(alive):
    with pytest.raises(SynchronousOnlyOperation, match="async for"):
        next(iter(subscribe("chat/17")))


def test_threads_share_one_hub_and_one_session_that_listens(stream):
    readings = [start(list, subscribe(stream, number)) for number in range(8)]
    wait_until(lambda: followers() == 8, "all follow")
    assert len(hub._all()) == 1
    wait_until(lambda: len(sessions("listener")) == 1, "one listens")
    stream.close()
    for number, reading in enumerate(readings):
        assert offsets(reading.result(30)) == list(range(number, 10))
    assert len(sessions("listener")) == 1
    assert len(sessions("reader")) <= 4


async def test_threads_and_an_event_loop_at_once_have_a_hub_each_and_one_listener(alive):
    stream = await in_thread(Stream.objects.create)(key="both")

    async def read():
        return [chunk.offset async for chunk in subscribe(stream)]

    tasks = [asyncio.create_task(read()) for _ in range(4)]
    threads = [start(list, subscribe(stream)) for _ in range(4)]
    await until(lambda: followers() == 8, "all follow")
    assert len(hub._all()) == 2
    for value in range(50):
        await in_thread(stream.append)(value)
    await in_thread(stream.close)()
    expected = list(range(50))
    assert await asyncio.gather(*tasks) == [expected] * 4
    for thread in threads:
        assert offsets(await asyncio.wrap_future(thread)) == expected
    assert len(await in_thread(sessions)("listener")) == 1


async def test_a_blocking_reader_may_run_in_the_thread_that_async_code_uses_for_databases(alive):
    stream = await in_thread(Stream.objects.create)(key="blocking")
    await in_thread(stream.append_many)(range(3))
    await in_thread(stream.close)()
    reading = asyncio.wait_for(in_thread(lambda: offsets(subscribe(stream)))(), 30)
    assert await reading == [0, 1, 2]


def test_leaving_a_loop_frees_everything(stream, settings):
    settings.PGSTREAMS = {"IDLE_SECONDS": 0.3}
    for _ in range(5):
        assert take(subscribe(stream), 3) == [0, 1, 2]
    wait_until(lambda: not followers(), "nobody follows")
    wait_until(lambda: not hub._all(), "the hub is gone")
    wait_until(lambda: not sessions("reader"), "its sessions are closed")
    wait_until(lambda: not sessions("listener"), "the listener is gone")


async def test_leaving_an_async_loop_frees_everything(alive, settings):
    settings.PGSTREAMS = {"IDLE_SECONDS": 0.3}
    stream = await in_thread(Stream.objects.create)(key="left")
    await in_thread(stream.append_many)(range(5))
    for _ in range(5):
        assert await atake(subscribe(stream), 3) == [0, 1, 2]
    await until(lambda: not followers(), "nobody follows")
    await until(lambda: not hub._all(), "the hub is gone")
    assert not await in_thread(sessions)("reader")


def test_an_error_in_the_loop_frees_the_follower_too(stream):
    with contextlib.suppress(ZeroDivisionError):
        for chunk in subscribe(stream):
            1 / chunk.offset
    wait_until(lambda: not followers(), "nobody follows")


def test_close_ends_a_reader_that_waits_in_another_thread(stream):
    subscription = subscribe(stream)
    reading = start(list, subscription)
    wait_until(lambda: subscription.position == 10, "all is read")
    subscription.close()
    assert offsets(reading.result(30)) == list(range(10))
    assert (subscription.position, subscription.state) == (10, "")
    assert list(subscription) == []
    wait_until(lambda: not followers(), "nobody follows")


async def test_close_ends_an_async_reader(alive):
    stream = await in_thread(Stream.objects.create)(key="closed")
    subscription = subscribe(stream)

    async def read():
        return [chunk async for chunk in subscription]

    reading = asyncio.create_task(read())
    await until(followers, "the reader follows")
    await in_thread(subscription.close)()
    assert await asyncio.wait_for(reading, 30) == []
    assert not followers()


def test_every_event_loop_closes_what_it_has_opened(stream):
    async def read():
        return await atake(subscribe(stream), 10)

    for run in (lambda: asyncio.run(read()), lambda: asyncio.run(read()), async_to_sync(read)):
        assert run() == list(range(10))
        assert not hub._all()
        assert listener.get("default").attached == 0
        wait_until(lambda: not sessions("reader"), "its sessions are closed")


def test_an_event_loop_that_ends_in_mid_read_closes_its_connections(stream):
    with connect() as own, own.transaction():
        own.execute("LOCK TABLE pgstreams_chunk IN ACCESS EXCLUSIVE MODE")

        async def read():
            reading = asyncio.create_task(atake(subscribe(stream), 1))
            await until(lambda: waiting_for_lock("reader"), "the read waits")
            return reading

        assert asyncio.run(read()).cancelled()
        wait_until(lambda: not sessions("reader"), "nothing is left on the server")
    assert not hub._all()


def test_an_event_loop_that_is_closed_with_everything_running_is_let_go_of(stream, settings):
    settings.PGSTREAMS = {"IDLE_SECONDS": 0.3}
    loop = asyncio.new_event_loop()
    subscription = subscribe(stream)
    reading = loop.create_task(atake(subscription, 11))
    loop.run_until_complete(until(lambda: subscription.position == 10, "the reader waits"))
    loop.run_until_complete(until(is_listening, "it listens"))
    left = asyncio.all_tasks(loop)
    loop.close()
    stream.append(10)
    wait_until(lambda: not hub._all(), "the hub is forgotten")
    assert listener.get("default").attached == 0
    wait_until(lambda: not sessions("listener"), "the listener is gone")
    for task in left:
        task._log_destroy_pending = False
    assert not reading.done()


# The seam between stored and live (C04) ------------------------------------------------------------


async def test_a_thousand_readers_that_come_in_mid_stream_get_every_chunk_once(alive, monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", None)
    stream = await in_thread(Stream.objects.create)(key="seam")
    chance = random.Random(4)

    async def read():
        stored, live = chance.choice([1, 3, 30, 300]), chance.choice([1, 5, 40])
        subscription = subscribe(stream, -stored)  # counted from the tail at that moment
        got = await atake(subscription, stored + live)
        assert got == list(range(got[0], subscription.position))

    async def readers():
        for _ in range(40):
            await read()

    with writer("appends", stream, 0.0005) as writing:
        writing.tell("go")
        await asyncio.gather(*(readers() for _ in range(25)))
        writing.tell("stop")
        assert writing.read() > 500


@pytest.mark.parametrize("at_once", [False, True])
def test_chunks_that_are_committed_while_the_replay_is_held_arrive_once(stream, at_once):
    with connect() as own, own.transaction():
        own.execute("LOCK TABLE pgstreams_chunk IN ACCESS EXCLUSIVE MODE")
        reading = start(list, subscribe(stream, 4))
        wait_until(lambda: waiting_for_lock("reader"), "the replay waits")
        for offset in (10, 11, 12):
            own.execute("UPDATE pgstreams_stream SET next_offset = %s WHERE id = %s", (offset + 1, stream.pk))
            own.execute(
                'INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at) '
                "VALUES (%s, %s, '0', now())",
                (stream.pk, offset),
            )
        if at_once:
            hub.wake("default", _hint(stream, 13))
    stream.append(13, close=True)
    assert offsets(reading.result(30)) == list(range(4, 14))


def _hint(stream, tail):
    return Batch((WakeUp(stream.pk, tail),), everything=False)


def test_a_reader_that_comes_while_an_append_is_not_committed_gets_it_afterwards(stream):
    with transaction.atomic():
        stream.append(10)
        reading = start(take, subscribe(stream), 11)
        wait_until(followers, "the reader follows")
        quiet_until = time.monotonic() + 0.3
        wait_until(lambda: time.monotonic() > quiet_until, "a while")
        assert not reading.done()
    assert reading.result(30) == list(range(11))
    assert query("SELECT count(*) FROM pgstreams_chunk WHERE stream_id = %s", stream.pk) == [(11,)]
