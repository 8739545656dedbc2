"""The coalescing map between appends and flushes; pure: no clock, no lock, no I/O.

Invariant: what was added and not yet flushed is always in the map, merged but never lost: per stream
the highest tail, and whether anything but the tail changed. Past a bound the map collapses into
"look at everything", which loses precision only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class WakeUp(NamedTuple):
    """A hint: stream `stream_id` has reached `tail`; `changed` when its state changed or it is gone."""

    stream_id: int
    tail: int
    changed: bool = False


class Batch(NamedTuple):
    """Wake-ups taken for one flush; `everything` stands for streams that are no longer listed."""

    wake_ups: tuple[WakeUp, ...]
    everything: bool


class Buffer:
    """Wake-ups that wait for the next flush, at most `max_streams` of them."""

    def __init__(self, max_streams: int = 50_000) -> None:
        self._max_streams = max_streams
        self._streams: dict[int, WakeUp] = {}
        self._everything = False

    def __bool__(self) -> bool:
        return self._everything or bool(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, wake_ups: Iterable[WakeUp]) -> None:
        """Merge wake-ups into the map."""
        for new in wake_ups:
            old = self._streams.get(new.stream_id)
            if old is not None:
                new = WakeUp(new.stream_id, max(old.tail, new.tail), old.changed or new.changed)
            self._streams[new.stream_id] = new
        if len(self._streams) > self._max_streams:
            self._streams.clear()
            self._everything = True

    def take(self) -> Batch:
        """Everything there is; the map is empty afterwards."""
        batch = Batch(tuple(self._streams.values()), self._everything)
        self._streams = {}
        self._everything = False
        return batch

    def restore(self, batch: Batch) -> None:
        """Put a batch back whose flush failed; wake-ups added since then are kept."""
        self._everything = self._everything or batch.everything
        self.add(batch.wake_ups)
