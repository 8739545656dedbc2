"""The one error of the benchmarks."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The benchmark could not be run, or what it ran on did wrong. No figure comes from such a run."""
