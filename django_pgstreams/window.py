"""The shared window of a stream's recent chunks in one event loop; pure.

Invariant: it holds the chunks `start` … `end - 1`, every one, and no others; it only grows at `end`, by what
is contiguous, and only shrinks at `start`.
"""

from __future__ import annotations

from itertools import accumulate, takewhile

from .pages import Page, Run, agree


class Window:
    """Recent chunks, bounded in bytes by whoever calls `extend`."""

    def __init__(self, start: int, before: int | None = None) -> None:
        """`before` is the time of the chunk before `start`, where that is known."""
        self.start = start
        self.end = start
        self.size_bytes = 0
        self._payloads: list[bytes] = []
        self._times: list[int] = []
        self._before = before
        self._dropped = 0  # chunks at the head of the lists that are no longer in the window
        self._latest: Run | None = None  # what it was extended by, for all who wait for just that

    def before(self, position: int) -> int | None:
        """The time of the chunk before a position, where that is known."""
        if position == self.start:
            return self._before
        return self._times[self._dropped + position - self.start - 1] if self._holds(position - 1) else None

    def _holds(self, offset: int) -> bool:
        return self.start <= offset < self.end

    def agrees(self, page: Page) -> bool:
        """Whether a page can be of the same chunks: compared by the last one that both hold.

        If that is the same, so are all before it.
        """
        last = min(page.next, self.end)
        if page.row is None or last < max(page.position, self.start):
            return True
        return page.position <= page.row.next_offset and agree(self.before(last), page.before_at(last))

    def extend(self, run: Run, max_bytes: int) -> None:
        """Add the part of a run that continues the window.

        The oldest chunks beyond `max_bytes` are dropped; the newest always stays.
        """
        known = self.end - run.first
        if not 0 <= known < len(run):
            return
        new = run.payloads[known:]
        self._payloads += new
        self._times += run.times[known:]
        self.end += len(new)
        self.size_bytes += sum(map(len, new))
        self._shrink(max_bytes)
        # Nothing that has left the window is kept by it.
        self._latest = run if known == 0 and self.start <= run.first else None

    def _shrink(self, max_bytes: int) -> None:
        while self.size_bytes > max_bytes and self.start < self.end - 1:
            self.size_bytes -= len(self._payloads[self._dropped])
            self._before = self._times[self._dropped]
            self._dropped += 1
            self.start += 1
        # Amortised: each deletion of the head moves at most as many chunks as were dropped.
        if self._dropped > len(self._payloads) // 2:
            del self._payloads[: self._dropped]
            del self._times[: self._dropped]
            self._dropped = 0

    def slice(self, position: int, max_chunks: int, max_bytes: int) -> Run:
        """The chunks from `position` on, bounded, but one at least; empty when `position` is outside.

        Nobody may change it: those who are at the same position are given the same run.
        """
        if not self._holds(position):
            return Run(position, [], [])
        latest = self._latest
        if (
            latest is not None
            and position == latest.first
            and len(latest.payloads) <= max_chunks
            and self.size_bytes <= max_bytes
        ):
            return latest
        first = self._dropped + position - self.start
        payloads = self._payloads[first : first + max_chunks]
        if self.size_bytes > max_bytes:
            sizes = accumulate(map(len, payloads))
            del payloads[max(1, sum(1 for _ in takewhile(lambda size: size <= max_bytes, sizes))) :]
        return Run(position, payloads, self._times[first : first + len(payloads)])
