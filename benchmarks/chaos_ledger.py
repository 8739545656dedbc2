"""The ledgers of `chaos`: what each process did and saw, in files outside Postgres.

Invariant: whatever a process counts as done is in its file by then. A batch of records is one `write`, which
the kernel keeps when the process is killed; a batch that the kill cut short ends with a part of a record,
which was not counted, and which readers leave out and the process's next life takes away. Files alone hold
the truth about a run: the checker needs nothing else but the tables.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple


class Kind(IntEnum):
    """What a record says. Writers first, then readers."""

    ATTEMPT = 1  # it is about to append
    STORED = 2  # it was told that the chunk is stored, and unless it was piped, where
    ENDED = 3  # it was told that the stream has ended: not stored
    ROLLED_BACK = 4  # it took the append back: not stored
    FAILED = 5  # it was told that the append is not stored
    UNKNOWN = 6  # it was told that nobody knows, or lost its connection
    CLOSED = 7  # it ended the stream, which then had this tail
    READ = 8  # it was given this chunk; token -1 if nobody can have written that
    END_SEEN = 9  # it was told that the stream ends at this position
    RESET = 10  # it was told that this position is of another stream
    GAP = 11  # it was told that the chunks from this position on are gone


class Record(NamedTuple):
    """What happened to one chunk. What does not apply is -1; `at` is `CLOCK_MONOTONIC`, seconds."""

    stream: int
    kind: int
    offset: int
    token: int
    at: float


FIELDS = [("stream", "<i4"), ("kind", "<i4"), ("offset", "<i8"), ("token", "<i8"), ("at", "<f8")]
"""The same as it lies in the file, for numpy."""
_PACK = struct.Struct("<iiqqd")
RECORD_BYTES = _PACK.size


class Ledger:
    """One process's file, open for appending; its earlier lives' records are in it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._file, os.fstat(self._file).st_size // RECORD_BYTES * RECORD_BYTES)

    def write(self, kind: Kind, stream: int, chunks: Iterable[tuple[int, int]]) -> None:
        """Record one kind for chunks `(offset, token)` of a stream, all at this time, in one piece."""
        at = time.monotonic()
        records = b"".join([_PACK.pack(stream, kind, offset, token, at) for offset, token in chunks])
        if os.write(self._file, records) != len(records):
            raise OSError("The ledger's disk is full.")


def last_positions(path: Path) -> dict[int, int]:
    """How far a reader has read each stream: the position behind the last chunk, and -1 if it saw the end."""
    positions: dict[int, int] = {}
    if path.exists():
        content = path.read_bytes()
        whole = len(content) // RECORD_BYTES * RECORD_BYTES
        for stream, kind, offset, _, _ in _PACK.iter_unpack(content[:whole]):
            if kind == Kind.READ:
                positions[stream] = offset + 1
            elif kind == Kind.END_SEEN:
                positions[stream] = -1
    return positions


# Chunks ----------------------------------------------------------------------------------------------

_LANE_BITS, _COUNTER_BITS = 8, 32
_TEXT = "the quick brown fox jumps over the lazy dog and comes back for more of the same, again and again"


class Lane:
    """A source of tokens, unique in the run, that grow with each append: of one writer in one life."""

    def __init__(self, life: int, place: int) -> None:
        self._next = (life << _LANE_BITS | place) << _COUNTER_BITS

    def take(self, count: int) -> list[int]:
        """The next tokens."""
        first, self._next = self._next, self._next + count
        return list(range(first, self._next))


def lane_of(token: int) -> int:
    """The lane that a token (or an array of them) is from."""
    return token >> _COUNTER_BITS


def data_of(token: int) -> dict[str, Any]:
    """The chunk that bears a token: another text for another token."""
    return {"token": token, "text": _TEXT[: 20 + token % 70]}


def token_of(data: Any) -> int:
    """The token that a chunk bears; -1 if nobody can have written it."""
    token = data.get("token", -1) if isinstance(data, dict) else -1
    return token if isinstance(token, int) and data == data_of(token) else -1


# Streams ---------------------------------------------------------------------------------------------

_ENTRY_BYTES = 10


def key_of(stream: int) -> str:
    """The key of a stream."""
    return f"chaos/{stream}"


def stream_of(key: str) -> int:
    """The number of a stream."""
    return int(key.rpartition("/")[2])


class Streams:
    """The list of streams: the keeper adds to it what is committed, all others read it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "streams"
        self._path.touch()
        self._finished = directory / "finished"
        self._at = 0

    def begun(self, stream: int) -> None:
        """Say that a stream (numbered from 1) exists."""
        self._add(stream)

    def ended(self, stream: int) -> None:
        """Say that a stream takes no more."""
        self._add(-stream)

    def _add(self, entry: int) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(f"{entry:>{_ENTRY_BYTES - 1}}\n".encode())

    def news(self) -> list[int]:
        """What was added since the last call: a stream that has begun, or minus one that ended."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            entries = file.read()
        whole = len(entries) // _ENTRY_BYTES * _ENTRY_BYTES
        self._at += whole
        return [int(entry) for entry in entries[:whole].split()]

    def finish(self) -> None:
        """Say that there will be no more."""
        self._finished.touch()

    @property
    def is_finished(self) -> bool:
        """Whether there will be no more; ask before the last `news`."""
        return self._finished.exists()


class Epochs:
    """The epochs of a reader's streams, kept for its next life."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        self._known: dict[int, str] = dict(map(json.loads, lines))
        self._path = path

    def get(self, stream: int) -> str | None:
        """The epoch of a stream, if it was ever told."""
        return self._known.get(stream)

    def note(self, stream: int, epoch: str) -> None:
        """Keep the epoch of a stream; the first one counts."""
        if stream not in self._known:
            self._known[stream] = epoch
            with self._path.open("a") as file:
                file.write(json.dumps([stream, epoch]) + "\n")
