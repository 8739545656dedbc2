"""Whether a run of `chaos` kept every promise: the ledgers against what is stored; pure.

Nothing is left out: each stored chunk must have been attempted, each acknowledgement must be stored where it
was told, each refusal must have stored nothing, and each reader must have been given exactly what is stored,
from 0 to the end, in order. An attempt whose outcome is unknown may be stored, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.chaos_ledger import Kind, key_of, lane_of

Array = np.ndarray[Any, np.dtype[Any]]

LOST, DUPLICATE, GAP, WRONG = "lost", "duplicate", "gap", "wrong"
"""What a finding can be: an acknowledged chunk is not there; something is there, or was given, twice; a
reader, or the table, leaves something out; anything else that was promised to be otherwise."""
REFUSALS = (Kind.ENDED, Kind.ROLLED_BACK, Kind.FAILED)
STORED_FIELDS = [("stream", "<i4"), ("offset", "<i8"), ("token", "<i8")]


@dataclass(frozen=True)
class Finding:
    """A promise that was broken, and where."""

    what: str
    stream: int
    offset: int
    text: str

    def __str__(self) -> str:
        return f"{self.what}: stream {key_of(self.stream)!r}, offset {self.offset}: {self.text}"


@dataclass(frozen=True)
class Tables:
    """What is stored: each stream's tail and state, and the chunks, sorted by stream and offset.

    Their fields are `STORED_FIELDS`; the token is -1 if nobody can have written that payload.
    """

    chunks: Array
    tails: Mapping[int, int]
    states: Mapping[int, str]


@dataclass(frozen=True)
class Reading:
    """A reader's ledger, and which streams were its own to read: every `parts`-th one."""

    records: Array
    part: int
    parts: int


def check(tables: Tables, writers: Mapping[str, Array], readers: Mapping[str, Reading]) -> list[Finding]:
    """Everything that is not as it was promised."""
    writing = np.concatenate(list(writers.values()))
    findings = [*check_table(tables), *check_writing(tables, writing), *check_order(tables.chunks)]
    for name, reading in readers.items():
        findings += check_reading(tables, name, reading)
    return findings


# The tables ------------------------------------------------------------------------------------------


def check_table(tables: Tables) -> Iterator[Finding]:
    """Offsets have no holes up to the tail, tokens are unique, and every stream has ended."""
    chunks = tables.chunks
    for stream, own in _by_stream(chunks):
        tail = tables.tails.get(stream, 0)
        yield from _check_run(stream, own["offset"], tail, "the table")
    filled = set(np.unique(chunks["stream"]).tolist())
    for stream, tail in tables.tails.items():
        if tail and stream not in filled:
            yield Finding(GAP, stream, 0, f"the table holds nothing up to the tail {tail}")
        if tables.states[stream] != "completed":
            yield Finding(WRONG, stream, tail, f"its state is {tables.states[stream]!r} in the end")
    for chunk in chunks[chunks["token"] < 0]:
        yield _at(WRONG, chunk, "what is stored there nobody wrote")
    for chunk in _repeated(chunks[chunks["token"] >= 0]):
        yield _at(DUPLICATE, chunk, f"token {chunk['token']} is stored there and elsewhere")


def check_order(chunks: Array) -> Iterator[Finding]:
    """On each stream, the appends of one lane are stored in the order of the calls."""
    lanes = lane_of(chunks["token"])
    order = np.lexsort((chunks["offset"], lanes, chunks["stream"]))
    ordered, lanes = chunks[order], lanes[order]
    same = (ordered["stream"][1:] == ordered["stream"][:-1]) & (lanes[1:] == lanes[:-1])
    wrong = same & (ordered["token"][1:] < ordered["token"][:-1]) & (ordered["token"][1:] >= 0)
    for chunk in ordered[1:][wrong]:
        yield _at(WRONG, chunk, f"token {chunk['token']} is stored behind a later append of its writer")


# What writers were told ------------------------------------------------------------------------------


def check_writing(tables: Tables, records: Array) -> Iterator[Finding]:
    """Each outcome that a writer was told is true, and each stored chunk was attempted."""
    chunks = tables.chunks[tables.chunks["token"] >= 0]
    of_kind = {kind: records[records["kind"] == kind] for kind in Kind}
    acknowledged = of_kind[Kind.STORED]
    yield from _check_acknowledged(tables.chunks, chunks, acknowledged)
    for record in _repeated(acknowledged):
        yield _at(DUPLICATE, record, f"token {record['token']} was acknowledged twice")
    for kind in REFUSALS:
        refused = of_kind[kind]
        stored = chunks[np.isin(chunks["token"], refused["token"])]
        for chunk in stored:
            yield _at(WRONG, chunk, f"token {chunk['token']} is stored, and was said not to be ({kind.name})")
    attempts = of_kind[Kind.ATTEMPT]
    known = _positions(attempts["token"], chunks["token"])
    is_known = known >= 0
    is_known[is_known] = attempts["stream"][known[is_known]] == chunks["stream"][is_known]
    for chunk in chunks[~is_known]:
        yield _at(WRONG, chunk, f"nobody attempted to store token {chunk['token']} in this stream")
    for record in of_kind[Kind.CLOSED]:
        tail = tables.tails.get(int(record["stream"]), -1)
        if tail != record["offset"]:
            yield _at(WRONG, record, f"it was ended at this tail, and has {tail} now")


def _check_acknowledged(stored: Array, chunks: Array, acknowledged: Array) -> Iterator[Finding]:
    places = _positions(chunks["token"], acknowledged["token"])
    for record in acknowledged[places < 0]:
        if record["offset"] < 0:
            yield _at(LOST, record, f"token {record['token']} was acknowledged and is not stored")
            continue
        there = stored[(stored["stream"] == record["stream"]) & (stored["offset"] == record["offset"])]
        instead = f"token {there[0]['token']} is stored" if len(there) else "nothing is stored"
        yield _at(LOST, record, f"token {record['token']} was acknowledged and {instead}")
    found, told = chunks[places[places >= 0]], acknowledged[places >= 0]
    elsewhere = (found["stream"] != told["stream"]) | (
        (told["offset"] >= 0) & (found["offset"] != told["offset"])
    )
    for chunk, record in zip(found[elsewhere], told[elsewhere], strict=True):
        text = f"token {record['token']} was acknowledged and is stored at {chunk['offset']}"
        yield _at(LOST, record, f"{text} of stream {key_of(int(chunk['stream']))!r}")


# What readers were given -----------------------------------------------------------------------------


def check_reading(tables: Tables, name: str, reading: Reading) -> Iterator[Finding]:
    """A reader was given what is stored in each of its streams, from 0 to the end, once, in order."""
    records = reading.records
    for record in records[np.isin(records["kind"], (Kind.RESET, Kind.GAP))]:
        yield _at(GAP, record, f"{name} was told {Kind(record['kind']).name.lower()}")
    read = dict(_by_stream(records[records["kind"] == Kind.READ]))
    ends = dict(_by_stream(records[records["kind"] == Kind.END_SEEN]))
    stored = dict(_by_stream(tables.chunks))
    nothing = records[:0]
    for stream, tail in tables.tails.items():
        if stream % reading.parts == reading.part:
            given = read.pop(stream, nothing)
            yield from _check_run(stream, given["offset"], tail, name)
            yield from _check_same(stream, given, stored.get(stream, tables.chunks[:0]), name)
            end = ends.get(stream, nothing)["offset"]
            if list(end) != [tail]:
                told = ", ".join(map(str, end)) or "none"
                yield Finding(GAP, stream, tail, f"{name} was told other ends than this one: {told}")
    for stream, given in read.items():
        yield Finding(WRONG, stream, int(given["offset"][0]), f"{name} was given a stream of others")


def _check_same(stream: int, given: Array, stored: Array, name: str) -> Iterator[Finding]:
    places = np.searchsorted(stored["offset"], given["offset"])
    exists = places < len(stored)
    same = np.zeros(len(given), dtype=bool)
    same[exists] = stored["token"][places[exists]] == given["token"][exists]
    for record in given[~same]:
        yield Finding(
            WRONG,
            stream,
            int(record["offset"]),
            f"{name} was given token {record['token']}, which is not what is stored",
        )


# Pieces ----------------------------------------------------------------------------------------------


def _check_run(stream: int, offsets: Array, tail: int, name: str) -> Iterator[Finding]:
    """Offsets count from 0 to the tail. One finding for each place where they do not."""
    expected = np.concatenate(([0], offsets[:-1] + 1)) if len(offsets) else offsets
    for place in np.flatnonzero(offsets != expected):
        offset, due = int(offsets[place]), int(expected[place])
        if offset > due:
            yield Finding(GAP, stream, due, f"{name} leaves out {due} to {offset - 1}")
        else:
            yield Finding(DUPLICATE, stream, offset, f"{name} has it again behind {due - 1}")
    end = int(offsets[-1]) + 1 if len(offsets) else 0
    if end < tail:
        yield Finding(GAP, stream, end, f"{name} leaves out {end} to {tail - 1}, the last")
    elif end > tail:
        yield Finding(WRONG, stream, tail, f"{name} goes on behind the tail")


def _by_stream(records: Array) -> Iterator[tuple[int, Array]]:
    """The records of each stream, in their order."""
    if len(records):
        ordered = records[np.argsort(records["stream"], kind="stable")]
        starts = np.flatnonzero(np.diff(ordered["stream"])) + 1
        for own in np.split(ordered, starts):
            yield int(own["stream"][0]), own


def _repeated(records: Array) -> Array:
    """Those whose token an earlier one has."""
    records = records[records["token"] >= 0]
    ordered = records[np.argsort(records["token"], kind="stable")]
    return ordered[1:][ordered["token"][1:] == ordered["token"][:-1]]


def _positions(known: Array, wanted: Array) -> Array:
    """For each wanted value its place among the known ones, or -1."""
    if not len(known):
        return np.full(len(wanted), -1)
    order = np.argsort(known, kind="stable")
    places = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
    return np.where(known[order[places]] == wanted, order[places], -1)


def _at(what: str, record: Any, text: str) -> Finding:
    return Finding(what, int(record["stream"]), int(record["offset"]), text)
