"""Watches the ledgers of `chaos` while they grow: what is acknowledged, what fails, who lags behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from benchmarks.chaos_ledger import FIELDS, RECORD_BYTES, Kind

Array = np.ndarray[Any, np.dtype[Any]]

_LOOK_SECONDS = 0.05
_MOST_STREAMS = 10_000


class Growing:
    """A ledger's file that others append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> Array:
        """The whole records that came since the last call."""
        if not self._path.exists():
            return np.empty(0, FIELDS)
        with self._path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
        whole = len(content) // RECORD_BYTES * RECORD_BYTES
        self._at += whole
        return np.frombuffer(content[:whole], FIELDS)


class WriterState:
    """How far a writer is."""

    def __init__(self, path: Path) -> None:
        self._ledger = Growing(path)
        self.acknowledged = 0
        self.errors = 0
        self.last_at = 0.0

    def look(self, tails: Array) -> None:
        """Count what is new, and raise the tails that its streams are known to have."""
        new = self._ledger.read()
        stored = new[new["kind"] == Kind.STORED]
        self.acknowledged += len(stored)
        self.errors += int(np.isin(new["kind"], (Kind.FAILED, Kind.UNKNOWN)).sum())
        if len(stored):
            self.last_at = float(stored["at"][-1])
            np.maximum.at(tails, stored["stream"], stored["offset"] + 1)


class ReaderState:
    """How far a reader is."""

    def __init__(self, path: Path, part: int, parts: int) -> None:
        self._ledger = Growing(path)
        self._own = slice(part, None, parts)
        self._positions = np.zeros(_MOST_STREAMS, np.int64)
        self.received = 0

    def look(self) -> None:
        """Count what is new."""
        new = self._ledger.read()
        read = new[new["kind"] == Kind.READ]
        self.received += len(read)
        np.maximum.at(self._positions, read["stream"], read["offset"] + 1)

    def lag(self, tails: Array) -> int:
        """How many chunks up to these tails it has not recorded."""
        return int(np.maximum(tails[self._own] - self._positions[self._own], 0).sum())


class Recovery(NamedTuple):
    """How long it took until all was well, and who was the last one to be."""

    seconds: float
    last: str
    is_well: bool


class Watch:
    """A thread that looks at all ledgers, some twenty times a second."""

    def __init__(self, directory: Path, writers: list[str], readers: Mapping[str, tuple[int, int]]) -> None:
        self._tails = np.zeros(_MOST_STREAMS, np.int64)
        self._writers = {name: WriterState(directory / f"{name}.ledger") for name in writers}
        self._readers = {
            name: ReaderState(directory / f"{name}.ledger", *own) for name, own in readers.items()
        }
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._left.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._left.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Take in what is new; readers first, so that none seems to be ahead of the writers' word."""
        with self._lock:
            for reader in self._readers.values():
                reader.look()
            for writer in self._writers.values():
                writer.look(self._tails)

    # What it has seen --------------------------------------------------------------------------------

    def acknowledged(self, name: str | None = None) -> int:
        """Chunks acknowledged to one writer, or to all."""
        return sum(state.acknowledged for state in self._some_writers(name))

    def errors(self, name: str | None = None) -> int:
        """Appends of one writer, or of all, that failed or are unknown."""
        return sum(state.errors for state in self._some_writers(name))

    def _some_writers(self, name: str | None) -> list[WriterState]:
        return list(self._writers.values()) if name is None else [self._writers[name]]

    def received(self, name: str) -> int:
        """Chunks that a reader has recorded."""
        return self._readers[name].received

    def lag(self, name: str | None = None, tails: Array | None = None) -> int:
        """Chunks that one reader, or the one that is farthest behind, has not recorded."""
        states = self._readers.values() if name is None else [self._readers[name]]
        with self._lock:
            return max(state.lag(self._tails if tails is None else tails) for state in states)

    def recovery(self, since: float, writers: Sequence[str], patience_seconds: float) -> Recovery:
        """Wait until all is well, and say how long after `since` that was.

        Well means: each of the writers has had something acknowledged since then, and every reader has
        recorded all that was acknowledged by that moment.
        """
        late = dict.fromkeys(writers, 0.0)
        tails: Array | None = None
        waiting = list(writers)
        while waiting and (now := time.monotonic()) < since + patience_seconds:
            if tails is None:
                waiting = [name for name in writers if self._writers[name].last_at <= since]
                if not waiting:
                    with self._lock:
                        tails = self._tails.copy()
            if tails is not None:
                waiting = [name for name in self._readers if self.lag(name, tails)]
            late |= dict.fromkeys(waiting, now - since)
            if waiting:
                time.sleep(_LOOK_SECONDS / 2)
        last = max(late, key=lambda name: late[name])
        seconds = patience_seconds if waiting else time.monotonic() - since
        return Recovery(seconds, last, is_well=not waiting)
