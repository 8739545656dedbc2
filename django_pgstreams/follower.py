"""One stream followed in one event loop: what its followers share (`Feed`), one reader's way (`Follower`).

Invariant: a follower is given the chunks from its position on, each once and in order, then the end; whatever
stands in between (trimmed chunks, another life of the stream) is an event of its own, never a silent jump.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol, TypeAlias

from .models import Stream
from .pages import Page, Run, StreamRow, agree
from .window import Window

DELETED = "deleted"
"""What `Closed.state` says of a stream that was deleted while it was followed."""

# What a follower sees ------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """The next contiguous run; it begins at the position the follower was at."""

    chunks: Run


class Live(NamedTuple):
    """The tail has been reached for the first time, at position `offset`."""

    offset: int


class Gap(NamedTuple):
    """Chunks from `requested` up to `first` are no longer stored; the follower goes on at `first`."""

    requested: int
    first: int


class Reset(NamedTuple):
    """The position was of another life of the stream, or of one whose end was lost; it goes on at 0."""

    epoch: str


class Closed(NamedTuple):
    """The end, at position `offset`, after the last chunk."""

    offset: int
    state: str
    reason: str


Event: TypeAlias = Chunks | Live | Gap | Reset | Closed


class Feed:
    """What the followers of one stream share in one event loop."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.row: StreamRow | None = None
        self.gone = False
        self.window: Window | None = None
        self.followers = 0
        self.waiting: set[asyncio.Future[None]] = set()
        self.live_is_news = False  # to somebody who waits
        self.losses = 0  # a read that was under way when this grew may tell of what is gone
        self._before_end: int | None = None  # the time of the chunk before the tail in `row`

    def take(self, page: Page, max_bytes: int) -> None:
        """Learn from a page that was read: the row if it is newer, the chunks if they continue the window.

        Whoever waits is woken if there is news: a poll of thousands of quiet streams wakes nobody.
        """
        row, end = self.row, self.window.end if self.window is not None else None
        if page.row is None:
            self.gone = True
        elif self.row is None or self.row.epoch != page.row.epoch or not self._agrees(page):
            self.lose(page)
        elif page.row.next_offset > self.row.next_offset or _age(page.row) > _age(self.row):
            self._know(page)
        if self.window is not None:
            self.window.extend(page.chunks, max_bytes)
        moved = self.window is not None and self.window.end != end
        if moved or self.row is not row or self.gone or page.gap_to is not None or self.live_is_news:
            self.wake()

    def _agrees(self, page: Page) -> bool:
        return self.window is None or self.window.agrees(page)

    def lose(self, page: Page) -> None:
        """Know nothing any more but a page's row: what was stored once is gone."""
        self.losses += self.row is not None
        self.window = None
        self._know(page)
        self.wake()

    def _know(self, page: Page) -> None:
        self.row = page.row
        reaches_end = page.row is not None and page.next == page.row.next_offset
        self._before_end = page.before_at(page.next) if reaches_end else None

    def move_window(self, page: Page, max_bytes: int) -> None:
        """Begin the window anew with a page that reaches the tail."""
        self.window = Window(page.position, page.before)
        self.window.extend(page.chunks, max_bytes)

    def wake(self) -> None:
        """Have everyone who waits look again."""
        waiting, self.waiting = self.waiting, set()
        self.live_is_news = False
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def end_at(self, position: int, before: int | None) -> Closed | None:
        """The end, if the stream is over for a reader at `position`, with the time of the chunk before."""
        if self.gone:
            return Closed(position, DELETED, "")
        row = self.row
        if row is None or row.state == Stream.State.OPEN or position != row.next_offset:
            return None
        if not agree(before, self._before_end):
            return None
        return Closed(position, row.state, row.reason)

    @property
    def behind(self) -> bool:
        """Whether the window is known to end before the tail."""
        return self.window is not None and self.row is not None and self.window.end < self.row.next_offset


def _age(row: StreamRow) -> tuple[int, bool, int]:
    """Orders the snapshots of one life of a stream: none of these ever goes back."""
    return row.next_offset, row.state != Stream.State.OPEN, row.first_offset


class Reader(Protocol):
    """What a follower needs of the hub that reads for it."""

    @property
    def page_chunks(self) -> int:
        """How many chunks a follower takes at a time."""

    @property
    def page_bytes(self) -> int:
        """How much payload a follower takes at a time."""

    @property
    def window_bytes(self) -> int:
        """The bound of each window."""

    def unfollow(self, feed: Feed) -> None:
        """Forget a follower."""

    def is_dirty(self, feed: Feed) -> bool:
        """Whether the feed may have moved since it was read."""

    def mark(self, feed: Feed) -> None:
        """Have a feed read as soon as somebody waits at its end."""

    def learn(self, feed: Feed, page: Page) -> None:
        """Take what a page tells about its stream."""

    def wait(self, feed: Feed) -> asyncio.Future[None]:
        """Register somebody who waits until something about a feed has changed."""

    async def page(self, feed: Feed, position: int) -> Page:
        """A page, read together with whoever wants the same."""

    async def read_page(self, feed: Feed, position: int) -> Page:
        """A page, read now."""


class Follower:
    """One reader's way through a stream: it pulls, from its own position, at its own pace."""

    def __init__(self, reader: Reader, feed: Feed, position: int, epoch: str) -> None:
        self.position = position
        self.epoch = epoch
        self._reader = reader
        self._feed = feed
        self._live = False
        self._tail_seen = -1  # the tail as this reader's own last page showed it
        self._before: int | None = None  # the time of the chunk before the position
        self._before_run: int | None = None  # the same for the last run that was given
        self._closed = False

    @property
    def is_alone(self) -> bool:
        """Whether nobody else follows the stream in this event loop."""
        return self._feed.followers == 1

    def close(self) -> None:
        """Stop following. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._reader.unfollow(self._feed)
            self._feed.wake()

    async def next(self) -> Event:
        """Wait for what comes next. After `Closed` there is nothing more; its state is "" after `close`."""
        while (event := self.poll() or await self._read_on()) is None:
            pass
        return event

    def poll(self) -> Event | None:
        """What comes next, if it is there already."""
        feed = self._feed
        if self._closed:
            return Closed(self.position, "", "")
        if feed.row is not None and feed.row.epoch != self.epoch and not feed.gone:
            return self._reset(feed.row.epoch)
        return feed.end_at(self.position, self._before) or self._from_window()

    async def later(self) -> Event | None:
        """After `poll` had nothing: wait until that may have changed, and look again."""
        return await self._read_on() or self.poll()

    def go_back(self, run: Run, position: int) -> None:
        """Want the last run again, from a position in it on."""
        self.position = position
        self._before = run.times[position - run.first - 1] if position > run.first else self._before_run

    def _reset(self, epoch: str) -> Reset:
        self.epoch = epoch
        self.position = 0
        self._live = False
        self._tail_seen = -1
        self._before = None
        return Reset(epoch)

    def _from_window(self) -> Event | None:
        """Chunks that the window holds, or the news that there are none left."""
        feed, window = self._feed, self._feed.window
        if window is None or not agree(self._before, window.before(self.position)):
            return None
        if self.position != window.end:
            chunks = window.slice(self.position, self._reader.page_chunks, self._reader.page_bytes)
            if not chunks:
                return None
            self.position += len(chunks)
            self._before_run, self._before = self._before, chunks.times[-1]
            return Chunks(chunks)
        if self._before is None:
            self._before = window.before(self.position)
        if (
            self._live
            or feed.row is None
            or self.position != feed.row.next_offset
            or self._reader.is_dirty(feed)
        ):
            return None
        self._live = True
        return Live(self.position)

    async def _read_on(self) -> Event | None:
        """Wait at the end of the window, or read a page where the window does not reach."""
        feed, window = self._feed, self._feed.window
        if window is not None and self._waits_at(window):
            if self.position > window.end:
                # This reader has seen more than the window, which must catch up.
                self._reader.mark(feed)
            feed.live_is_news |= not self._live
            future = self._reader.wait(feed)
            try:
                await future
            finally:
                feed.waiting.discard(future)
            return None
        page = await self._reader.page(feed, self.position)
        if not page.continues(self._before):
            # Says a read that others may have begun before this position existed.
            page = await self._reader.read_page(feed, self.position)
        return self._take(page)

    def _waits_at(self, window: Window) -> bool:
        """Whether what comes next will come through the window, which may have left this reader behind."""
        if not agree(self._before, window.before(self.position)):
            return False
        return self.position == window.end or self.position == self._tail_seen > window.end

    def _take(self, page: Page) -> Event | None:
        feed = self._feed
        self._reader.learn(feed, page)
        if page.row is None:
            return None
        if page.row.epoch != self.epoch or not page.continues(self._before):
            return self._reset(page.row.epoch)
        if page.gap_to is not None:
            self.position, self._before = page.gap_to, None
            return Gap(page.position, page.gap_to)
        if page.at_tail:
            self._tail_seen = page.next
            # Nobody waits at the window's end, so it may move to where this reader is.
            if not feed.waiting and (feed.window is None or feed.window.end < page.next):
                feed.move_window(page, self._reader.window_bytes)
                if feed.behind:  # of what another read has told since
                    self._reader.mark(feed)
        self.position = page.next
        before = page.before_at(page.next)
        self._before_run, self._before = self._before, self._before if before is None else before
        return Chunks(page.chunks) if page.chunks else None
