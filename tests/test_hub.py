from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import ClassVar

import pytest
from django.db import transaction

from django_pgstreams import hub, listener
from django_pgstreams.buffer import Batch, WakeUp
from django_pgstreams.follower import Chunks, Closed, Gap, Live, Reset
from django_pgstreams.models import Chunk, Stream
from django_pgstreams.pages import Page, Run
from tests.following import (
    connect,
    in_thread,
    is_listening,
    query,
    sessions,
    store,
    terminate,
    trim,
    until,
    waiting_for_lock,
    writer,
)

pytestmark = pytest.mark.usefixtures("alive")

NEVER_SECONDS = 300.0
"""A poll that no test waits for: what arrives was announced."""


@pytest.fixture
def announced_only(settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS}


async def make(key="hub", chunks=0):
    stream = await in_thread(Stream.objects.create)(key=key)
    if chunks:
        await in_thread(stream.append_many)(range(chunks))
    return stream


class Reader:
    """Follows a stream in a task of its own, and keeps what it sees."""

    arrivals: ClassVar[list[tuple[int, int]]] = []
    """(stream, offset) of all readers of a test, in the order of their arrival."""

    def __init__(self, stream, position=0, *, epoch=None, using="default", pause_seconds=0.0):
        self._stream_id = stream.pk
        self.events = []
        self.offsets = []
        self._pause_seconds = pause_seconds
        self.follower = hub.get(using).follow(stream.pk, position, epoch or stream.epoch)
        self.task = asyncio.create_task(self._read())

    async def _read(self):
        try:
            while not (self.events and isinstance(self.events[-1], Closed)):
                event = await self.follower.next()
                self.events.append(event)
                if isinstance(event, Chunks):
                    self.offsets += [chunk.offset for chunk in event.chunks]
                    self.arrivals += [(self._stream_id, chunk.offset) for chunk in event.chunks]
                    await asyncio.sleep(self._pause_seconds)
        finally:
            self.follower.close()

    @property
    def is_live(self):
        return any(isinstance(event, Live) for event in self.events)

    @property
    def end(self):
        return self.events[-1] if self.events and isinstance(self.events[-1], Closed) else None

    async def stop(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def all_live(*readers):
    await until(lambda: all(reader.is_live for reader in readers), "all have reached the tail")
    await until(is_listening, "the listener listens")


async def finish(*readers):
    await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), 60)


# Ends, gaps and resets -----------------------------------------------------------------------------


@pytest.mark.usefixtures("announced_only")
@pytest.mark.parametrize(
    ("line", "state", "reason"),
    [
        ("stream.append('last', close=True)", "completed", ""),
        ("stream.append('last'); stream.close()", "completed", ""),
        ("stream.append('last'); stream.fail('no paper')", "failed", "no paper"),
        ("stream.append('last'); stream.cancel('enough')", "cancelled", "enough"),
        ("stream.append('last'); stream.delete()", "deleted", ""),
    ],
)
@pytest.mark.parametrize("is_elsewhere", [True, False])
async def test_an_end_is_announced_and_comes_once_after_the_last_chunk(
    line, state, reason, is_elsewhere, elsewhere
):
    stream = await make(chunks=3)
    readers = [Reader(stream) for _ in range(3)]
    await all_live(*readers)
    if is_elsewhere:
        await in_thread(elsewhere)(stream, line)
    else:
        await in_thread(lambda: exec(line, {"stream": stream}))()
    await finish(*readers)
    for reader in readers:
        assert reader.offsets == [0, 1, 2, 3] or (
            state == "deleted" and reader.offsets == [0, 1, 2]  # gone before it was read
        )
        assert reader.end == Closed(len(reader.offsets), state, reason)
        assert sum(isinstance(event, Closed) for event in reader.events) == 1
        assert sum(isinstance(event, Live) for event in reader.events) == 1


@pytest.mark.parametrize("position", [0, 2])
async def test_a_stream_that_has_ended_answers_without_a_wake_up(position):
    stream = await make(chunks=2)
    await in_thread(stream.fail)("why")
    reader = Reader(stream, position)
    await finish(reader)
    assert reader.offsets == [0, 1][position:]
    assert reader.end == Closed(2, "failed", "why")


async def test_a_stream_that_never_was_has_ended_as_deleted():
    reader = Reader(Stream(pk=0, epoch="none"))
    await finish(reader)
    assert reader.events == [Closed(0, "deleted", "")]


async def test_a_gap_comes_before_the_chunks_after_it():
    stream = await make()
    await in_thread(store)(stream, 20)
    await in_thread(trim)(stream, 12)
    reader = Reader(stream, 5)
    await all_live(reader)
    assert reader.events[0] == Gap(5, 12)
    assert reader.offsets == list(range(12, 20))
    await reader.stop()


@pytest.mark.usefixtures("announced_only")
async def test_trimming_past_a_reader_that_waits_is_a_gap():
    stream = await make(chunks=3)
    readers = [Reader(stream), Reader(stream)]
    await all_live(*readers)

    def append_and_trim():
        with transaction.atomic():
            stream.append_many(range(5))
            with transaction.get_connection().cursor() as cursor:
                cursor.execute("UPDATE pgstreams_stream SET first_offset = 6 WHERE id = %s", [stream.pk])
                cursor.execute(
                    'DELETE FROM pgstreams_chunk WHERE stream_id = %s AND "offset" < 6', [stream.pk]
                )

    await in_thread(append_and_trim)()
    await until(lambda: all(reader.offsets[-1] == 7 for reader in readers), "the rest arrives")
    await in_thread(stream.append)("after", close=True)
    await finish(*readers)
    for reader in readers:
        assert [event for event in reader.events if isinstance(event, Gap)] == [Gap(3, 6)]
        assert reader.offsets == [0, 1, 2, 6, 7, 8]


async def test_another_life_or_a_position_beyond_the_tail_is_a_reset_to_the_beginning():
    stream = await make(chunks=3)
    await in_thread(stream.close)()
    readers = [Reader(stream, 2, epoch="another"), Reader(stream, 4), Reader(stream, 3)]
    await finish(*readers)
    assert [type(reader.events[0]) for reader in readers] == [Reset, Reset, Closed]
    assert readers[0].events[0].epoch == stream.epoch
    assert [reader.offsets for reader in readers] == [[0, 1, 2], [0, 1, 2], []]


# Announcements -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("announced_only")
async def test_what_another_process_announces_arrives_without_a_poll(elsewhere):
    stream = await make(chunks=2)
    reader = Reader(stream)
    await all_live(reader)
    for expected in range(3, 8):
        await in_thread(elsewhere)(stream, "stream.append(0)")
        await until(lambda expected=expected: len(reader.offsets) == expected, "it arrives")
    assert hub.get("default").polls == 0
    await reader.stop()


@pytest.mark.usefixtures("announced_only")
async def test_two_commits_that_are_announced_in_reverse_order_lose_nothing():
    stream = await make(chunks=1)
    reader = Reader(stream)
    await all_live(reader)
    await in_thread(store)(stream, 2)
    ours = hub.get("default")
    for tails in ([3, 2], [2], [1]):
        for tail in tails:
            ours.wake_from_thread(Batch((WakeUp(stream.pk, tail),), everything=False))
        await until(lambda: reader.offsets == [0, 1, 2], "both arrive")
    await in_thread(store)(stream, 1)
    ours.wake_from_thread(Batch((WakeUp(stream.pk, 3),), everything=False))  # stale: nothing to do
    ours.wake_from_thread(Batch((WakeUp(stream.pk, 4),), everything=False))
    await until(lambda: reader.offsets == [0, 1, 2, 3], "the last arrives")
    await reader.stop()


@pytest.mark.usefixtures("announced_only")
async def test_a_hint_that_tells_nothing_new_costs_no_query():
    stream = await make(chunks=5)
    other = await make("other", chunks=1)
    reader = Reader(stream)
    await all_live(reader)
    ours = hub.get("default")
    await until(lambda: not ours._dirty, "all is read")
    queries = ours.queries
    for hint in (WakeUp(stream.pk, 5), WakeUp(stream.pk, 3), WakeUp(other.pk, 9, changed=True)):
        ours.wake_from_thread(Batch((hint,), everything=False))
    await in_thread(stream.append)(5)
    await until(lambda: reader.offsets[-1] == 5, "a real one is followed")
    assert ours.queries <= queries + 1  # none, if a read was under way that saw it
    await reader.stop()


@pytest.mark.usefixtures("announced_only")
async def test_what_is_committed_while_nobody_listens_arrives_at_once_when_somebody_does_again(proxy):
    """C03: the subscriber is told to look right after the new LISTEN, not at the next poll."""
    stream = await make(chunks=7)
    reader = Reader(stream, using=proxy.alias)
    await until(lambda: reader.is_live, "the tail is reached")
    await until(lambda: is_listening(proxy.alias), "the listener listens")
    proxy.go_down()
    await in_thread(stream.append)(7)
    await until(lambda: not sessions("listener"), "nobody listens")
    tried = proxy.accepted
    await until(lambda: proxy.accepted >= tried + 2, "the listener tries in vain")
    assert reader.offsets == list(range(7))
    proxy.come_up()
    came_up_at = time.monotonic()
    await until(lambda: reader.offsets[-1] == 7, "it arrives")
    assert time.monotonic() - came_up_at < 30
    assert hub.get(proxy.alias).polls == 0
    await reader.stop()


@pytest.mark.usefixtures("announced_only")
async def test_nothing_is_lost_however_often_the_listening_session_is_ended(elsewhere):
    stream = await make()
    reader = Reader(stream)
    await all_live(reader)
    heard = listener.get("default")
    for value in range(10):
        connects = heard.connects
        assert terminate("listener") == 1
        await in_thread(elsewhere)(stream, "stream.append(0)")
        await until(lambda value=value: reader.offsets[-1:] == [value], "it arrives")
        await until(lambda connects=connects: heard.connects > connects, "it listens again")
    assert len(await in_thread(sessions)("listener")) == 1
    await reader.stop()


# Polling -------------------------------------------------------------------------------------------


def page_queries():
    """How many page reads the server has counted for this database."""
    [(calls,)] = query(
        "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query LIKE '%%pgstreams_pages%%' "
        "AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return int(calls)


@pytest.fixture
def counted(live):
    """The server counts statements."""
    with connect() as own:
        loaded = own.execute("SHOW shared_preload_libraries").fetchone()[0]
        if "pg_stat_statements" not in loaded:
            pytest.skip("the server does not load pg_stat_statements")
        own.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")


async def test_without_notifications_everything_arrives_by_one_query_an_interval(settings, counted):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 1.0}
    streams = [await make(f"polled/{number}") for number in range(10)]
    readers = [Reader(stream) for stream in streams for _ in range(20)]
    await all_live(*readers)
    ours = hub.get("default")
    wake_ups, heard = ours.wake_ups, listener.get("default").wake_ups
    polls, queries = ours.polls, await in_thread(page_queries)()
    began = time.monotonic()
    with writer("quiet", streams[0], 5, 40, 30) as first, writer("quiet", streams[9], 5, 40, 30) as last:
        first.tell("go")
        last.tell("go")
        written = [await in_thread(first.read)(), await in_thread(last.read)()]
    await in_thread(store)(streams[5], 3)
    expected = {0: written[0], 9: written[1], 5: 3}
    await until(
        lambda: all(
            len(reader.offsets) == expected.get(number // 20, 0) for number, reader in enumerate(readers)
        ),
        "everything arrives",
    )
    elapsed = time.monotonic() - began
    assert ours.polls - polls <= elapsed + 1
    assert await in_thread(page_queries)() - queries <= elapsed + 1
    assert (ours.wake_ups, listener.get("default").wake_ups) == (wake_ups, heard)
    for reader in readers:
        assert reader.offsets == list(range(len(reader.offsets)))
        await reader.stop()


async def test_nobody_polls_when_nobody_follows(settings, counted):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 0.05, "IDLE_SECONDS": 30}
    stream = await make(chunks=1)
    reader = Reader(stream)
    await until(lambda: reader.is_live, "the tail is reached")
    ours = hub.get("default")
    await until(lambda: ours.polls >= 3, "it polls")
    await reader.stop()
    polls, queries = ours.polls, await in_thread(page_queries)()
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 0.5, "ten intervals are over")
    assert (ours.polls, await in_thread(page_queries)()) == (polls, queries)


async def test_a_wake_up_of_many_streams_is_one_query(counted):
    streams = [await make(f"many/{number}", chunks=1) for number in range(50)]
    readers = [Reader(stream) for stream in streams for _ in range(4)]
    await all_live(*readers)
    ours = hub.get("default")
    await until(lambda: not ours._dirty, "all is read")
    queries = await in_thread(page_queries)()

    def append_to_all():
        Chunk.objects.bulk_create(Chunk(stream=stream, data="x") for stream in streams)

    await in_thread(append_to_all)()
    await until(lambda: all(reader.offsets == [0, 1] for reader in readers), "all arrive")
    assert await in_thread(page_queries)() - queries <= 3
    for reader in readers:
        await reader.stop()


async def test_readers_at_one_position_share_one_read(counted):
    stream = await make(chunks=50)
    queries = await in_thread(page_queries)()
    readers = [Reader(stream) for _ in range(200)]
    await all_live(*readers)
    assert await in_thread(page_queries)() - queries <= 3
    queries = await in_thread(page_queries)()
    await in_thread(stream.append)(50)
    await until(lambda: all(reader.offsets[-1] == 50 for reader in readers), "all arrive")
    assert await in_thread(page_queries)() - queries <= 2
    for reader in readers:
        await reader.stop()


# What fails ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("announced_only")
async def test_a_query_that_fails_in_mid_tick_loses_nothing(caplog):
    caplog.set_level(logging.INFO, logger="django_pgstreams.hub")
    stream = await make(chunks=3)
    readers = [Reader(stream), Reader(stream)]
    await all_live(*readers)
    with connect() as own, own.transaction():
        own.execute("LOCK TABLE pgstreams_stream IN ACCESS EXCLUSIVE MODE")
        hub.wake("default", Batch((WakeUp(stream.pk, 4),), everything=False))
        await until(lambda: waiting_for_lock("reader"), "the tick waits")
        [pid] = waiting_for_lock("reader")
        own.execute("SELECT pg_terminate_backend(%s)", [pid])
        await until(lambda: "cannot be read" in caplog.text, "the tick fails")
        store(stream, 1, own)
    await until(lambda: all(reader.offsets == [0, 1, 2, 3] for reader in readers), "it arrives")
    await until(lambda: "are read again" in caplog.text, "it says that it works")
    assert caplog.text.count("cannot be read") == 1
    for reader in readers:
        await reader.stop()


async def test_a_catch_up_read_that_fails_is_tried_again():
    stream = await make(chunks=3)
    with connect() as own, own.transaction():
        own.execute("LOCK TABLE pgstreams_chunk IN ACCESS EXCLUSIVE MODE")
        readers = [Reader(stream), Reader(stream), Reader(stream, 1)]
        for _ in range(3):
            await until(lambda: len(waiting_for_lock("reader")) == 2, "both reads wait")
            for pid in waiting_for_lock("reader"):
                own.execute("SELECT pg_terminate_backend(%s)", [pid])
    await all_live(*readers)
    assert [reader.offsets for reader in readers] == [[0, 1, 2], [0, 1, 2], [1, 2]]
    for reader in readers:
        await reader.stop()


async def test_a_read_without_an_answer_is_given_up_and_tried_again(proxy, settings):
    settings.PGSTREAMS = {"QUERY_TIMEOUT_SECONDS": 0.5, "POLL_INTERVAL_SECONDS": 0.2}
    stream = await make(chunks=3)
    reader = Reader(stream, using=proxy.alias)
    await until(lambda: reader.is_live, "the tail is reached")
    proxy.hold()
    late = Reader(stream, 1, using=proxy.alias)
    await in_thread(stream.append)(3)
    tried = proxy.accepted
    await until(lambda: proxy.accepted > tried, "another connection is tried")
    assert reader.offsets == [0, 1, 2]
    proxy.come_up()
    await until(lambda: reader.offsets == [0, 1, 2, 3], "the chunk arrives")
    await until(lambda: late.offsets == [1, 2, 3], "the late reader has caught up")
    await reader.stop()
    await late.stop()


async def test_a_statement_that_is_given_up_is_cancelled_at_the_server(settings):
    settings.PGSTREAMS = {"QUERY_TIMEOUT_SECONDS": 0.3}
    stream = await make(chunks=3)
    with connect() as own, own.transaction():
        own.execute("LOCK TABLE pgstreams_chunk IN ACCESS EXCLUSIVE MODE")
        reader = Reader(stream)
        pids = set()
        began = time.monotonic()
        while len(pids) < 4 and time.monotonic() - began < 30:
            pids.update(waiting_for_lock("reader"))
            assert len(waiting_for_lock("reader")) <= 1
            await asyncio.sleep(0.02)
    await until(lambda: reader.offsets == [0, 1, 2], "the chunks arrive")
    assert len(pids) >= 2
    await reader.stop()


async def test_a_reader_that_is_cancelled_disturbs_nobody():
    stream = await make(chunks=2)
    with connect() as own, own.transaction():
        own.execute("LOCK TABLE pgstreams_chunk IN ACCESS EXCLUSIVE MODE")
        in_mid_read = [Reader(stream) for _ in range(5)]
        await until(lambda: waiting_for_lock("reader"), "the read waits")
        await in_mid_read.pop(0).stop()  # who began the read that the others share
        await in_mid_read.pop().stop()
    waiting = [Reader(stream) for _ in range(5)]
    await all_live(*in_mid_read, *waiting)
    await waiting.pop(2).stop()
    await in_thread(stream.append)(2, close=True)
    await finish(*in_mid_read, *waiting)
    assert all(reader.offsets == [0, 1, 2] for reader in (*in_mid_read, *waiting))
    assert hub.get("default").followers == 0


async def test_a_hub_that_fails_starts_again(monkeypatch, caplog):
    stream = await make(chunks=1)
    monkeypatch.setattr(hub, "_RESTART_SECONDS", 0.05)
    reader = Reader(stream)
    await all_live(reader)
    ours = hub.get("default")
    ours._dirty[None] = 0  # not a feed: as a bug would have it
    ours._wanted.set()
    await until(lambda: "starts again" in caplog.text, "it fails")
    del ours._dirty[None]
    await in_thread(store)(stream, 1)
    await until(lambda: ours._task is not None, "it has started again")
    await until(lambda: reader.offsets == [0, 1], "what was missed arrives")
    assert hub.get("default") is ours
    await reader.stop()


# Slow readers --------------------------------------------------------------------------------------


async def test_a_reader_that_the_window_has_left_behind_reads_on_from_the_table(settings):
    """It had reached the tail once; by the time it looks again the window begins beyond its position."""
    settings.PGSTREAMS = {"WINDOW_BYTES": 20, "POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    stream = await make(chunks=3)
    slow = hub.get("default").follow(stream.pk, 0, stream.epoch)
    fast = Reader(stream)
    event = await slow.next()
    assert [chunk.offset for chunk in event.chunks] == [0, 1, 2]
    await all_live(fast)
    for value in range(3, 60):
        await in_thread(stream.append)(value)
        await until(lambda value=value: fast.offsets[-1] == value, "the fast one has it")
    taken = []
    while len(taken) < 57:
        event = await asyncio.wait_for(slow.next(), 20)
        if isinstance(event, Chunks):
            taken += [chunk.offset for chunk in event.chunks]
    assert taken == list(range(3, 60))
    slow.close()
    await fast.stop()


async def test_slow_and_fast_readers_get_the_same_whatever_the_window_holds(settings, elsewhere):
    settings.PGSTREAMS = {"WINDOW_BYTES": 300, "PAGE_CHUNKS": 7, "POLL_INTERVAL_SECONDS": 1.0}
    stream = await make(chunks=20)
    readers = [Reader(stream, n % 20, pause_seconds=(n % 5) / 200) for n in range(30)]
    await in_thread(elsewhere)(stream, "[stream.append(n) for n in range(400)]; stream.close()")
    await finish(*readers)
    for number, reader in enumerate(readers):
        assert reader.offsets == list(range(number % 20, 420))


async def test_streams_that_use_up_a_read_do_not_starve_the_others(settings):
    settings.PGSTREAMS = {"PAGE_BYTES": 1, "POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    streams = [await make(f"large/{number}") for number in range(8)]
    readers = [Reader(stream) for stream in streams]
    await all_live(*readers)
    for stream in streams:
        await in_thread(store)(stream, 10)
    Reader.arrivals.clear()
    hub.wake("default", Batch((), everything=True))
    await until(lambda: all(len(reader.offsets) == 10 for reader in readers), "all arrive")
    place = {arrival: number for number, arrival in enumerate(Reader.arrivals)}
    for stream in streams:
        assert place[stream.pk, 0] < min(place[other.pk, 3] for other in streams)
    for reader in readers:
        await reader.stop()


async def test_streams_beyond_what_is_read_at_once_are_read_next(monkeypatch, settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    monkeypatch.setattr(hub, "_MAX_TICK_FEEDS", 3)
    streams = [await make(f"rounds/{number}") for number in range(8)]
    readers = [Reader(stream) for stream in streams]
    await all_live(*readers)
    queries = hub.get("default").queries
    for stream in streams:
        await in_thread(store)(stream, 2)
    hub.wake("default", Batch(tuple(WakeUp(stream.pk, 2) for stream in streams), everything=False))
    await until(lambda: all(reader.offsets == [0, 1] for reader in readers), "all arrive")
    assert 3 <= hub.get("default").queries - queries <= 6
    for reader in readers:
        await reader.stop()


async def test_windows_together_keep_their_bound(settings):
    settings.PGSTREAMS = {"WINDOW_BYTES": 5000, "WINDOWS_BYTES": 20_000, "POLL_INTERVAL_SECONDS": 1.0}
    streams = [await make(f"windows/{number}") for number in range(10)]
    readers = [Reader(stream) for stream in streams]
    await all_live(*readers)
    ours = hub.get("default")
    for turn in range(1, 6):
        for stream in streams:
            await in_thread(stream.append_many)(["x" * 98] * 20)
        await until(
            lambda turn=turn: all(len(reader.offsets) == 20 * turn for reader in readers), "all arrive"
        )
    assert sum(feed.window.size_bytes for feed in ours._feeds.values()) <= 20_000
    for reader in readers:
        await reader.stop()


# Coming and going ----------------------------------------------------------------------------------


async def test_when_the_last_has_left_nothing_stays(settings):
    settings.PGSTREAMS = {"IDLE_SECONDS": 0.3}
    stream = await make(chunks=3)
    readers = [Reader(stream) for _ in range(3)]
    await all_live(*readers)
    ours = hub.get("default")
    for reader in readers:
        await reader.stop()
    assert not ours._feeds
    assert not ours._dirty
    await until(lambda: not hub._all(), "the hub is gone")
    assert ours._task is None
    await until(lambda: not sessions("reader"), "its sessions are closed")
    await until(lambda: not sessions("listener"), "the listener is gone")


async def test_whoever_comes_before_the_idle_time_is_over_finds_the_hub_as_it_was(settings):
    stream = await make(chunks=3)
    reader = Reader(stream)
    await all_live(reader)
    ours = hub.get("default")
    await reader.stop()
    again = Reader(stream)
    await all_live(again)
    assert hub.get("default") is ours
    assert len(await in_thread(sessions)("listener")) == 1
    await again.stop()


async def test_whoever_comes_while_the_hub_ends_is_served(settings):
    settings.PGSTREAMS = {"IDLE_SECONDS": 0.001, "POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    stream = await make(chunks=1)
    for turn in range(60):
        reader = Reader(stream)
        await until(lambda reader=reader: reader.offsets, "the chunk arrives")
        await reader.stop()
        for _ in range(turn % 7):
            await asyncio.sleep(0)
    last = Reader(stream)
    await until(lambda: last.is_live, "the tail is reached")
    await in_thread(stream.append)(1, close=True)
    await finish(last)
    assert last.offsets == [0, 1]


async def test_a_live_connection_that_nobody_uses_is_closed(settings):
    settings.PGSTREAMS = {"IDLE_SECONDS": 0.3, "POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    stream = await make(chunks=3)
    reader = Reader(stream)
    await all_live(reader)
    await until(lambda: not sessions("reader"), "the readers' sessions are closed")
    await in_thread(stream.append)(3)
    await until(lambda: reader.offsets[-1] == 3, "the chunk arrives all the same")
    await reader.stop()


async def test_release_cancels_who_follows_in_another_loop_and_disconnects(settings):
    stream = await make(chunks=1)
    reader = Reader(stream)
    await all_live(reader)
    await in_thread(hub.close_all)()
    with pytest.raises(asyncio.CancelledError):
        await reader.task
    assert not hub._all()
    await until(lambda: not sessions("reader"), "its sessions are closed")


async def test_closed_right_after_its_start_it_serves_whoever_comes_next():
    stream = await make(chunks=1)
    for _ in range(20):
        follower = hub.get("default").follow(stream.pk, 0, stream.epoch)
        await hub.get("default").close()
        follower.close()
    reader = Reader(stream)
    await all_live(reader)
    assert reader.offsets == [0]
    await reader.stop()


async def test_wake_ups_on_their_way_into_a_busy_loop_are_merged():
    stream = await make(chunks=1)
    reader = Reader(stream)
    await all_live(reader)
    ours = hub.get("default")
    before = ours.wake_ups

    def load():
        for tail in range(2, 20_000):
            ours.wake_from_thread(Batch((WakeUp(stream.pk, tail),), everything=False))

    threads = [asyncio.to_thread(load) for _ in range(2)]
    waiting = asyncio.gather(*threads)
    await asyncio.sleep(0)
    blocked_until = time.monotonic() + 1
    while time.monotonic() < blocked_until:
        pass  # the loop does not run
    assert len(ours._hints) <= 1
    await waiting
    await until(lambda: not ours._hints, "all are taken")
    assert ours.wake_ups - before < 30_000
    await reader.stop()


# What was stored once and is gone ------------------------------------------------------------------


async def test_a_page_that_was_under_way_when_a_loss_was_noticed_is_read_again():
    stream = await make(chunks=2)
    served = hub.get("default")
    follower = served.follow(stream.pk, 0, stream.epoch)
    await follower.next()
    feed, queries = follower._feed, served.queries
    reading = asyncio.create_task(served.read_page(feed, 0))
    await asyncio.sleep(0)  # it has begun
    assert served.queries == queries + 1
    feed.lose(Page(0, feed.row, Run(0, [], []), None))
    page = await reading
    assert (served.queries, page.next) == (queries + 2, 2)
    follower.close()


async def test_a_chunk_stored_at_the_moment_from_which_postgres_counts_is_as_any_other(settings):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 1}
    stream = await make(chunks=3)
    update = (
        "UPDATE pgstreams_chunk SET created_at = '2000-01-01 00:00Z' WHERE stream_id = %s AND \"offset\" = 1"
    )
    with connect() as connection:
        connection.execute(update, [stream.pk])
    reader = Reader(stream)
    await until(lambda: reader.is_live, "the tail")
    assert reader.offsets == [0, 1, 2]
    assert not any(isinstance(event, Reset) for event in reader.events)
