"""How long from the commit until a subscriber, or a websocket, has the chunk?

A writer appends to 50 streams, readers follow all of them: a process with `subscribe()`, or a websocket of
Daphne; and Postgres, all on this machine. A chunk's latency is the time from the append's acknowledgement in
the writer to the chunk in the reader, on the machine's monotonic clock: 20 and 1,000 times a second by
`stream.append()` in 8 threads, 10,000 times a second through `StreamWriter`s. Then again with a proxy between
Postgres and everybody else, which keeps each block 1 ms each way; `kept` is how long it did.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg.conninfo import make_conninfo

from benchmarks.shared.checking import latencies_ms, spread
from benchmarks.shared.postgres import fresh_database
from benchmarks.shared.processes import Program, daphne
from benchmarks.shared.results import Bar, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 10.0
DELAYS_MS = (0, 1)
RATES = (20, 1_000, 10_000)
MOST_APPENDS = 1_000
"""A second by `stream.append()`; above it through `StreamWriter`s."""
READERS = ("subscriber", "websocket")
BARS_MS = {"p50": 4, "p99": 12}
"""At the calm rate, to a subscriber, without a proxy."""


class Network(NamedTuple):
    """The way to Postgres: its address there, and the proxy, if it leads through one."""

    database: str
    proxy: Program | None


def measure(run: Run) -> Result:
    """Each rate to each reader, over each network."""
    with run.server() as server:
        rows = [row for delay_ms in DELAYS_MS for row in measure_network(run, server, delay_ms)]
    [calm] = [row for row in rows if (row["delay ms"], row["to"], row["rate"]) == (0, "subscriber", RATES[0])]
    bars = [
        Bar(f"{name} to a subscriber at {RATES[0]}/s", calm[name], "<=", limit, "ms")
        for name, limit in BARS_MS.items()
    ]
    return Result(rows, bars)


def measure_network(run: Run, server: str, delay_ms: int) -> list[dict[str, Any]]:
    """The rows of one network, from a new database."""
    with (
        fresh_database(server) as database,
        network(database, delay_ms) as way,
        Program(way.database, "benchmarks.latency_writer") as writer,
    ):
        return [measure_case(run, way, writer, delay_ms, to, rate) for to in READERS for rate in RATES]


@contextlib.contextmanager
def network(database: str, delay_ms: int) -> Iterator[Network]:
    """The way to the database, through a proxy if there is to be a delay."""
    if not delay_ms:
        yield Network(database, None)
        return
    with Program(database, "benchmarks.latency_proxy", database, str(delay_ms)) as proxy:
        port = proxy.hear()["port"]
        yield Network(make_conninfo(database, host="127.0.0.1", port=port), proxy)


def measure_case(
    run: Run, way: Network, writer: Program, delay_ms: int, to: str, rate: int
) -> dict[str, Any]:
    """One row: a writer at that rate, and a reader."""
    name = f"{to} at {rate:,}/s" + (f", {delay_ms} ms more each way" if delay_ms else "")
    writer.tell({"name": name, "rate": rate, "seconds": run.seconds, "with_writer": rate > MOST_APPENDS})
    ready = writer.hear()
    with reader(way.database, to, ready["keys"], ready["session"]) as following:
        following.hear()
        with run.progress(name, run.seconds):
            writer.tell("append")
            acknowledged = writer.hear()["acknowledged"]
            received = following.hear()["received"]
    row = {"delay ms": delay_ms, "to": to, "rate": rate, "reached": reached(acknowledged)}
    row |= spread(latencies_ms(acknowledged, received))
    if way.proxy is not None:
        way.proxy.tell("kept?")
        row["kept"] = way.proxy.hear()["p50"]
    return row


@contextlib.contextmanager
def reader(database: str, to: str, keys: list[str], session: str) -> Iterator[Program]:
    """Who follows the streams."""
    if to == "subscriber":
        with Program(database, "benchmarks.latency_subscriber", json.dumps(keys)) as program:
            yield program
        return
    with daphne(database) as server:
        arguments = [f"{server.url}/ws/streams/", session, json.dumps(keys)]
        with Program(database, "benchmarks.latency_websocket", *arguments) as program:
            yield program


def reached(acknowledged: dict[str, list[list[Any]]]) -> int:
    """The rate that was reached, from the first acknowledgement to the last."""
    times = [at for entries in acknowledged.values() for _, _, at in entries]
    return round((len(times) - 1) / ((max(times) - min(times)) or 1.0))


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """Median to p99 of each case."""
    rows = report["rows"]
    networks = sorted({row["delay ms"] for row in rows})
    for axes, delay_ms in zip(
        figure.subplots(1, len(networks), sharey=True, squeeze=False)[0], networks, strict=True
    ):
        for place, to in enumerate(READERS):
            cases = [row for row in rows if (row["delay ms"], row["to"]) == (delay_ms, to)]
            at = [number + (place - 0.5) * 0.2 for number in range(len(cases))]
            axes.errorbar(
                at,
                [row["p50"] for row in cases],
                [[0] * len(cases), [row["p99"] - row["p50"] for row in cases]],
                fmt="o",
                capsize=4,
                label=to,
            )
        axes.set_xticks(range(len(RATES)), [f"{rate:,}/s" for rate in RATES])
        axes.set_xlim(-0.5, len(RATES) - 0.5)
        axes.set_title(f"{delay_ms} ms more each way" if delay_ms else "Postgres on the same machine")
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("commit to reader, ms: median (dot) to p99")
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].legend()
