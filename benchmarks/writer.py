"""How many chunks a second does `StreamWriter` store, and how soon does a reader have them?

One process appends through `StreamWriter` for a given time, another follows every stream with `subscribe()`
and checks each chunk; and Postgres, all on this machine. Cases: 50 producers that await each append (50 × 1),
or keep 10 or (500 producers) 4 in flight, all tasks of one event loop; and 64 threads. Each producer has a
stream of its own. Beside them, in the same run and without a reader, what Postgres takes in at the most
through the same driver: `COPY … FROM STDIN` on one connection, in commits of 500 rows, into a table with the
same key and columns.

`chunks/s` counts acknowledged appends; `ack` is the time from the call of an append to its acknowledgement
in the writer, and `reader` from the same call to the chunk in the reader, in milliseconds; `CPU` is how many
cores a process used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.processes import Program
from benchmarks.shared.results import Bar, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 10.0


class Case(NamedTuple):
    """So many producers, tasks or threads, each with so many appends in flight."""

    producers: int
    in_flight: int
    threads: bool = False

    @property
    def name(self) -> str:
        return f"{self.producers} threads" if self.threads else f"{self.producers} × {self.in_flight}"


FULL = Case(50, 10)
AWAITING = Case(50, 1)
MANY = Case(500, 4)
THREADS = Case(64, 1, threads=True)
CASES = (AWAITING, FULL, MANY, THREADS)
COPY = "COPY, commits of 500"


def measure(run: Run) -> Result:
    """Each case, and COPY beside the one that is compared with it."""
    with run.database() as database:
        rows = []
        for case in CASES:
            rows.append(measure_case(run, database, case))
            if case == FULL:
                rows.append(measure_copy(run, database))
    return Result(rows, bars({row["case"]: row for row in rows}))


def bars(rows: Mapping[str, dict[str, Any]]) -> list[Bar]:
    """What must hold of the rows, by case."""
    full = rows[FULL.name]
    return [
        Bar(FULL.name, full["chunks/s"], ">=", 100_000, "chunks/s"),
        Bar(f"{FULL.name} of COPY's rate", round(full["chunks/s"] / rows[COPY]["chunks/s"], 3), ">=", 0.3),
        Bar(f"{FULL.name} p99 to the reader", full["reader p99"], "<=", 30, "ms"),
        Bar(AWAITING.name, rows[AWAITING.name]["chunks/s"], ">=", 45_000, "chunks/s"),
        Bar(THREADS.name, rows[THREADS.name]["chunks/s"], ">=", 25_000, "chunks/s"),
    ]


def measure_case(run: Run, database: str, case: Case) -> dict[str, Any]:
    """One row: a writer and a reader."""
    with Program(database, "benchmarks.writer_append") as writer:
        writer.tell(case._asdict() | {"name": case.name, "seconds": run.seconds})
        with Program(database, "benchmarks.writer_reader", json.dumps(writer.hear()["keys"])) as reader:
            reader.hear()
            with run.progress(case.name, run.seconds):
                writer.tell("append")
                appended = writer.hear()
            received = reader.hear()
    check(appended["acknowledged"], received["received"])
    return {
        "case": case.name,
        "chunks/s": round(appended["count"] / appended["seconds"]),
        **{f"ack {name}": value for name, value in appended["milliseconds"].items()},
        **{f"reader {name}": value for name, value in received["milliseconds"].items()},
        "writer CPU": round(appended["cores"], 2),
        "reader CPU": round(received["cores"], 2),
    }


def check(acknowledged: Mapping[str, int], received: Mapping[str, int]) -> None:
    """Raise `BenchmarkError` unless all that was acknowledged has arrived.

    The numbers of each stream: of appends whose offset was theirs in the order of the calls, and of chunks
    whose offset and payload were the next (`writer_reader.Checker`).
    """
    for key, count in acknowledged.items():
        if received.get(key) != count:
            raise BenchmarkError(f"Stream {key}: of {count} acknowledged chunks {received.get(key)} arrived.")


def measure_copy(run: Run, database: str) -> dict[str, Any]:
    """The row of COPY."""
    with (
        run.progress(COPY, run.seconds),
        Program(database, "benchmarks.writer_copy", database, str(run.seconds)) as program,
    ):
        copied = program.hear()
    rate, cores = round(copied["count"] / copied["seconds"]), round(copied["cores"], 2)
    return {"case": COPY, "chunks/s": rate, "writer CPU": cores}


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """The rates, and the times to the reader."""
    rows = report["rows"]
    rates, times = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [row["case"] for row in rows]
    colors = ["gray" if name == COPY else "C0" for name in names]
    drawn = rates.barh(names, [row["chunks/s"] for row in rows], color=colors)
    rates.bar_label(drawn, [f" {row['chunks/s']:,.0f}" for row in rows])
    rates.invert_yaxis()
    rates.margins(x=0.25)
    rates.set_xlabel("acknowledged chunks/s")
    read = [row for row in rows if "reader p50" in row]
    times.errorbar(
        [row["reader p50"] for row in read],
        range(len(read)),
        xerr=[[0] * len(read), [row["reader p99"] - row["reader p50"] for row in read]],
        fmt="o",
        capsize=4,
    )
    times.set_yticks(range(len(read)), [row["case"] for row in read])
    times.invert_yaxis()
    times.margins(y=0.2)
    times.set_xlim(left=0)
    times.grid(axis="x", alpha=0.3)
    times.set_xlabel("to the reader, ms: p50 to p99")
