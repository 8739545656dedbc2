"""What a reader of `chaos` keeps: what it was given, and from which position and epoch it goes on.

Nothing is put right here: a hole or a duplicate is recorded as it came, for the checker to find.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from benchmarks.chaos_ledger import Epochs, Kind, Ledger, Streams, last_positions, token_of
from benchmarks.chaos_program import Program

LOOK_SECONDS = 0.1
"""How often a reader looks for new streams."""


class Book:
    """The streams that are this reader's: every `parts`-th one; kept over its lives."""

    def __init__(self, program: Program) -> None:
        self._streams = Streams(program.directory)
        self._part, self._parts = program.options["part"], program.options["parts"]
        self._positions = last_positions(program.ledger)
        self._ledger = Ledger(program.ledger)
        self._epochs = Epochs(program.directory / f"{program.name}.epochs")
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._all_known = False

    def new(self) -> list[int]:
        """Streams to be followed from now on."""
        finished = self._streams.is_finished
        found = [
            stream
            for stream in self._streams.news()
            if stream > 0 and stream % self._parts == self._part and self._positions.get(stream) != -1
        ]
        with self._lock:
            self._open.update(found)
            self._all_known = finished
        return found

    @property
    def is_done(self) -> bool:
        """Whether all streams have been read to their ends."""
        with self._lock:
            return self._all_known and not self._open

    def is_open(self, stream: int) -> bool:
        """Whether the stream's end has not been read yet."""
        with self._lock:
            return stream in self._open

    def start(self, stream: int) -> tuple[int, str | None]:
        """Where to go on: the position, and the epoch if it is known."""
        return self._positions.get(stream, 0), self._epochs.get(stream)

    def epoch(self, stream: int, epoch: str) -> None:
        """The stream's epoch; it counts until a reset."""
        self._epochs.note(stream, epoch)

    def read(self, stream: int, chunks: Iterable[tuple[int, Any]]) -> None:
        """These came: `(offset, data)`."""
        found = [(offset, token_of(data)) for offset, data in chunks]
        self._ledger.write(Kind.READ, stream, found)
        self._positions[stream] = found[-1][0] + 1

    def ended(self, stream: int, position: int) -> None:
        """The stream's end came, at this position."""
        self._leave(Kind.END_SEEN, stream, position)

    def reset(self, stream: int) -> None:
        """A reset came; the stream is given up."""
        self._leave(Kind.RESET, stream, self._positions.get(stream, 0))

    def gap(self, stream: int) -> None:
        """A gap came; the stream is given up."""
        self._leave(Kind.GAP, stream, self._positions.get(stream, 0))

    def _leave(self, kind: Kind, stream: int, position: int) -> None:
        self._ledger.write(kind, stream, [(position, -1)])
        with self._lock:
            self._open.discard(stream)
