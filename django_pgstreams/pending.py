"""Appends that wait to be stored, in one lane per stream, and the batches made of them; pure.

Invariant: the appends of a stream leave in the order in which they came, and never in two batches at a time:
a lane is ready, or in a batch, or parked (its row is locked elsewhere), and only a ready one gets into a
batch. What a batch could not store comes back to the front of its lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

_OVERHEAD_BYTES = 400
"""What an append costs in memory beside its payload, roughly: it, its reply, and their places in queues."""


class End(NamedTuple):
    """The end of a stream: its state and the reason."""

    state: str
    reason: str


class Append:
    """One thing to do at the tail of a stream: store a payload, or end it, or nothing (a marker).

    `reply` has `set_result(offset)` and `set_exception(error)`, to be called in the event loop `loop` if
    there is one. A marker is answered once all that came before it is.
    """

    __slots__ = ("end", "expected_offset", "key", "loop", "payload", "reply", "size_bytes", "stream_id")

    def __init__(
        self,
        stream_id: int,
        key: str,
        payload: bytes | None,
        reply: Any,
        loop: Any = None,
        expected_offset: int | None = None,
        end: End | None = None,
    ) -> None:
        self.stream_id = stream_id
        self.key = key
        self.payload = payload
        self.reply = reply
        self.loop = loop
        self.expected_offset = expected_offset
        self.end = end
        self.size_bytes = _OVERHEAD_BYTES + (0 if payload is None else len(payload))


class Lane:
    """The appends of one stream."""

    __slots__ = ("appends", "key", "parked_at", "stream_id")

    def __init__(self, stream_id: int, key: str) -> None:
        self.stream_id = stream_id
        self.key = key
        self.appends: deque[Append] = deque()
        self.parked_at: float | None = None


class Segment:
    """What one batch does to one stream: consecutive appends from its lane.

    `expected_offset` is the condition of the first; a condition further on fits it. Only the last may end
    the stream.
    """

    __slots__ = ("appends", "end", "expected_offset", "lane", "payloads", "size_bytes")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.appends: list[Append] = []
        self.payloads: list[bytes] = []
        self.expected_offset: int | None = None
        self.end: End | None = None
        self.size_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do in the database."""
        return not self.payloads and self.end is None

    def fill(self, max_chunks: int, max_bytes: int) -> None:
        """Take appends from the lane while they fit; the first one does in any case."""
        waiting = self.lane.appends
        while waiting and self.end is None:
            append = waiting[0]
            payload = append.payload
            if payload is not None:
                if not self._fits(len(payload), max_chunks, max_bytes):
                    return
                if append.expected_offset is not None and not self._expects(append.expected_offset):
                    return
                self.payloads.append(payload)
                self.size_bytes += len(payload)
            self.end = append.end
            self.appends.append(waiting.popleft())

    def take_lane(self) -> None:
        """Take all appends of the lane: they share this segment's fate, which is a refusal."""
        self.appends += self.lane.appends
        self.lane.appends.clear()

    def _fits(self, size_bytes: int, max_chunks: int, max_bytes: int) -> bool:
        if not self.payloads:
            return True
        return len(self.payloads) < max_chunks and self.size_bytes + size_bytes <= max_bytes

    def _expects(self, offset: int) -> bool:
        """Whether an append that wants this offset can come next in this segment."""
        if not self.payloads:
            self.expected_offset = offset
        return self.expected_offset is not None and offset == self.expected_offset + len(self.payloads)


class Pending:
    """All lanes, `max_bytes` at the most; beyond that, appends stand outside, in a queue of their own.

    Not thread-safe: whoever owns it holds a lock.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lanes: dict[int, Lane] = {}
        self._ready: deque[Lane] = deque()
        self._parked: deque[Lane] = deque()
        self._outside: deque[Append] = deque()
        self._outside_bytes = 0
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def is_ready(self) -> bool:
        """Whether a batch could be made."""
        return bool(self._ready)

    @property
    def parked(self) -> int:
        """How many lanes are parked, without one that is being tried."""
        return len(self._parked)

    @property
    def is_full(self) -> bool:
        """Whether an append would have to wait outside."""
        return bool(self._outside) or self.size_bytes >= self._max_bytes

    @property
    def pending_bytes(self) -> int:
        """The size of all appends, those outside too."""
        return self.size_bytes + self._outside_bytes

    def add(self, append: Append) -> None:
        """Put an append at the end of its lane, or outside if there is no room."""
        if self._outside or self.size_bytes >= self._max_bytes:
            self._outside.append(append)
            self._outside_bytes += append.size_bytes
        else:
            self._enter(append)

    def _enter(self, append: Append) -> None:
        self.size_bytes += append.size_bytes
        lane = self._lanes.get(append.stream_id)
        if lane is None:
            lane = self._lanes[append.stream_id] = Lane(append.stream_id, append.key)
            self._ready.append(lane)
        lane.appends.append(append)

    def _leave(self, appends: Iterable[Append]) -> None:
        for append in appends:
            self.size_bytes -= append.size_bytes
        while self._outside and self.size_bytes < self._max_bytes:
            append = self._outside.popleft()
            self._outside_bytes -= append.size_bytes
            if append.loop is None or not append.reply.cancelled():
                self._enter(append)

    def take_batch(self, max_chunks: int, max_bytes: int) -> list[Segment]:
        """Up to so many chunks and bytes of the ready lanes: each gets its share, then what is left.

        The segments are in the order of the streams' ids, in which rows are locked and stored.
        """
        share = max(1, max_chunks // max(1, len(self._ready)))
        batch: list[Segment] = []
        while self._ready and max_chunks > 0 and max_bytes > 0:
            segment = Segment(self._ready.popleft())
            segment.fill(min(share, max_chunks), max_bytes)
            max_chunks -= len(segment.payloads)
            max_bytes -= segment.size_bytes
            batch.append(segment)
        for segment in batch:
            if max_chunks <= 0 or max_bytes <= 0:
                break
            if segment.lane.appends:
                chunks, size = len(segment.payloads), segment.size_bytes
                segment.fill(chunks + max_chunks, size + max_bytes)
                max_chunks -= len(segment.payloads) - chunks
                max_bytes -= segment.size_bytes - size
        batch.sort(key=_stream_id)
        return batch

    def take_parked(self, max_chunks: int, max_bytes: int) -> Segment | None:
        """A segment of the lane that has not been tried for longest."""
        if not self._parked:
            return None
        segment = Segment(self._parked.popleft())
        segment.fill(max_chunks, max_bytes)
        return segment

    def finish(self, segment: Segment, answered: int) -> None:
        """Take a segment back whose first appends, so many, have been answered; its lane is ready again."""
        lane = segment.lane
        lane.appends.extendleft(reversed(segment.appends[answered:]))
        lane.parked_at = None
        if lane.appends:
            self._ready.append(lane)
        else:
            del self._lanes[lane.stream_id]
        self._leave(segment.appends[:answered])

    def park(self, segment: Segment, now: float) -> None:
        """Take a segment back whose stream is locked elsewhere; its lane is tried on its own from now on."""
        lane = segment.lane
        lane.appends.extendleft(reversed(segment.appends))
        if lane.parked_at is None:
            lane.parked_at = now
        self._parked.append(lane)

    def take_all(self) -> list[Segment]:
        """Everything that is not in a batch, to be refused; each segment is its whole lane."""
        segments = [Segment(lane) for lane in (*self._ready, *self._parked)]
        self._ready.clear()
        self._parked.clear()
        for segment in segments:
            segment.take_lane()
        return segments


def _stream_id(segment: Segment) -> int:
    return segment.lane.stream_id
