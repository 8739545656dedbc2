"""What of all that is promised holds while processes, Postgres and the network fail?

Writers (the ORM, `append_many` and `bulk_create`, `StreamWriter` in threads and tasks, SQL) append to 64 open
streams, of which one ends and another begins every 2 s, on a primary with a synchronous standby behind a
proxy. Readers (blocking, asyncio, websockets at Daphne and uvicorn) follow. All record what they did and saw
in files outside Postgres. Meanwhile one fault comes after another, in an order that the seed decides; it
counts if its effect was observed. Recovery is the time from a fault's end until each writer has had something
acknowledged and each reader has all of it.

At the end every stored chunk is checked against every ledger; nothing is left out. The exit code is 1 if
anything was lost, came twice or was left out, or if there were too few faults or chunks for the time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.chaos_check import DUPLICATE, GAP, LOST, WRONG
from benchmarks.chaos_defects import DEFECTS, VARIABLE
from benchmarks.chaos_disk import disk
from benchmarks.chaos_faults import FAULTS
from benchmarks.chaos_run import IDLE_SECONDS, Cast, Ended, pairs, wait_until
from benchmarks.chaos_schedule import RECOVERY_PATIENCE_SECONDS, Occurrence, run_faults, shuffled
from benchmarks.shared.cluster import cluster
from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.postgres import migrate, new_database
from benchmarks.shared.results import Bar, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 180.0
BARS_DECIDE = True
RATE = 2400.0
FLOOR_MINUTES = 20.0
"""The floors are for a run of so long, and proportional for others."""
FAULTS_FLOOR, KINDS_FLOOR, EACH_FLOOR, CHUNKS_FLOOR = 150, 10, 5, 2_000_000
LONGEST_BACKOFF_SECONDS = 5.0
"""Of the product's readers and writers, and of the websockets' client; the poll's interval is as long."""
RECOVERY_SECONDS = LONGEST_BACKOFF_SECONDS + 2
MEMORY_MIB = 40.0
"""What a process may have grown by."""
MOST_SHOWN = 20
_WARM_UP_SHARE = 0.05
_MOST_WARM_UP_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument(
        "--minutes",
        dest="seconds",
        metavar="MINUTES",
        type=lambda text: float(text) * 60,
        help="how long there are faults; instead of --seconds",
    )
    parser.add_argument("--seed", type=int, default=None, help="decides faults and writers; else a new one")
    parser.add_argument(
        "--fault",
        choices=[kind.kind for kind in FAULTS],
        action="append",
        metavar="KIND",
        help="only this kind (may be given several times; the floors stay as they are)",
    )
    parser.add_argument(
        "--defect", choices=DEFECTS, help="put it into the running product, to see that the run fails"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIRECTORY", help="keep what the processes say on standard error there"
    )
    parser.add_argument(
        "--rate", type=float, default=RATE, help="chunks a second while all is well (%(default)g)"
    )


def measure(run: Run) -> Result:
    """One run."""
    if run.options.database_url:
        raise BenchmarkError("Servers fail here: it runs on its own, not on one that is named.")
    seed = run.options.seed if run.options.seed is not None else random.SystemRandom().randrange(10**6)
    with (
        disk() as slow_disk,
        cluster(synchronous=True, environment=slow_disk.environment) as servers,
        tempfile.TemporaryDirectory(prefix="chaos-") as directory,
    ):
        run.describe(servers.primary.address)
        database = new_database(servers.address)
        migrate(database)
        environment = {"DJANGO_SETTINGS_MODULE": "benchmarks.chaos_settings"}
        if run.options.defect:
            environment[VARIABLE] = run.options.defect
        cast = Cast(servers, database, Path(directory), seed, run.options.rate, environment)
        with cast.playing(run.options.logs):
            occurrences, ended = play(run, cast, cast.world(random.Random(seed), slow_disk))
    return result(run, seed, occurrences, ended)


def play(run: Run, cast: Cast, world: Any) -> tuple[list[Occurrence], Ended]:
    """Warm up, fail over and over, come to rest, and check."""
    warm_up_seconds = min(run.seconds * _WARM_UP_SHARE, _MOST_WARM_UP_SECONDS)
    with run.progress("all is well", warm_up_seconds):
        writers = [writer.name for writer in cast.writers]
        start = cast.watch.recovery(time.monotonic(), writers, RECOVERY_PATIENCE_SECONDS)
        time.sleep(warm_up_seconds)
    memory, connections = cast.memory(), cast.connections()
    occurrences = []
    # What does not even begin well is not made to fail.
    began = time.monotonic()
    until = began + (run.seconds if start.is_well else 0)
    with run.progress("faults", run.seconds):
        only = run.options.fault
        kinds = shuffled([kind for kind in FAULTS if not only or kind.kind in only], world.random)
        for occurrence in run_faults(kinds, world, cast.watch, until, cast.check):
            print(told(occurrence, began), file=sys.stderr, flush=True)
            occurrences.append(occurrence)
    with run.progress("coming to rest", IDLE_SECONDS):
        wait_until(lambda: not cast.above_budget(), 4 * IDLE_SECONDS)
        above_budget, last_connections = cast.above_budget(), cast.connections()
        cast.end_writers()
        last_memory = cast.memory()
        cast.end_streams()
        ended = cast.check_everything()
        wait_until(lambda: not cast.left_open(), 4 * IDLE_SECONDS)
    ended.memory = pairs(memory, last_memory)
    ended.connections = pairs(connections, last_connections)
    ended.above_budget, ended.left_open = above_budget, cast.left_open()
    return occurrences, ended


def told(occurrence: Occurrence, began: float) -> str:
    """A line about a fault."""
    seen = "observed" if occurrence.observed else "NOT OBSERVED"
    return (
        f"{occurrence.began - began:7.1f} s  {occurrence.kind:<26} {occurrence.seconds:5.1f} s  {seen:<12} "
        f"recovery {occurrence.recovery_seconds:5.2f} s "
        f"({occurrence.last})  {occurrence.errors} errors"
    )


def result(run: Run, seed: int, occurrences: list[Occurrence], ended: Ended) -> Result:
    """Rows by kind of fault, and the bars."""
    for finding in ended.findings[:MOST_SHOWN]:
        print(finding, file=sys.stderr)
    if len(ended.findings) > MOST_SHOWN:
        print(f"… and {len(ended.findings) - MOST_SHOWN} more", file=sys.stderr)
    data = {
        "seed": seed,
        "minutes": run.seconds / 60,
        "defect": run.options.defect,
        "occurrences": [vars(occurrence) for occurrence in occurrences],
        "findings": list(map(str, ended.findings[:MOST_SHOWN])),
        "memory_mib": ended.memory,
        "connections": ended.connections,
        "connections above the budget": ended.above_budget,
        "connections left open": ended.left_open,
        "chunks": {
            "stored": ended.stored,
            "acknowledged": ended.acknowledged,
            "failed or unknown": ended.unknown,
            "received": ended.received,
            "streams": ended.streams,
        },
    }
    return Result(rows(occurrences, ended), bars(run.seconds, occurrences, ended), data)


def rows(occurrences: list[Occurrence], ended: Ended) -> list[dict[str, Any]]:
    """What each kind of fault did."""
    found = []
    for kind in sorted({occurrence.kind for occurrence in occurrences}):
        own = [occurrence for occurrence in occurrences if occurrence.kind == kind]
        recoveries = [occurrence.recovery_seconds for occurrence in own]
        standstills = [occurrence.standstill_seconds(ended.acknowledged_at) for occurrence in own]
        found.append(
            {
                "fault": kind,
                "made": len(own),
                "observed": sum(occurrence.observed for occurrence in own),
                "errors": sum(occurrence.errors for occurrence in own),
                "standstill, worst s": round(max(standstills), 2),
                "recovery, median s": round(statistics.median(recoveries), 2),
                "worst": round(max(recoveries), 2),
            }
        )
    return found


def bars(seconds: float, occurrences: list[Occurrence], ended: Ended) -> list[Bar]:
    """What must hold."""
    scale = seconds / 60 / FLOOR_MINUTES
    what = Counter(finding.what for finding in ended.findings)
    observed = Counter(occurrence.kind for occurrence in occurrences if occurrence.observed)
    most = int(FAULTS_FLOOR * scale)
    worst_recovery = max((occurrence.recovery_seconds for occurrence in occurrences), default=0.0)
    return [
        Bar("lost", what[LOST], "<=", 0),
        Bar("duplicates", what[DUPLICATE], "<=", 0),
        Bar("gaps", what[GAP], "<=", 0),
        Bar("other broken promises", what[WRONG], "<=", 0),
        Bar("chunks checked", ended.stored, ">=", int(CHUNKS_FLOOR * scale)),
        Bar("faults observed", observed.total(), ">=", most),
        Bar("kinds of faults", len(observed), ">=", min(KINDS_FLOOR, most)),
        Bar("least of a kind", min(observed[kind.kind] for kind in FAULTS), ">=", int(EACH_FLOOR * scale)),
        Bar("worst recovery", round(worst_recovery, 2), "<=", RECOVERY_SECONDS, "s"),
        Bar(
            "memory grown by",
            round(max((last - first for first, last in ended.memory.values()), default=0.0), 1),
            "<=",
            MEMORY_MIB,
            "MiB",
        ),
        Bar("connections above the budget", sum(ended.above_budget.values()), "<=", 0),
        Bar("connections left open", sum(ended.left_open.values()), "<=", 0),
    ]


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """Each fault over time, by kind, and how long recovery from it took."""
    occurrences = report["data"]["occurrences"]
    kinds = sorted({occurrence["kind"] for occurrence in occurrences})
    over_time, by_kind = figure.subplots(1, 2, width_ratios=(2, 1), sharey=True)
    for occurrence in occurrences:
        place = kinds.index(occurrence["kind"])
        begin = (occurrence["began"] - occurrences[0]["began"]) / 60
        end = begin + occurrence["seconds"] / 60
        over_time.plot([begin, end], [place] * 2, ".-", linewidth=4, color="C3")
        by_kind.plot(occurrence["recovery_seconds"], place, ".", color="C0", alpha=0.6)
    over_time.set_yticks(range(len(kinds)), kinds, fontsize=6)
    over_time.set_xlabel("minutes", fontsize=7)
    by_kind.axvline(RECOVERY_SECONDS, linestyle=":", color="gray")
    by_kind.set_xlabel("seconds to recovery after the fault; the bar", fontsize=7)
    chunks = report["data"]["chunks"]
    figure.suptitle(
        f"{chunks['stored']:,} chunks, {len(occurrences)} faults: "
        f"{len(report['data']['findings']) or 'no'} promises broken",
        fontsize=9,
    )
    for axes in (over_time, by_kind):
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
