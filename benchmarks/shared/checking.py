"""What arrived against what was acknowledged, and the spread of the times between; pure.

A ledger maps each stream to its chunks: `(offset, identity, at)`, where the identity tells payloads apart and
`at` is a time of the machine's monotonic clock, in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.shared.errors import BenchmarkError

Entry = Sequence[Any]
Ledger = Mapping[Any, Sequence[Entry]]

PERCENTS = (50, 95, 99)


def check(acknowledged: Ledger, received: Ledger) -> int:
    """The number of acknowledged chunks. Raises `BenchmarkError` unless each arrived once and in order.

    Acknowledgements may stand in any order, what was received stands as it arrived. More may have arrived
    than was acknowledged (a writer that was stopped), but nothing twice, and no offset was skipped.
    """
    for stream in {*acknowledged, *received}:
        arrived = received.get(stream, ())
        _check_order(stream, arrived)
        by_offset = {offset: identity for offset, identity, *_ in arrived}
        given = acknowledged.get(stream, ())
        if len({offset for offset, *_ in given}) != len(given):
            raise BenchmarkError(f"Stream {stream}: an offset was acknowledged twice.")
        for offset, identity, *_ in given:
            if offset not in by_offset:
                raise BenchmarkError(
                    f"Stream {stream}: of {len(given)} acknowledged chunks {len(arrived)} arrived; "
                    f"offset {offset} did not."
                )
            if by_offset[offset] != identity:
                raise BenchmarkError(
                    f"Stream {stream}: at offset {offset}, {identity!r} was acknowledged "
                    f"and {by_offset[offset]!r} arrived."
                )
    return sum(map(len, acknowledged.values()))


def _check_order(stream: object, arrived: Sequence[Entry]) -> None:
    for expected, (offset, *_) in enumerate(arrived, arrived[0][0] if arrived else 0):
        if offset != expected:
            raise BenchmarkError(f"Stream {stream}: offset {offset} arrived where {expected} was due.")
    if len({identity for _, identity, *_ in arrived}) != len(arrived):
        raise BenchmarkError(f"Stream {stream}: a payload arrived twice.")


def latencies_ms(acknowledged: Ledger, received: Ledger) -> list[float]:
    """Milliseconds from each acknowledgement to the arrival, after `check`."""
    check(acknowledged, received)
    latencies = []
    for stream, given in acknowledged.items():
        arrived_at = {offset: at for offset, _, at in received.get(stream, ())}
        latencies += [(arrived_at[offset] - at) * 1000 for offset, _, at in given]
    return latencies


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of these sorted values that so many percent of them do not exceed."""
    return ordered[max(0, int(-(-len(ordered) * percent // 100)) - 1)]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, p95, p99 and maximum, rounded to thousandths. Raises `BenchmarkError` if there are none."""
    ordered = sorted(values)
    if not ordered:
        raise BenchmarkError("Nothing was measured: no chunk was acknowledged in the time given.")
    found = {f"p{percent}": round(percentile(ordered, percent), 3) for percent in PERCENTS}
    return found | {"max": round(ordered[-1], 3)}


def medians(values: Sequence[Any]) -> Any:
    """One value of several of the same shape: the median of each number, the first of anything else.

    Lists and dictionaries are gone into where all are alike.
    """
    first = values[0]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return statistics.median(values)
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: medians([value[key] for value in values]) for key in first}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [medians(list(parts)) for parts in zip(*values, strict=True)]
    return first
