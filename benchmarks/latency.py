"""Commit to websocket: how long until a reader has a chunk?

A writer appends through the public ORM API, Daphne serves, a reader follows: three processes on this machine,
and Postgres. A chunk's latency is the time from `append()`'s return in the writer to its frame in the reader,
on the machine's monotonic clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.shared.checking import latencies_ms, spread
from benchmarks.shared.processes import Program, daphne
from benchmarks.shared.results import Bar, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 15.0
RATE = 20.0


def measure(run: Run) -> Result:
    """Run the three processes; the figures."""
    count = max(1, round(run.seconds * RATE))
    with run.database() as database, Program(database, "benchmarks.latency_writer") as writer:
        ready = writer.hear()
        with daphne(database) as server:
            url = f"{server.url}/ws/streams/{ready['key']}/"
            with Program(database, "benchmarks.latency_reader", url, ready["session"]) as reader:
                reader.hear()
                with run.progress("appending", run.seconds):
                    writer.tell({"count": count, "rate": RATE})
                    acknowledged = writer.hear()["appended"]
                    received = reader.hear()["received"]
    found = spread(latencies_ms({"stream": acknowledged}, {"stream": received}))
    return Result(
        rows=[{"to": "websocket", "chunks": count, "rate": RATE, **found}],
        bars=[Bar("p50", found["p50"], "<=", 5, "ms")],
    )


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """The percentiles."""
    axes = figure.subplots()
    for row in report["rows"]:
        axes.bar(["p50", "p95", "p99", "max"], [row[name] for name in ("p50", "p95", "p99", "max")])
    axes.set_ylabel("milliseconds")
