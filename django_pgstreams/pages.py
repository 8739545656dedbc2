"""Pages: what one statement read of a stream, its row and a run of its chunks; pure.

Invariant: the chunks of a page are contiguous, begin at its position, and end at the tail. A page that would
begin later is a gap and holds no chunks: nothing can be delivered across a hole. A row beyond the tail, put
there by another program, is no chunk of the stream until an append has raised the counter past it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple


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


class Page(NamedTuple):
    """A contiguous run of chunks from `position` on, and the stream's row in the same snapshot.

    `row` is None when the stream does not exist. `gap_to` is the first position that can be read when chunks
    from `position` on are no longer stored; the page holds no chunks then.
    """

    position: int
    row: StreamRow | None
    chunks: list[StoredChunk]
    gap_to: int | None

    @property
    def next(self) -> int:
        """The position after the page."""
        return self.position + len(self.chunks)

    @property
    def at_tail(self) -> bool:
        """Whether nothing was stored after this page when it was read."""
        return self.row is None or self.next >= self.row.next_offset


def parameters(
    stream_ids: Sequence[int], positions: Sequence[int], *, max_chunks: int, max_bytes: int
) -> dict[str, Any]:
    """Parameters of `sql.PAGES`."""
    return {
        "stream_ids": list(stream_ids),
        "positions": list(positions),
        "max_chunks": max_chunks,
        "max_bytes": max_bytes,
    }


def from_rows(positions: Sequence[int], rows: Iterable[tuple[Any, ...]]) -> list[Page]:
    """The pages that the rows of `sql.PAGES` stand for, in the order in which they were wanted."""
    grouped = groupby(rows, key=lambda row: row[0])
    return [
        _page(position, list(of_stream)) for position, (_, of_stream) in zip(positions, grouped, strict=True)
    ]


def _page(position: int, rows: list[tuple[Any, ...]]) -> Page:
    first = rows[0]
    if first[1] is None:
        return Page(position, None, [], None)
    row = StreamRow(*first[1:8])
    gap_to = _gap(position, row, first[8])
    chunks: list[StoredChunk] = []
    if gap_to is None:
        for place, stored in enumerate(rows):
            if stored[8] != position + place or stored[9] is None or stored[8] >= row.next_offset:
                break
            chunks.append(StoredChunk(*stored[8:11]))
    return Page(position, row, chunks, gap_to)


def _gap(position: int, row: StreamRow, first_stored: int | None) -> int | None:
    """The position to go on from when chunks at `position` are gone, else None."""
    if position >= row.next_offset:
        return None
    stored = row.next_offset if first_stored is None else min(first_stored, row.next_offset)
    resume = max(row.first_offset, stored)
    return resume if resume > position else None
