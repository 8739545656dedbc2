"""One fault after another, in an order that the seed decides, and what each of them did."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import psycopg

from benchmarks.chaos_context import Fault, World
from benchmarks.chaos_watch import Array, Watch

_LOOK_SECONDS = 0.02
RECOVERY_PATIENCE_SECONDS = 20.0
_PAUSE_SECONDS = (0.2, 1.0)
"""All is well for so long between two faults."""


@dataclass(frozen=True)
class Occurrence:
    """One fault that was."""

    kind: str
    observed: bool
    recovery_seconds: float
    """From its end until each writer had something acknowledged, and each reader lacked none of it."""
    last: str
    """Who was the last one to recover."""
    errors: int
    """Appends that failed or are unknown."""
    began: float
    """When, by `CLOCK_MONOTONIC`."""
    seconds: float
    """How long it was, from its beginning to its end."""

    def standstill_seconds(self, acknowledged_at: Array) -> float:
        """For how long, from its beginning to recovery, nothing at all was acknowledged; times are sorted."""
        end = self.began + self.seconds + self.recovery_seconds
        first, last = np.searchsorted(acknowledged_at, (self.began, end))
        times = np.concatenate(([self.began], acknowledged_at[first:last], [end]))
        return float(np.diff(times).max())


def shuffled(kinds: Sequence[type[Fault]], chance: random.Random) -> Iterator[type[Fault]]:
    """All kinds in an order by chance, over and over, so that none comes much more often than another."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def run_faults(
    kinds: Iterator[type[Fault]],
    world: World,
    watch: Watch,
    until: float,
    check: Callable[[], None],
) -> Iterator[Occurrence]:
    """Faults until that time; `check` raises if something ended that no fault has ended."""
    while time.monotonic() < until:
        yield _run_fault(next(kinds)(), world, watch)
        check()
        time.sleep(world.random.uniform(*_PAUSE_SECONDS))


def _run_fault(fault: Fault, world: World, watch: Watch) -> Occurrence:
    errors, at = watch.errors(), time.monotonic()
    try:
        fault.inject(world)
        lasts_until = time.monotonic() + fault.hold_seconds
        observed = _wait_for_effect(fault, world)
        time.sleep(max(0.0, lasts_until - time.monotonic()))
    finally:
        fault.heal(world)
    healed = time.monotonic()
    # The keeper appends too seldom to tell.
    writers = [writer.name for writer in world.writers if writer.kind != "keeper"]
    recovery = watch.recovery(healed, writers, RECOVERY_PATIENCE_SECONDS)
    return Occurrence(
        fault.kind,
        observed,
        recovery.seconds,
        recovery.last,
        watch.errors() - errors,
        at,
        healed - at,
    )


def _wait_for_effect(fault: Fault, world: World) -> bool:
    deadline = time.monotonic() + fault.patience_seconds
    while True:
        try:
            if fault.observed(world):
                return True
        except (psycopg.Error, OSError):
            pass  # nobody can look now
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
