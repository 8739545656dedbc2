"""What Postgres and its machine did while pgbench wrote: waits, processors, disk, flushes of the WAL."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict

INTERVAL_SECONDS = 0.05

RUNNING = "running"
NOTIFY_WAITS = {"Lock/object", "LWLock/NotifyQueue", "LWLock/NotifyQueueTail", "LWLock/NotifyBuffer"}
"""A commit that notifies locks "database 0" until it has ended (`Lock/object`), and then the queue."""

_WAITS = """
SELECT coalesce(wait_event_type || '/' || wait_event, 'running'), count(*)::int
FROM pg_stat_activity WHERE application_name = 'pgbench' GROUP BY 1
"""
_POSTGRES_18 = 180_000
_WAL_SYNCS = "SELECT sum(fsyncs)::bigint FROM pg_stat_io WHERE object = 'wal'"
_WAL_SYNCS_BEFORE_18 = "SELECT wal_sync FROM pg_stat_wal"


class Machine(NamedTuple):
    """The machine's counters at one moment."""

    at: float
    cores: list[tuple[int, int]]
    """Of each core, its ticks in all and those it was idle, waiting for the disk included."""
    disk_operations: int | None


class Samples:
    """A context: samples while all of pgbench's clients are connected. Figures are there after it."""

    def __init__(self, database: str, clients: int) -> None:
        self._clients = clients
        self._own = psycopg.connect(database, autocommit=True, application_name="samples")
        self._device = device(str(conninfo_to_dict(database).get("host") or ""))
        self._waits: Counter[str] = Counter()
        self._machine: list[Machine] = []
        self._wal_syncs = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="samples", daemon=True)

    def __enter__(self) -> Self:
        self._wal_syncs = -self._count_wal_syncs()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._left.set()
        self._thread.join()
        # pgbench's sessions have ended, and reported what they did.
        self._wal_syncs += self._count_wal_syncs()
        self._own.close()

    def _watch(self) -> None:
        while not self._left.wait(INTERVAL_SECONDS):
            waits: Counter[str] = Counter(dict(self._own.execute(_WAITS).fetchall()))
            if waits.total() == self._clients:
                self._waits += waits
                self._machine.append(machine(self._device))

    def _count_wal_syncs(self) -> int:
        statement = _WAL_SYNCS if self._own.info.server_version >= _POSTGRES_18 else _WAL_SYNCS_BEFORE_18
        [(count,)] = self._own.execute(statement).fetchall()
        return int(count)

    @property
    def waits(self) -> dict[str, float]:
        """For what the clients' sessions waited, in percent of all samples of them; most often first."""
        total = max(1, self._waits.total())
        return {name: round(100 * count / total, 2) for name, count in self._waits.most_common()}

    @property
    def notify_percent(self) -> float:
        """The share of `waits` that was for the locks of NOTIFY."""
        return round(sum(self.waits.get(name, 0.0) for name in NOTIFY_WAITS), 2)

    @property
    def busy_percent(self) -> float:
        """How busy the least busy core was."""
        if len(self._machine) < 2:
            return 0.0
        first, last = self._machine[0], self._machine[-1]
        shares = [
            1 - (idle - idle_before) / max(1, ticks - ticks_before)
            for (ticks_before, idle_before), (ticks, idle) in zip(first.cores, last.cores, strict=True)
        ]
        return round(100 * min(shares), 1)

    @property
    def disk_operations_per_second(self) -> float | None:
        """Reads, writes and flushes that the disk of the data directory completed, whoever asked for them."""
        if len(self._machine) < 2:
            return None
        first, last = self._machine[0], self._machine[-1]
        if first.disk_operations is None or last.disk_operations is None:
            return None
        return round((last.disk_operations - first.disk_operations) / (last.at - first.at))

    def wal_flushes_per(self, commits: int) -> float:
        """Flushes of the WAL per commit."""
        return round(self._wal_syncs / max(1, commits), 4)


def machine(of_device: str | None) -> Machine:
    """The counters now (Linux)."""
    cores = []
    for line in Path("/proc/stat").read_text().splitlines():
        name, *cells = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(cell) for cell in cells[:8]]  # what follows is part of these
            cores.append((sum(ticks), ticks[3] + ticks[4]))
    return Machine(time.monotonic(), cores, disk_operations(of_device))


def device(directory: str) -> str | None:
    """The number `major:minor` of the device that holds a directory, if that is one on this machine."""
    if not Path(directory).is_dir():
        return None
    number = Path(directory).stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def disk_operations(of_device: str | None) -> int | None:
    """Reads, writes and flushes that a device has completed; None where the kernel does not count them."""
    for line in Path("/proc/diskstats").read_text().splitlines():
        major, minor, _, *cells = line.split()
        if f"{major}:{minor}" == of_device:
            # Linux, Documentation/admin-guide/iostats.rst: fields 1, 5 and 16.
            return sum(int(cells[place]) for place in (0, 4, 15) if place < len(cells))
    return None
