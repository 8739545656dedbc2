"""Latency from commit to websocket, at a calm rate.

A writer appends through the public ORM API, Daphne serves, a reader follows: three processes on this machine,
and Postgres. A chunk's latency is the time from `append()`'s return in the writer to its frame in the reader,
on the machine's monotonic clock. Every acknowledged chunk must arrive once and in order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.processes import BenchmarkError, Program, daphne, own_database

BAR_MS = 5.0
"""The median must not be above this."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--seconds", type=float, default=15.0, help="how long to append (%(default)g)")
    parser.add_argument("--rate", type=float, default=20.0, help="appends per second (%(default)g)")
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 if the median is above {BAR_MS:g} ms"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures, and return the exit code: 1 for a missed bar, 2 for a chunk gone wrong."""
    count = max(1, round(options.seconds * options.rate))
    try:
        found = measure(options.database_url or os.environ.get("DATABASE_URL"), count, options.rate)
    except (BenchmarkError, psycopg.Error) as error:
        print(error, file=sys.stderr)
        return 2
    # The figures are on standard output alone when they go there as JSON.
    print(table(found), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(json.dumps(found, indent=2))
    elif options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 1 if options.check and not found["passed"] else 0


def measure(database_url: str | None, count: int, rate: float) -> dict[str, Any]:
    """Run the three processes; the figures."""
    with own_database(database_url) as database, Program(database, "benchmarks.writer") as writer:
        ready = writer.hear()
        with daphne(database) as address:
            url = f"{address}/ws/streams/{ready['key']}/"
            with Program(database, "benchmarks.reader", url, ready["session"]) as reader:
                reader.hear()
                writer.tell({"count": count, "rate": rate})
                appended = writer.hear()["appended"]
                received = reader.hear()["received"]
    return figures(appended, received) | {
        "benchmark": "latency",
        "appends_per_second": rate,
        "versions": {
            "django_pgstreams": version("django-pgstreams"),
            "Python": platform.python_version(),
            "Django": version("Django"),
            "Postgres": ready["postgres"],
        },
    }


def figures(appended: list[tuple[int, float]], received: list[tuple[int, int, float]]) -> dict[str, Any]:
    """The latencies' figures. Raises `BenchmarkError` unless every chunk arrived once and in order.

    `appended` is each append's number and time; `received` each chunk's offset, number and time.
    """
    numbers = [number for number, _ in appended]
    if [number for _, number, _ in received] != numbers or [offset for offset, *_ in received] != numbers:
        raise BenchmarkError(
            f"Of {len(appended)} appended chunks {len(received)} arrived, or not in order: "
            f"{[(offset, number) for offset, number, _ in received]}"
        )
    latencies = sorted(
        (at - appended_at) * 1000 for (_, appended_at), (_, _, at) in zip(appended, received, strict=True)
    )
    median = statistics.median(latencies)
    return {
        "chunks": len(latencies),
        "latency_ms": {
            "min": round(latencies[0], 3),
            "p50": round(median, 3),
            "p95": round(_percentile(latencies, 95), 3),
            "p99": round(_percentile(latencies, 99), 3),
            "max": round(latencies[-1], 3),
        },
        "bar_ms": BAR_MS,
        "passed": median <= BAR_MS,
    }


def _percentile(ordered: list[float], percent: int) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    cells = found["latency_ms"]
    return "\n".join(
        [
            f"Commit to websocket, {found['chunks']} chunks at {found['appends_per_second']:g}/s",
            f"({versions}); every chunk arrived once, in order",
            "",
            "  ".join(f"{name:>8}" for name in cells),
            "  ".join(f"{value:>5.2f} ms" for value in cells.values()),
            "",
            f"median at most {found['bar_ms']:g} ms: {'yes' if found['passed'] else 'NO'}",
        ]
    )
