"""When a hub polls, and how much only its polls find; pure, but for the process's tallies.

Invariant: a find counts only when no wake-up has told of it by the next poll. One that was merely under way
is no loss, and on a busy stream one always is.
"""

from __future__ import annotations

import datetime
import math
import random
import threading
from collections.abc import Iterable

from . import background


class Tally:
    """What the polls of one database did in this process, all its event loops together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last_poll: datetime.datetime | None = None
        self.found = 0

    def add(self, found: int) -> None:
        """Count a poll, and the finds that are known to be its predecessor's alone."""
        with self._lock:
            self.last_poll = datetime.datetime.now(datetime.UTC)
            self.found += found


class Schedule:
    """When the next poll is due, in monotonic seconds: slowly while wake-ups are heard, else fast."""

    def __init__(self, slow_seconds: float, fast_seconds: float, now: float) -> None:
        self._slow_seconds = slow_seconds
        self._fast_seconds = min(fast_seconds, slow_seconds)
        self.due_at = now + random.uniform(0.5, 1) * slow_seconds  # processes that start together spread

    def is_due(self, now: float, *, hears: bool) -> bool:
        """Whether to poll now; then the next is due an interval later."""
        interval = self._slow_seconds if hears else self._fast_seconds
        due = now >= self.due_at
        self.due_at = now + interval if due else min(self.due_at, now + interval)
        return due


class Finds:
    """Streams of one hub that a poll found to have moved, until a wake-up tells of them too."""

    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._found: dict[int, float] = {}  # to which tail

    def polled(self, stream_ids: Iterable[int]) -> int:
        """A poll reads these streams, of which no wake-up tells. Returns what the last one alone found."""
        found = len(self._found)
        self._found.clear()
        self._asked = set(stream_ids)
        return found

    def read(self, stream_id: int, tail: int | None) -> None:
        """A stream was read: up to `tail`, or there was nothing new."""
        if stream_id in self._asked:
            self._asked.discard(stream_id)
            if tail is not None:
                self._found[stream_id] = tail

    def announced(self, stream_id: int, tail: float, *, changed: bool) -> None:
        """A wake-up told of a stream."""
        self._asked.discard(stream_id)
        if changed or self._found.get(stream_id, math.inf) <= tail:
            self._found.pop(stream_id, None)


# The process's tallies -----------------------------------------------------------------------------

_lock = threading.Lock()
_tallies: dict[str, Tally] = {}


def tally(using: str) -> Tally:
    """The process's tally for a database alias."""
    background.check_process()
    with _lock:
        return _tallies.setdefault(using, Tally())


def _forget() -> None:
    global _lock, _tallies
    _lock = threading.Lock()
    _tallies = {}


background.after_fork(_forget)
