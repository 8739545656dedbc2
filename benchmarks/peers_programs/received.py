"""What readers got: counted and checked as it comes, the same for every peer."""

from __future__ import annotations

import threading
import time
from typing import Any

from benchmarks.shared.checking import spread

from .work import STREAMS

RETRY_SECONDS = 0.02


class Received:
    """The chunks that arrived. A stream's chunks are taken by one thread at a time."""

    def __init__(self) -> None:
        self.following = threading.Event()
        """Set by a peer's `read` once nothing written from now on can escape it."""
        self.finished = False
        """Set when no more is counted, and readers may end."""
        self._next = [0] * STREAMS
        self._count = [0] * STREAMS
        self._disordered = 0
        self._first_again = 0
        self._times: list[tuple[float, float]] = []  # before the append, and here
        self._last_at = 0.0

    def take(self, data: dict[str, Any]) -> None:
        """A chunk has arrived."""
        at = time.monotonic()
        stream, number = data["stream"], data["number"]
        if number < self._next[stream]:
            if number:
                self._disordered += 1
            else:
                self._first_again += 1
            return
        self._next[stream] = number + 1
        self._count[stream] += 1
        self._last_at = at
        if number:
            self._times.append((data["at"], at))

    @property
    def counts(self) -> list[int]:
        """How many chunks of each stream arrived, each once and in order; the first chunks included."""
        return list(self._count)

    def wait_for(self, counts: list[int], *, quiet_seconds: float) -> bool:
        """Wait until so many chunks of each stream have arrived; not when none has come for so long."""
        begun = time.monotonic()
        while any(have < want for have, want in zip(self._count, counts, strict=True)):
            if time.monotonic() - max(begun, self._last_at) > quiet_seconds:
                return False
            time.sleep(RETRY_SECONDS)
        return True

    def report(self, ended: float) -> dict[str, Any]:
        """What arrived, `in_time` before writing ended, as JSON values. Latencies begin before the append."""
        milliseconds = [(here - before) * 1000 for before, here in self._times]
        return {
            "counts": self.counts,
            "in_time": sum(here <= ended for _, here in self._times),
            "disordered": self._disordered,
            "first_again": self._first_again,
            "latency_ms": spread(milliseconds) if milliseconds else None,
        }
