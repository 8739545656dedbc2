"""The hub: one per event loop and database; it turns wake-ups into reads that all its followers share.

Invariants:
- a follower registers before it reads, so a chunk committed after its read marks its feed dirty;
- a dirty mark is cleared before the query that answers it, and restored when that query fails;
- a window only advances from its end while somebody waits there: slow readers read the table at their own
  pace, and nothing is queued for anybody;
- a hint is skipped only when the window already reaches its tail and nothing else changed.
Wake-ups are hints: all of this also holds with none, by the poll, which marks every feed dirty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from itertools import islice

import psycopg

from . import background, conf, database, listener, pages, polling, sql, wire
from .buffer import Batch, Buffer
from .follower import Feed, Follower
from .models import Stream
from .pages import Page, StreamRow
from .subscription import Subscription, start
from .window import Window

__all__ = ["Hub", "Subscription", "close_all", "get", "start", "subscribe", "wake"]

logger = logging.getLogger(__name__)

_ROLE = "reader"
_TRANSIENT = (psycopg.OperationalError, psycopg.InterfaceError, OSError, TimeoutError)
_HOUSEKEEPING_SECONDS = 5.0
_RESTART_SECONDS = 1.0
_MAX_TICK_FEEDS = 250
"""Read at once, so that no read takes long, and the planner takes none for one that is worth compiling."""
_TICK_PAGES = 16
"""What a read of many feeds brings at the most, in chunks; each feed gets its share of that."""


class Hub:
    """Reads for all followers of one event loop and database. Use `get`, in the loop."""

    def __init__(self, using: str) -> None:
        self._settings = conf.get()
        self.using = using
        self.loop = asyncio.get_running_loop()
        self._feeds: dict[int, Feed] = {}
        # In the order in which they will be read, each with the tail that the read must reach to
        # answer the mark: no tail is enough when something else may have changed.
        self._dirty: dict[Feed, float] = {}
        self._wanted = asyncio.Event()
        self._hints = Buffer()  # that came from other threads, on their way into the loop
        self._hints_lock = threading.Lock()
        self._hints_announced = False
        self._task: asyncio.Task[None] | None = None
        self._reads: dict[tuple[Feed, int], asyncio.Task[Page]] = {}
        self._failing = False
        timeout = self._settings.QUERY_TIMEOUT_SECONDS
        # The live reads have a connection of their own: a crowd that catches up cannot starve them.
        self._live_pool = database.ReadPool(using, _ROLE, size=1, timeout_seconds=timeout)
        self._catch_up_pool = database.ReadPool(
            using, _ROLE, size=self._settings.READ_POOL_SIZE - 1, timeout_seconds=timeout
        )
        self._finds = polling.Finds()
        self.queries = 0
        self.polls = 0
        self.wake_ups = 0

    # Followers -------------------------------------------------------------------------------------

    def follow(self, stream_id: int, position: int, epoch: str) -> Follower:
        """Register a follower of a stream, who wants `position` next, as known under `epoch`."""
        feed = self._feeds.get(stream_id)
        if feed is None:
            feed = self._feeds[stream_id] = Feed(stream_id)
        feed.followers += 1
        self._start()
        return Follower(self, feed, position, epoch)

    def _start(self) -> None:
        if self._task is None and self._feeds:
            self._task = self.loop.create_task(self._run(), name="pgstreams-hub")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Supervise: unless it was cancelled, followers that are left are served on."""
        self._task = None
        if task.cancelled():
            self._abandon_followers()
            _forget_hub(self)
        elif (error := task.exception()) is not None:
            logger.error("The hub of %r failed and starts again", self.using, exc_info=error)
            self.loop.call_later(_RESTART_SECONDS, self._start)
        elif self._feeds:
            self._start()  # somebody came while the connections were being closed
        else:
            _forget_hub(self)

    def _abandon_followers(self) -> None:
        """Cancel whoever waits for this hub: it reads no more."""
        for task in self._reads.values():
            task.cancel()
        for feed in self._feeds.values():
            for future in feed.waiting:
                future.cancel()

    def unfollow(self, feed: Feed) -> None:
        """Forget a follower; with the last one the feed goes too."""
        feed.followers -= 1
        if not feed.followers:
            self._feeds.pop(feed.stream_id, None)
            self._dirty.pop(feed, None)

    @property
    def page_chunks(self) -> int:
        """How many chunks a follower takes at a time."""
        return self._settings.PAGE_CHUNKS

    @property
    def page_bytes(self) -> int:
        """How much payload a follower takes at a time."""
        return self._settings.PAGE_BYTES

    @property
    def followers(self) -> int:
        """How many followers there are."""
        # A list at one go: other threads ask too.
        return sum(feed.followers for feed in list(self._feeds.values()))

    @property
    def window_bytes(self) -> int:
        """The bound of each window, so that all together keep theirs."""
        return min(self._settings.WINDOW_BYTES, self._settings.WINDOWS_BYTES // max(1, len(self._feeds)))

    def wait(self, feed: Feed) -> asyncio.Future[None]:
        """Register somebody who waits at the end of a feed's window until something about it has changed."""
        future = self.loop.create_future()
        feed.waiting.add(future)
        if feed in self._dirty:
            self._wanted.set()
        return future

    def is_dirty(self, feed: Feed) -> bool:
        """Whether the feed may have moved since it was read."""
        return feed in self._dirty

    def mark(self, feed: Feed, tail: float = math.inf) -> None:
        """Have a feed read as soon as somebody waits at its end; a window that reaches `tail` will do."""
        if feed.followers:
            self._dirty[feed] = max(tail, self._dirty.get(feed, 0))
        if feed.waiting:
            self._wanted.set()

    # Wake-ups --------------------------------------------------------------------------------------

    def wake_from_thread(self, batch: Batch) -> None:
        """Take wake-ups from any thread; those of streams that nobody follows here are dropped.

        A follower that registers at this moment reads afterwards, and so sees what the hint is about.
        """
        hints = tuple(hint for hint in batch.wake_ups if hint.stream_id in self._feeds)
        if not hints and not batch.everything:
            return
        with self._hints_lock:
            self._hints.restore(Batch(hints, batch.everything))
            announced, self._hints_announced = self._hints_announced, True
        if announced:
            return  # a loop that is busy gets them all at once
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            self.abandon()  # the loop has been closed, and its followers with it

    def _wake(self) -> None:
        with self._hints_lock:
            batch = self._hints.take()
            self._hints_announced = False
        self.wake_ups += len(batch.wake_ups) + batch.everything
        if batch.everything:
            self._mark_all()
        for stream_id, tail, changed in batch.wake_ups:
            feed = self._feeds.get(stream_id)
            self._finds.announced(stream_id, tail, changed=changed)
            if feed is not None and (changed or feed.window is None or feed.window.end < tail):
                self.mark(feed, math.inf if changed else tail)

    def _mark_all(self) -> None:
        for feed in self._feeds.values():
            self.mark(feed)

    # The task that reads for those who wait --------------------------------------------------------

    async def _run(self) -> None:
        heard = listener.get(self.using)
        heard.attach(self.wake_from_thread)
        try:
            await self._serve(heard)
        finally:
            heard.detach(self.wake_from_thread)
            await self._live_pool.close()
            await self._catch_up_pool.close()

    async def _serve(self, heard: listener.Listener) -> None:
        """Read for whoever waits, until nobody has followed anything for some time."""
        idle = self._settings.IDLE_SECONDS
        now = used_at = time.monotonic()
        schedule = polling.Schedule(
            self._settings.POLL_INTERVAL_SECONDS, self._settings.FAST_POLL_INTERVAL_SECONDS, now
        )
        failures = 0
        if any(feed.window for feed in self._feeds.values()):
            self._mark_all()  # a restart: wake-ups may have been missed
        while self._feeds or self._reads or now - used_at < idle:
            if self._feeds or self._reads:
                used_at = now
            await self._wait_until(min(schedule.due_at, now + min(_HOUSEKEEPING_SECONDS, idle)))
            await asyncio.sleep(0)  # whoever the last read woke in vain waits again, and is in the next one
            now = time.monotonic()
            if schedule.is_due(now, hears=heard.hears):
                self._poll()
            failures = 0 if await self._tick() else failures + 1
            await self._live_pool.close_idle(idle)
            await self._catch_up_pool.close_idle(idle)
            if failures:
                await asyncio.sleep(database.backoff_seconds(failures))

    def _poll(self) -> None:
        """Have every feed read, whether or not a wake-up told of it."""
        dirty = {feed.stream_id for feed in self._dirty}
        found = self._finds.polled(stream_id for stream_id in self._feeds if stream_id not in dirty)
        self._mark_all()
        if self._dirty:
            self.polls += 1
            polling.tally(self.using).add(found)

    async def _wait_until(self, when: float) -> None:
        """Wait until somebody wants a read, or for the time given (monotonic seconds)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0, when - time.monotonic())):
                await self._wanted.wait()
        self._wanted.clear()

    async def _tick(self) -> bool:
        """Read, in one query, every dirty feed at whose end somebody waits; False if that failed."""
        feeds = list(islice((feed for feed in self._dirty if feed.waiting), _MAX_TICK_FEEDS))
        if not feeds:
            return True
        if len(feeds) == _MAX_TICK_FEEDS:
            self._wanted.set()  # the others are next
        for feed in feeds:
            del self._dirty[feed]
        positions = [0 if feed.window is None else feed.window.end for feed in feeds]
        before = [(feed.row, feed.losses) for feed in feeds]
        try:
            read = await self._read(self._live_pool, feeds, positions)
        except Exception as error:  # noqa: BLE001 - the marks come back, whatever it was
            for feed in feeds:
                self.mark(feed)
            self._report(error)
            return False
        self._report(None)
        hungry: dict[Feed, float] = {}
        for feed, page, (row, losses) in zip(feeds, read, before, strict=True):
            if feed.losses == losses:
                self._take(feed, page, row)
            else:
                self.mark(feed)  # the page may be from before the loss
            if feed in self._dirty:
                mark = self._dirty.pop(feed)
                (self._dirty if page.chunks else hungry)[feed] = mark
        # Those for whom the bytes did not suffice come first next time, those who got some come last.
        if hungry:
            self._dirty = hungry | self._dirty
        return True

    def _take(self, feed: Feed, page: Page, row: StreamRow | None) -> None:
        """Take a page from a feed's window on, read when `row` was known already."""
        if row is not None and page.row is not None and page.row.next_offset < row.next_offset:
            feed.lose(page)  # chunks are gone that were stored then
        if page.gap_to is not None:
            # Trimmed beyond the window: its followers find the gap when they read on.
            feed.window = Window(page.gap_to)
        self.learn(feed, page)
        self._finds.read(feed.stream_id, page.next if page.chunks else None)

    def learn(self, feed: Feed, page: Page) -> None:
        """Take what a page tells about its stream; a window that is behind is read on."""
        feed.take(page, self.window_bytes)
        if feed.window is not None and self._dirty.get(feed, math.inf) <= feed.window.end:
            del self._dirty[feed]  # marked while this was being read, which brought what the hint was about
        if feed.behind:
            self.mark(feed)

    async def _read(self, pool: database.ReadPool, feeds: list[Feed], positions: list[int]) -> list[Page]:
        self.queries += 1
        parameters = pages.parameters(
            [feed.stream_id for feed in feeds],
            positions,
            max_chunks=max(1, self._settings.PAGE_CHUNKS * _TICK_PAGES // max(_TICK_PAGES, len(feeds))),
            max_bytes=self._settings.PAGE_BYTES,
            max_page_bytes=max(1, self._settings.PAGE_BYTES // min(_TICK_PAGES, len(feeds))),
        )
        rows = await pool.fetch(sql.PAGES, parameters)
        if rows[0][-1]:
            # It may lack what others have read already. Its connections lead there after a promotion as well.
            await pool.close()
            raise psycopg.OperationalError("the server is a standby")
        return pages.from_rows(positions, rows)

    def _report(self, error: Exception | None) -> None:
        """Log a change between failing and working."""
        if error is not None and not self._failing:
            logger.warning("Streams of %r cannot be read: %s; trying again", self.using, error)
        elif error is None and self._failing:
            logger.info("Streams of %r are read again", self.using)
        self._failing = error is not None

    async def close(self) -> None:
        """Stop reading and disconnect; whoever follows still is cancelled."""
        tasks = [*self._reads.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._live_pool.close()
        await self._catch_up_pool.close()

    def abandon(self) -> None:
        """Let go of everything after the event loop was closed without ending its tasks; from any thread."""
        _forget_hub(self)
        listener.get(self.using).detach(self.wake_from_thread)
        for pool in (self._live_pool, self._catch_up_pool):
            pool.abandon()

    # Catch-up --------------------------------------------------------------------------------------

    async def page(self, feed: Feed, position: int) -> Page:
        """The page of a stream from a position on; equal positions share one read."""
        # By feed, not by id: a read that began before this feed was registered may miss what it must see.
        key = (feed, position)
        task = self._reads.get(key)
        if task is None:
            task = self.loop.create_task(self.read_page(feed, position), name="pgstreams-page")
            self._reads[key] = task
            task.add_done_callback(lambda done: self._page_read(key, done))
        # Whoever leaves does not take the read away from the others.
        return await asyncio.shield(task)

    def _page_read(self, key: tuple[Feed, int], task: asyncio.Task[Page]) -> None:
        self._reads.pop(key, None)
        if not task.cancelled():
            task.exception()  # its readers have it; without readers nobody needs it

    async def read_page(self, feed: Feed, position: int) -> Page:
        """The page of a stream from a position on, read now; tries again while the database is away."""
        failures = 0
        while True:
            losses = feed.losses
            try:
                [page] = await self._read(self._catch_up_pool, [feed], [position])
            except _TRANSIENT as error:
                failures += 1
                self._report(error)
                await asyncio.sleep(database.backoff_seconds(failures))
                if not feed.followers:
                    raise
            else:
                self._report(None)
                if feed.losses == losses:
                    return page


# The process's hubs --------------------------------------------------------------------------------

_lock = threading.Lock()
_hubs: dict[tuple[asyncio.AbstractEventLoop, str], Hub] = {}


def get(using: str) -> Hub:
    """The running event loop's hub for a database alias."""
    loop = asyncio.get_running_loop()
    for hub in _all():
        if hub.loop.is_closed():
            hub.abandon()
    with _lock:
        if (loop, using) not in _hubs:
            _hubs[loop, using] = Hub(using)
        return _hubs[loop, using]


def subscribers(using: str) -> int:
    """How many follow streams of a database alias in this process."""
    return sum(hub.followers for hub in _all() if hub.using == using)


def wake(using: str, batch: Batch) -> None:
    """Wake this process's followers directly, from any thread."""
    for hub in _all():
        if hub.using == using:
            hub.wake_from_thread(batch)


def close_all(timeout_seconds: float = 5.0) -> None:
    """Disconnect every hub of the process, but those of the event loop that calls this, if one does."""
    try:
        own_loop = asyncio.get_running_loop()
    except RuntimeError:
        own_loop = None
    for hub in _all():
        if hub.loop.is_closed():
            hub.abandon()
        elif hub.loop.is_running() and hub.loop is not own_loop:
            closing = asyncio.run_coroutine_threadsafe(hub.close(), hub.loop)
            try:
                closing.result(timeout_seconds)
            except TimeoutError:
                logger.warning("The hub of %r did not stop in %.1f s", hub.using, timeout_seconds)


def _all() -> list[Hub]:
    background.check_process()
    with _lock:
        return list(_hubs.values())


def _forget_hub(hub: Hub) -> None:
    with _lock:
        if _hubs.get((hub.loop, hub.using)) is hub:
            del _hubs[hub.loop, hub.using]


def _forget() -> None:
    global _lock, _hubs
    _lock = threading.Lock()
    _hubs = {}


background.after_fork(_forget)


# Following from Python ------------------------------------------------------------------------------


def subscribe(
    stream: Stream | str,
    offset: int | str = 0,
    *,
    epoch: str | None = None,
    using: str | None = None,
) -> Subscription:
    """Follow a stream (or its key) from a position on, until it ends; for both `for` and `async for`.

    `offset` is a position, `"tail"`, or minus n for the last n chunks. With `epoch` (as saved beside a
    position) a re-created stream is noticed. Iterating yields `Chunk` instances, waits for new ones, and ends
    when the stream is closed. It raises `StreamMissing` when the stream does not exist or is deleted,
    `StreamGap` when chunks at the position are no longer stored, `StreamReset` when the position is of
    another life of the stream, or what was read is lost. Raises `ValueError` itself for an offset that is
    none.
    """
    try:
        wire.check_start(offset)
    except wire.BadFrame as error:
        raise ValueError(str(error)) from error
    return Subscription(stream, offset, epoch=epoch, using=using, follow=_follow)


async def _follow(using: str, stream_id: int, position: int, epoch: str) -> Follower:
    return get(using).follow(stream_id, position, epoch)
