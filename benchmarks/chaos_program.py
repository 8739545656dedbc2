"""What the writers and readers of `chaos` have in common: how they start, pace themselves, and end.

Arguments of a program: its name, the directory of the ledgers, the number of its life (no two processes of a
run have the same), the seed, and JSON for its kind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.talking import say, settle

MAX_DEBT_SECONDS = 1.0
"""What an outage kept back is made up for, up to this much: a burst, but not a flood."""
RETRY_SECONDS = (0.05, 1.0)
"""After an error, and at the most."""


@dataclass(frozen=True)
class Program:
    """The arguments."""

    name: str
    directory: Path
    life: int
    random: random.Random
    options: dict[str, Any]

    @classmethod
    def of_this_process(cls) -> Program:
        """From the command line."""
        name, directory, life, seed, options = sys.argv[1:]
        return cls(
            name,
            Path(directory),
            int(life),
            random.Random(f"{seed}/{name}/{life}"),
            json.loads(options),
        )

    def begin(self) -> None:
        """Say that it begins to work: its start is none of what is measured."""
        settle()
        say({"begins": True})

    @property
    def ledger(self) -> Path:
        """Its ledger's file."""
        return self.directory / f"{self.name}.ledger"


stopping = threading.Event()
"""Set when the program is asked to stop: what is under way is finished."""


def stop_when_asked() -> None:
    """From now on SIGTERM asks it to stop."""
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())


class Pace:
    """Spreads chunks over time."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._due = time.monotonic()

    def pause_seconds(self, count: int) -> float:
        """How long to wait after so many chunks."""
        now = time.monotonic()
        self._due = max(self._due + count / self._per_second, now - MAX_DEBT_SECONDS)
        return max(0.0, self._due - now)


class Retry:
    """Growing pauses while errors follow one another."""

    def __init__(self) -> None:
        self._failures = 0

    def succeeded(self) -> None:
        """The next error is the first one again."""
        self._failures = 0

    def pause_seconds(self) -> float:
        """How long to wait after one more error."""
        self._failures += 1
        shortest, longest = RETRY_SECONDS
        return min(shortest * 2 ** min(self._failures - 1, 10), longest)


def start_thread(work: Callable[[], object]) -> threading.Thread:
    """Run this in a thread. What it raises ends the process at once."""

    def run() -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the process must not go on as if nothing was
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def in_threads(*work: Callable[[], object]) -> None:
    """Run each in a thread, to their ends."""
    threads = [start_thread(one) for one in work]
    for thread in threads:
        # Signals are handled in this thread, between waits.
        while thread.is_alive():
            thread.join(0.2)
