"""How the effect of a fault is seen: in the sessions, in what writers acknowledge, in what readers record."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from benchmarks.chaos_context import Observation, Worker, World

STILL_SECONDS = 0.5
"""Something that goes on all the time, and has not for so long, stands still."""


def gone(world: World, sessions: Collection[int]) -> Observation:
    """All these sessions, of which there is one at least, are no longer there."""
    return lambda: bool(sessions) and not (set(sessions) & world.sessions().keys())


def one_gone(world: World, sessions: Collection[int]) -> Observation:
    """One at least of these sessions is no longer there."""
    return lambda: bool(set(sessions) - world.sessions().keys())


class _Lasting:
    """A look at the world whose answer has been "yes" for some time without a break."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def look(self, *, begins_anew: bool) -> bool:
        now = time.monotonic()
        if self._since is None or begins_anew:
            self._since = now
        return now - self._since >= self._seconds


def nothing_acknowledged(world: World, seconds: float = STILL_SECONDS) -> Observation:
    """No writer had anything acknowledged for some time."""
    return _standing_still(lambda: world.acknowledged(None), seconds)


def writer_stands_still(world: World, writer: Worker, seconds: float = STILL_SECONDS) -> Observation:
    """A writer had nothing acknowledged for some time, in which others had."""
    others_began = world.acknowledged(None)
    stands_still = _standing_still(lambda: world.acknowledged(writer.name), seconds)
    return lambda: stands_still() and world.acknowledged(None) > others_began


def _standing_still(count: Callable[[], int], seconds: float) -> Observation:
    lasting = _Lasting(seconds)
    before = -1

    def look() -> bool:
        nonlocal before
        now, changed = count(), False
        before, changed = now, now != before
        return lasting.look(begins_anew=changed)

    return look


def reader_falls_behind(world: World, reader: Worker, seconds: float = STILL_SECONDS) -> Observation:
    """For some time a reader's lag has grown and never become less: it recorded nothing."""
    lasting = _Lasting(seconds)
    before = began_at = world.lag(reader.name)

    def look() -> bool:
        nonlocal before, began_at
        lag = world.lag(reader.name)
        caught_up, before = lag < before, lag
        if caught_up:
            began_at = lag
        return lasting.look(begins_anew=caught_up) and lag > began_at

    return look


def any_of(observations: Collection[Observation]) -> Observation:
    """One of them is true. All are asked each time, since they watch what goes on."""
    return lambda: True in [observation() for observation in observations]
