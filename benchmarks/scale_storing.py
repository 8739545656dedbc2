"""What an append, a read and a relay's look cost as streams or stored chunks grow.

Each measurement takes the server's address and about how many seconds a size may take, and yields a function
from the size to the milliseconds of each piece of work.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.scale_database import Database, ServerTime, new_database
from benchmarks.shared.processes import Program

CHUNKS_EACH = 20
"""In each stream, where the streams grow."""
STREAMS = 100
"""Where the chunks grow."""
PAGE_CHUNKS = {"streams": CHUNKS_EACH, "chunks": 100}
APPENDS_PER_SECOND = 500
"""Of the seconds given: so many appends, reads and writes take about a second."""
RELAY_APPENDS_PER_SECOND = 50
PATIENCE_SECONDS = 120.0

Costs = dict[str, float]
Measure = Callable[[int], Costs]


@contextlib.contextmanager
def streams(server: str, seconds: float) -> Iterator[Measure]:
    """Appends, reads and a relay's looks, with so many open streams."""
    with new_database(server) as database, _store(database, seconds, "streams") as store:

        def measure(size: int) -> Costs:
            database.add_streams(size, CHUNKS_EACH)
            database.settle()
            return store() | _relay(database, size, seconds / 2)

        yield measure


@contextlib.contextmanager
def chunks(server: str, seconds: float) -> Iterator[Measure]:
    """Appends and reads, with so many chunks in always the same streams."""
    with new_database(server) as database, _store(database, seconds, "chunks") as store:
        database.add_streams(STREAMS, 1)

        def measure(size: int) -> Costs:
            database.add_chunks(size)
            database.settle()
            return store()

        yield measure


@contextlib.contextmanager
def _store(database: Database, seconds: float, what: str) -> Iterator[Callable[[], Costs]]:
    with Program(database.address, "benchmarks.scale_store") as program:

        def measure() -> Costs:
            program.tell(
                {"appends": round(max(100, seconds * APPENDS_PER_SECOND)), "page": PAGE_CHUNKS[what]}
            )
            milliseconds = program.hear(PATIENCE_SECONDS)
            return {f"{name}, ms": value for name, value in milliseconds.items()}

        yield measure


def _relay(database: Database, size: int, seconds: float) -> Costs:
    """The processor time, at both ends, of a look that announces something, while some streams move."""
    with Program(database.address, "benchmarks.scale_relay") as relay:

        def asked() -> dict[str, Any]:
            relay.tell("spent?")
            answer: dict[str, Any] = relay.hear(PATIENCE_SECONDS)
            return answer

        while not (before := asked())["flushes"]:
            time.sleep(0.05)
        server = ServerTime(database, "pgstreams-relay")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            database.append(f"scale/{random.randrange(size)}")
            time.sleep(1 / RELAY_APPENDS_PER_SECOND)
        at_server, after = server.spent_ms(), asked()
    if at_server is None:
        return {}
    own = (after["cpu_seconds"] - before["cpu_seconds"]) * 1000
    return {"relay's look, CPU ms": (own + at_server) / max(1, after["flushes"] - before["flushes"])}
