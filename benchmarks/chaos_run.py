"""A run of `chaos`: all that writes and reads, from its start to the check of what it wrote and read."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks.chaos_check import Array, Finding, Reading, check
from benchmarks.chaos_context import ADMIN, World
from benchmarks.chaos_disk import Disk
from benchmarks.chaos_ledger import Kind, Streams
from benchmarks.chaos_stored import read_tables
from benchmarks.chaos_watch import Growing, Watch
from benchmarks.chaos_workers import Process, Surroundings
from benchmarks.shared.cluster import Cluster
from benchmarks.shared.errors import BenchmarkError

STREAMS = 64
"""So many are open at a time."""
TURN_SECONDS = 2.0
"""One ends, and another begins, so often."""
SHARES = {"threads": 0.3, "tasks": 0.36, "many": 0.25, "orm": 0.05, "sql": 0.04}
"""Who writes how much of all chunks."""
SERVERS = ("daphne", "uvicorn")
READERS = {
    "blocking": ("benchmarks.chaos_readers", 0, 2),
    "async-0": ("benchmarks.chaos_readers", 0, 2),
    "async-1": ("benchmarks.chaos_readers", 1, 2),
    "daphne-socket": ("benchmarks.chaos_sockets", 0, 2),
    "uvicorn-socket": ("benchmarks.chaos_sockets", 1, 2),
}
"""Each reader's program, and its part of the streams."""
PATIENCE_SECONDS = 60.0
READERS_PATIENCE_SECONDS = 15.0
READ_POOL_SIZE = 4
"""The setting's default."""
IDLE_SECONDS = 5.0
"""The setting: connections that nobody uses are closed after this time."""
_LOOK_SECONDS = 0.1


@dataclass
class Ended:
    """What a run came to."""

    findings: list[Finding]
    stored: int
    """Chunks that are stored; each was checked."""
    acknowledged: int
    unknown: int
    received: int
    """By all readers together."""
    streams: int
    acknowledged_at: Array
    """When, sorted."""
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each process that lives as long as the run: MiB in its beginning and at its end."""
    connections: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By application name, likewise."""
    above_budget: dict[str, int] = field(default_factory=dict)
    """How many more there are than the README says, while all still write and read."""
    left_open: dict[str, int] = field(default_factory=dict)
    """How many there are when only the relay, and servers without clients, are left."""


class Cast:
    """All processes of the product, and the ledgers."""

    def __init__(self, cluster: Cluster, database: str, directory: Path, seed: int, rate: float, env: Any):
        self.cluster = cluster
        self.directory = directory
        self._dbname = str(conninfo_to_dict(database)["dbname"])
        around = Surroundings(database, directory, seed, env)
        self.relay = around.relay()
        served = [around.server(kind) for kind in SERVERS]
        self.servers = [server for server, _ in served]
        urls = {f"{server.name}-socket": url for server, url in served}
        self.keeper = around.program(
            "benchmarks.chaos_writers",
            "keeper",
            "keeper",
            {"streams": STREAMS, "turn_seconds": TURN_SECONDS},
        )
        self.writers = [
            around.program("benchmarks.chaos_writers", kind, kind, {"per_second": rate * share})
            for kind, share in SHARES.items()
        ]
        self.readers = [
            around.program(
                module,
                name,
                name.partition("-")[0] if name not in urls else "websocket",
                {"part": part, "parts": parts, "url": urls.get(name)},
            )
            for name, (module, part, parts) in READERS.items()
        ]
        self.watch = Watch(
            directory,
            [writer.name for writer in self._appending],
            {name: own for name, (_, *own) in READERS.items()},
        )

    @property
    def _appending(self) -> list[Process]:
        return [self.keeper, *self.writers]

    @property
    def all(self) -> list[Process]:
        """Every process."""
        return [self.relay, *self.servers, self.keeper, *self.writers, *self.readers]

    def admin(self) -> psycopg.Connection[Any]:
        """A connection to the present primary, past the proxy."""
        address = make_conninfo(
            self.cluster.primary.address, dbname=self._dbname, application_name=ADMIN, connect_timeout=5
        )
        return psycopg.connect(address, autocommit=True)

    def world(self, chance: random.Random, disk: Disk) -> World:
        """What faults get."""
        return World(
            random=chance,
            cluster=self.cluster,
            proxy=self.cluster.proxy,
            disk=disk,
            writers=(self.keeper, *self.writers),
            readers=self.readers,
            servers=self.servers,
            relay=self.relay,
            admin=self.admin,
            errors=self.watch.errors,
            acknowledged=self.watch.acknowledged,
            lag=self.watch.lag,
        )

    @contextlib.contextmanager
    def playing(self, logs: Path | None = None) -> Iterator[None]:
        """Everything runs; what still does in the end is killed. What it said is kept in a directory."""
        with self.watch:
            try:
                for group in ([self.relay, *self.servers], [self.keeper, *self.writers, *self.readers]):
                    with ThreadPoolExecutor(len(group)) as threads:
                        list(threads.map(Process.start, group))
                yield
            finally:
                for process in self.all:
                    process.leave()
                    if logs is not None:
                        process.keep_log(logs)

    def check(self) -> None:
        """Raises `BenchmarkError` if a process has ended by itself."""
        for process in self.all:
            process.check()

    # Figures -----------------------------------------------------------------------------------------

    def memory(self) -> dict[str, float]:
        """MiB of each process that lives as long as the run."""
        return {process.name: process.memory_mib for process in (self.relay, *self.servers, *self.readers)}

    def connections(self) -> Counter[str]:
        """The product's sessions by application name."""
        query = """
            SELECT application_name, count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name <> %s GROUP BY 1 ORDER BY 1
        """
        with self.admin() as admin:
            return Counter(dict(admin.execute(query, [ADMIN]).fetchall()))

    def above_budget(self) -> dict[str, int]:
        """Connections that are more than the README says that so many processes have."""
        own_writer = sum(writer.kind in ("threads", "tasks", "keeper") for writer in self._appending)
        follow = len(self.servers) + sum(reader.kind != "websocket" for reader in self.readers)
        budget = {
            "pgstreams-listener": follow,
            "pgstreams-reader": follow * READ_POOL_SIZE,
            "pgstreams-notifier": sum(writer.kind != "sql" for writer in self._appending),
            "pgstreams-writer": 2 * own_writer,
            "pgstreams-relay": 1,
        }
        found = self.connections()
        return {name: found[name] - most for name, most in budget.items() if found[name] > most}

    def left_open(self) -> dict[str, int]:
        """Connections that nobody needs when only the relay, and servers without clients, are left."""
        return dict(self.connections() - Counter({"pgstreams-relay": 1, "chaos-django": len(self.servers)}))

    # The end -----------------------------------------------------------------------------------------

    def end_writers(self) -> None:
        """Writers finish what is under way; readers get all of it."""
        for writer in self.writers:
            writer.ask_to_end()
        for writer in self.writers:
            if writer.wait(PATIENCE_SECONDS) != 0:
                raise BenchmarkError(f"{writer.name} does not end: {writer.exit_code}\n{writer.errors}")
        wait_until(lambda: not self.watch.lag(), READERS_PATIENCE_SECONDS)

    def end_streams(self) -> None:
        """The keeper ends all streams; readers see it and end too, or are killed after a while."""
        self.keeper.ask_to_end()
        if self.keeper.wait(PATIENCE_SECONDS) != 0:
            raise BenchmarkError(f"The keeper does not end: {self.keeper.exit_code}\n{self.keeper.errors}")
        Streams(self.directory).finish()
        deadline = time.monotonic() + READERS_PATIENCE_SECONDS
        for reader in self.readers:
            reader.wait(max(0.0, deadline - time.monotonic()))
            reader.leave()

    def check_everything(self) -> Ended:
        """The ledgers against the tables."""
        names = [process.name for process in (self.keeper, *self.writers, *self.readers)]
        ledgers = {name: Growing(self.directory / f"{name}.ledger").read() for name in names}
        with self.admin() as admin:
            tables = read_tables(admin)
        findings = check(
            tables,
            {process.name: ledgers[process.name] for process in self._appending},
            {name: Reading(ledgers[name], part, parts) for name, (_, part, parts) in READERS.items()},
        )
        return Ended(
            findings,
            stored=len(tables.chunks),
            acknowledged=self.watch.acknowledged(),
            unknown=self.watch.errors(),
            received=sum(self.watch.received(name) for name in READERS),
            streams=len(tables.tails),
            acknowledged_at=acknowledgements(ledgers[process.name] for process in self._appending),
        )


def acknowledgements(ledgers: Iterable[Array]) -> Array:
    """The times of all that was acknowledged, sorted."""
    return np.sort(np.concatenate([own["at"][own["kind"] == Kind.STORED] for own in ledgers]))


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether it came true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def pairs(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Beginning and end of each."""
    return {name: (first.get(name, 0), last.get(name, 0)) for name in sorted({*first, *last})}
