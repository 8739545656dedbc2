"""Single-row commits from 64 connections with a live reader: what do polls, a trigger, and buffering cost?

pgbench writes, one chunk per transaction, each connection to a stream of its own, so that no row lock is ever
waited for. A reader process follows all streams. They differ in the announcing alone:

    polling     no announcing: one reader asks the table for news of all streams every 1 s, 100 ms or 10 ms,
                or 200 readers do, each for those of one stream
    trigger     NOTIFY for each row, in the append's transaction
    buffered    this project's relay sees which streams have moved, and notifies for all at once

The reader of the last two is the project's hub. Tables, append (`pgstreams_append`), pgbench's options and
Postgres's configuration are the same for all. The disk is used as it is, and again with each flush made 1 ms
slower by a preloaded library: network storage behaves so.

A chunk's latency counts from when the server received the append's statement (`created_at`) to when the
reader has it. `notify %` of the samples of pgbench's sessions in pg_stat_activity waited for NOTIFY's locks;
`busy %` is that of the least busy core; `disk/s` are reads, writes and flushes completed by the data's disk.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from benchmarks.seed_samples import Samples
from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.postgres import fresh_database
from benchmarks.shared.preloading import built
from benchmarks.shared.processes import Program
from benchmarks.shared.results import Bar, Result
from example_project.embedded.cluster import package_binaries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 10.0
CLIENTS = 64
PGBENCH = ["--no-vacuum", "--protocol=prepared", f"--client={CLIENTS}", "--jobs=2", "--define=number=0"]
HERE = Path(__file__).parent

AS_IT_IS = "as it is"
SLOWER = "flush 1 ms slower (preload)"
TRIGGER = "trigger"
BUFFERED = "buffered"

APPEND_TO_EACH = """SELECT pgstreams_append(key, '"first"') FROM pgstreams_stream"""

NOTIFY_EACH_ROW = """
CREATE FUNCTION seed_notify() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('pgstreams', NEW.stream_id || ':' || NEW."offset" + 1);
    RETURN NULL;
END
$$;
CREATE TRIGGER seed_notify AFTER INSERT ON pgstreams_chunk FOR EACH ROW EXECUTE FUNCTION seed_notify();
"""


class Announcing(NamedTuple):
    """How the readers learn of new chunks; they poll where there are pollers."""

    name: str
    pollers: int = 0
    interval_seconds: float = 0

    @property
    def reader_arguments(self) -> list[str]:
        return [str(self.pollers), str(self.interval_seconds)] if self.pollers else []


POLLING = [
    Announcing(f"{pollers} × polling {interval}", pollers, seconds)
    for pollers in (1, 200)
    for interval, seconds in (("1 s", 1), ("100 ms", 0.1), ("10 ms", 0.01))
]
NOTIFYING = [Announcing(TRIGGER), Announcing(BUFFERED)]


def measure(run: Run) -> Result:
    """Each announcing on each disk; to check, what the bars need."""
    announcings = NOTIFYING if run.options.check else [*POLLING, *NOTIFYING]
    rows: list[dict[str, Any]] = []
    waits: dict[str, Any] = {}
    for disk in (AS_IT_IS, SLOWER) if run.has_own_server else (AS_IT_IS,):
        with flushes(disk) as environment, run.server(environment) as server:
            for announcing in announcings:
                row, waits[f"{announcing.name}, {disk}"] = measure_one(run, server, announcing)
                rows.append({"announcing": announcing.name, "disk": disk, **row})
    return Result(rows, bars(rows), {"waits in percent": waits, "pgbench": PGBENCH})


def measure_one(run: Run, server: str, announcing: Announcing) -> tuple[dict[str, Any], dict[str, float]]:
    """The cells of a row, and what pgbench's sessions waited for."""
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(fresh_database(server))
        arguments = [str(CLIENTS), *announcing.reader_arguments]
        reader = stack.enter_context(Program(database, "benchmarks.seed_reader", *arguments))
        streams = reader.hear()["streams"]
        if announcing.name == BUFFERED:
            relay = stack.enter_context(Program(database, "manage", "pgstreams", "relay"))
            relay.wait_for_error_line(r"watches \d+ open streams")
        with psycopg.connect(database, autocommit=True) as own:
            if announcing.name == TRIGGER:
                own.execute(NOTIFY_EACH_ROW)
            own.execute(APPEND_TO_EACH)
        reader.hear()
        with run.progress(announcing.name, run.seconds), Samples(database, CLIENTS) as samples:
            commits, writes_per_second = pgbench(database, run.seconds)
        reader.tell({"acknowledged": streams + commits})
        read = reader.hear()
    row = {
        "writes/s": round(writes_per_second),
        **read["latencies"],
        "notify %": samples.notify_percent,
        "busy %": samples.busy_percent,
        "disk/s": samples.disk_operations_per_second,
        "WAL flushes/commit": samples.wal_flushes_per(commits),
        "polls/s": round(read["polls"] / run.seconds),
    }
    return row, samples.waits


@contextlib.contextmanager
def flushes(disk: str) -> Iterator[dict[str, str]]:
    """The environment of a Postgres with such a disk: a library, built now, may make flushes slower."""
    if disk == AS_IT_IS:
        yield {}
        return
    with built(HERE / "seed_slow_flush.c") as library:
        yield {"LD_PRELOAD": str(library)}


def pgbench(database: str, seconds: float) -> tuple[int, float]:
    """How many transactions pgbench committed, and how many per second."""
    command = [str(package_binaries() / "pgbench"), *PGBENCH, f"--file={HERE / 'seed_append.sql'}"]
    command += [f"--time={max(1, round(seconds))}", database]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    processed, failed, rate = (
        re.search(pattern, done.stdout)
        for pattern in (r"actually processed: (\d+)", r"failed transactions: (\d+)", r"tps = ([\d.]+)")
    )
    if done.returncode or not (processed and failed and rate) or int(failed[1]):
        raise BenchmarkError(f"pgbench failed:\n{done.stdout}\n{done.stderr}")
    return int(processed[1]), float(rate[1])


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """What must hold."""
    found = {(row["announcing"], row["disk"]): row for row in rows}
    disks = [disk for disk, _ in ((AS_IT_IS, 3), (SLOWER, 20)) if (BUFFERED, disk) in found]
    trigger = [found[TRIGGER, disk] for disk in disks]
    buffered = [found[BUFFERED, disk] for disk in disks]
    return [
        *(
            Bar(
                f"buffered ÷ trigger, {disk}",
                found[BUFFERED, disk]["writes/s"] / found[TRIGGER, disk]["writes/s"],
                ">=",
                {AS_IT_IS: 3, SLOWER: 20}[disk],
                "×",
            )
            for disk in disks
        ),
        Bar("buffered p99", max(row["p99"] for row in buffered), "<=", 100, "ms"),
        Bar("waits for NOTIFY, trigger", min(row["notify %"] for row in trigger), ">=", 50, "%"),
        Bar("waits for NOTIFY, buffered", max(row["notify %"] for row in buffered), "<=", 5, "%"),
        Bar("busy cores, buffered, as it is", buffered[0]["busy %"], ">=", 90, "%"),
    ]


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """Writes per second and the 99th percentile of the latency, by announcing and disk."""
    names = list(dict.fromkeys(row["announcing"] for row in report["rows"]))
    disks = list(dict.fromkeys(row["disk"] for row in report["rows"]))
    height = 0.8 / len(disks)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, column, label in zip(
        panels, ("writes/s", "p99"), ("writes per second", "p99 latency, ms"), strict=True
    ):
        for number, disk in enumerate(disks):
            values = [row[column] for row in report["rows"] if row["disk"] == disk]
            places = [place + number * height for place in range(len(values))]
            shown = axes.barh(places, values, height, label=f"disk {disk}")
            axes.bar_label(shown, [f"{value:,.0f}" for value in values], padding=2, fontsize=7)
        axes.set_xscale("log")
        axes.margins(x=0.2)
        axes.set_xlabel(label)
    panels[0].set_yticks([place + height * (len(disks) - 1) / 2 for place in range(len(names))], names)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8)
