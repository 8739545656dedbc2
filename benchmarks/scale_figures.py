"""The figures of `scale`; pure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence

Samples = Sequence[Sequence[float]]
"""A counter's values: `(at, value)`, in order; it never falls."""


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent of the growth: the least squares line through the logarithms of sizes and costs.

    0 is a cost that stays the same, 1 one that grows as the size does, 2 one that grows with its square.
    """
    return statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, costs))).slope


def busiest_second(counters: Sequence[Samples]) -> float:
    """The most that all counters together rose within a second; the rate of the whole, if that is shorter."""
    times = sorted({at for samples in counters for at, _ in samples})
    first, last = times[0], times[-1]
    if last - first <= 1:
        return (_total(counters, last) - _total(counters, first)) / (last - first)
    starts = [min(max(start, first), last - 1) for at in times for start in (at, at - 1)]
    return max(_total(counters, start + 1) - _total(counters, start) for start in starts)


def _total(counters: Sequence[Samples], at: float) -> float:
    return sum(_value(samples, at) for samples in counters)


def _value(samples: Samples, at: float) -> float:
    """A counter's value at a time: between two samples on the line between them."""
    after = bisect_right(samples, at, key=lambda sample: sample[0])
    if after == 0:
        return samples[0][1]
    if after == len(samples):
        return samples[-1][1]
    (began, low), (ended, high) = samples[after - 1], samples[after]
    return low + (high - low) * (at - began) / (ended - began)
