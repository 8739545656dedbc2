"""The shared window of a stream's recent chunks in one event loop; pure.

Invariant: it holds the chunks `start` … `end - 1`, every one, and no others; it only grows at `end`, by what
is contiguous, and only shrinks at `start`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pages import StoredChunk


class Window:
    """Recent chunks, bounded in bytes by whoever calls `extend`."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self.size_bytes = 0
        self._chunks: list[StoredChunk] = []
        self._dropped = 0  # chunks at the head of the list that are no longer in the window

    def extend(self, position: int, chunks: Sequence[StoredChunk], max_bytes: int) -> None:
        """Add the part of a contiguous run from `position` on that continues the window.

        The oldest chunks beyond `max_bytes` are dropped; the newest always stays.
        """
        if not position <= self.end < position + len(chunks):
            return
        new = chunks[self.end - position :]
        self._chunks.extend(new)
        self.end += len(new)
        self.size_bytes += sum(len(chunk.payload) for chunk in new)
        self._shrink(max_bytes)

    def _shrink(self, max_bytes: int) -> None:
        while self.size_bytes > max_bytes and self.start < self.end - 1:
            self.size_bytes -= len(self._chunks[self._dropped].payload)
            self._dropped += 1
            self.start += 1
        # Amortised: each deletion of the head moves at most as many chunks as were dropped.
        if self._dropped > len(self._chunks) // 2:
            del self._chunks[: self._dropped]
            self._dropped = 0

    def slice(self, position: int, max_chunks: int, max_bytes: int) -> list[StoredChunk]:
        """The chunks from `position` on, bounded, but one at least; empty when `position` is outside."""
        if not self.start <= position < self.end:
            return []
        first = self._dropped + position - self.start
        run = self._chunks[first : first + max_chunks]
        size = 0
        for count, chunk in enumerate(run):
            size += len(chunk.payload)
            if size > max_bytes and count:
                return run[:count]
        return run
