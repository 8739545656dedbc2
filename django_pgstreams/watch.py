"""What the relay knows of the streams that can still move, and how it finds what has changed; pure.

Watched are the open streams, and of those that have ended the ones whose ids are above a mark: a stream that
was made and ended between two looks was never seen open. A position is a stream's tail while it is open, and
the complement of that (`~tail`) once it has ended. Ids are in blocks of 256; the database makes a digest of
each block's ids and positions, so that only blocks with changes are read.

Invariant: what `accept` was given has been announced; a position that differs from it has not. So a look that
fails, or that comes late, loses nothing: the next one differs by as much.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .buffer import WakeUp

_MARK_AGE_SECONDS = 10.0
"""Ended streams are watched for at least this long after their ids were first seen."""


class Block(NamedTuple):
    """The watched streams of a block of ids, as of one statement: position by id, and their digest."""

    digest: str
    positions: Mapping[int, int]


_NOTHING = Block("", {})


class Watch:
    """What was last announced. `mark` is the id above which ended streams are watched too."""

    def __init__(self, mark: int, now: float) -> None:
        self.mark = mark
        self._next_mark = mark
        self._highest = mark
        self._marked_at = now
        self._blocks: dict[int, Block] = {}

    @property
    def streams(self) -> int:
        """How many are watched."""
        return sum(len(block.positions) for block in self._blocks.values())

    def changed(self, digests: Mapping[int, str]) -> list[int]:
        """The blocks to read, given the digests of all blocks that have watched streams now."""
        numbers = digests.keys() | self._blocks.keys()
        return sorted(
            number
            for number in numbers
            if digests.get(number, "") != self._blocks.get(number, _NOTHING).digest
        )

    def wake_ups(self, numbers: Iterable[int], read: Mapping[int, Block]) -> Iterator[WakeUp]:
        """What to announce, given these blocks as they were read; one without streams is not in `read`."""
        for number in numbers:
            known = self._blocks.get(number, _NOTHING).positions
            yield from _differences(known, read.get(number, _NOTHING).positions)

    def accept(self, numbers: Iterable[int], read: Mapping[int, Block], now: float) -> None:
        """Know these blocks as they were read: their differences have been announced."""
        for number in numbers:
            if number in read:
                self._blocks[number] = read[number]
            else:
                self._blocks.pop(number, None)
        ids = itertools.chain([self._highest], *(block.positions for block in read.values()))
        self._highest = max(ids)
        if now - self._marked_at >= _MARK_AGE_SECONDS:
            self.mark, self._next_mark, self._marked_at = self._next_mark, self._highest, now


def _differences(known: Mapping[int, int], found: Mapping[int, int]) -> Iterator[WakeUp]:
    for stream_id, position in found.items():
        # Of a stream that is open and empty nobody waits to hear.
        before = known.get(stream_id, 0)
        if position != before:
            grown = 0 <= before < position
            yield WakeUp(stream_id, position if position >= 0 else ~position, changed=not grown)
    for stream_id in known.keys() - found.keys():
        # Those that had ended only fell below the mark.
        if (tail := known[stream_id]) >= 0:
            yield WakeUp(stream_id, tail, changed=True)
