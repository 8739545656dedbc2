"""Pages: what one statement read of a stream, its row and a run of its chunks; pure.

Invariant: the chunks of a page are contiguous, begin at its position, and end at the tail. A page that would
begin later is a gap and holds no chunks: nothing can be delivered across a hole. A row beyond the tail, put
there by another program, is no chunk of the stream until an append has raised the counter past it.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

_POSTGRES_EPOCH = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)


class StreamRow(NamedTuple):
    """A stream's row as one snapshot saw it."""

    stream_id: int
    epoch: str
    content_type: str
    state: str
    reason: str
    next_offset: int
    first_offset: int


class StoredChunk(NamedTuple):
    """A stored chunk, undecoded."""

    offset: int
    payload: bytes
    created_at: datetime.datetime


@dataclass(slots=True)
class Run:
    """Consecutive stored chunks from offset `first` on, each with the time at which it was stored.

    Columns, not objects: at full speed a process passes on 100,000 chunks a second, and keeps as many. Times
    are Postgres's microseconds until somebody wants them; sockets do not.
    """

    first: int
    payloads: list[bytes]
    times: list[int]
    frames: Any = field(default=None, compare=False)
    """Whatever whoever sent it first wants to keep for those who are given the same run."""

    def __len__(self) -> int:
        return len(self.payloads)

    def __iter__(self) -> Iterator[StoredChunk]:
        return map(StoredChunk, count(self.first), self.payloads, self.created_at())

    def created_at(self) -> list[datetime.datetime]:
        """The times. What was stored by one statement has one, which is made once."""
        made = {time: _POSTGRES_EPOCH + _MICROSECOND * time for time in set(self.times)}
        return [made[time] for time in self.times]

    @property
    def size_bytes(self) -> int:
        """The payload of all together."""
        return sum(map(len, self.payloads))


class Page(NamedTuple):
    """A contiguous run of chunks from `position` on, and the stream's row in the same snapshot.

    `row` is None when the stream does not exist. `gap_to` is the first position that can be read when chunks
    from `position` on are no longer stored; the page holds no chunks then. `before` is the time of the chunk
    before `position`, where that is stored.
    """

    position: int
    row: StreamRow | None
    chunks: Run
    gap_to: int | None
    before: int | None = None

    @property
    def next(self) -> int:
        """The position after the page."""
        return self.position + len(self.chunks)

    @property
    def at_tail(self) -> bool:
        """Whether nothing was stored after this page when it was read."""
        return self.row is None or self.next >= self.row.next_offset

    def before_at(self, position: int) -> int | None:
        """The time of the chunk before a position from `position` to `next`, where that is stored."""
        return self.before if position == self.position else self.chunks.times[position - self.position - 1]

    def continues(self, before: int | None) -> bool:
        """Whether it goes on where a reader is for whom `before` is the time of the chunk before, if known.

        Else chunks that were stored once are gone: a standby that lacked them took over, or a backup was
        restored. Others may have their offsets by now, but not their times.
        """
        if self.row is None:
            return True
        return self.position <= self.row.next_offset and agree(before, self.before)


def agree(one: int | None, other: int | None) -> bool:
    """Whether two times can be those of one chunk; None is unknown."""
    return one is None or other is None or one == other


def parameters(
    stream_ids: Sequence[int],
    positions: Sequence[int],
    *,
    max_chunks: int,
    max_bytes: int,
    max_page_bytes: int | None = None,
) -> dict[str, Any]:
    """Parameters of `sql.PAGES`: bounds of each page, and on the payload of all together."""
    return {
        "stream_ids": _array(stream_ids),
        "positions": _array(positions),
        "max_chunks": max_chunks,
        "max_bytes": max_bytes,
        "max_page_bytes": max_page_bytes or max_bytes,
    }


def _array(numbers: Sequence[int]) -> str:
    """An array as Postgres reads it, in a fraction of the time that psycopg takes for a list.

    A stream that was deleted through its instance has no number.
    """
    return f"{{{','.join(map(str, numbers)).replace('None', 'NULL')}}}"


def from_rows(positions: Sequence[int], rows: Sequence[tuple[Any, ...]]) -> list[Page]:
    """The pages that the rows of `sql.PAGES` stand for, in the order in which they were wanted."""
    return [_page(position, *row) for position, row in zip(positions, rows, strict=True)]


def _page(
    position: int,
    _place: int,
    stream_id: int | None,
    epoch: str,
    content_type: str,
    state: str,
    reason: str,
    next_offset: int,
    first_offset: int,
    first_stored: int | None,
    payloads: list[bytes] | None,
    times: bytes | None,
    before: bytes | None = None,
    _is_standby: bool = False,
) -> Page:
    if stream_id is None:
        return Page(position, None, Run(position, [], []), None)
    row = StreamRow(stream_id, epoch, content_type, state, reason, next_offset, first_offset)
    gap_to = _gap(position, row, first_stored)
    if gap_to is not None or payloads is None or times is None:
        payloads, times = [], b""
    microseconds = list(struct.unpack(f"!{len(payloads)}q", times))
    [before_time] = struct.unpack("!q", before) if before is not None else (None,)
    return Page(position, row, Run(position, payloads, microseconds), gap_to, before_time)


def _gap(position: int, row: StreamRow, first_stored: int | None) -> int | None:
    """The position to go on from when chunks at `position` are gone, else None."""
    if position >= row.next_offset:
        return None
    stored = row.next_offset if first_stored is None else first_stored
    resume = max(row.first_offset, stored)
    return resume if resume > position else None
