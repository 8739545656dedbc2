"""How many writes a second, and how soon at a reader, beside what one could use instead?

The same work for all: 1, 16 and 64 writers append distinct JSON payloads of about 80 bytes to 64
streams, each waiting for an append's acknowledgement before its next, or for ten at once where that is
offered. A reader process follows all streams live, and checks that each chunk arrives once and in order.
Writes per second are those that were acknowledged and had arrived when writing ended; latency is from
before the append to the reader; the table has each peer at its best. The peers are releases from PyPI,
set up as their documentation says (`peers_programs/catalogue.py`), each time on a new database of the
same Postgres, or on a new redis-server. A chunk that this project loses fails the run; what a peer loses
is in the table.

With --check, the second and third round are of this project and of the peers that store durably and announce,
with the numbers of writers that were best for them in the first.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from benchmarks.peers_figures import (
    Point,
    Survey,
    acknowledged_counts,
    bars,
    best,
    in_contest,
    point,
    rows,
)
from benchmarks.peers_programs.catalogue import PEERS, Peer
from benchmarks.peers_programs.redis_server import redis_server, redis_version
from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.postgres import empty_database
from benchmarks.shared.processes import Program
from benchmarks.shared.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 4.0
PACKAGES = tuple(dict.fromkeys(package for peer in PEERS for package in peer.packages))
WRITERS = (1, 16, 64)

_surveys: WeakKeyDictionary[Run, Survey] = WeakKeyDictionary()  # the first round of each run


def measure(run: Run) -> Result:
    """All peers with all numbers of writers; in later rounds, who is compared, as it was best."""
    check_packages()
    with run.server() as server:
        if run not in _surveys:
            survey = {
                peer.name: [measure_point(run, server, peer, writers) for writers in WRITERS]
                for peer in PEERS
            }
            _surveys[run] = survey
        else:
            survey = {name: again(run, server, points) for name, points in _surveys[run].items()}
    return Result(rows(survey), bars(survey), data(survey))


def check_packages() -> None:
    """Raise `BenchmarkError` unless all peers are installed: none is skipped."""
    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            raise BenchmarkError(f'{package} is missing: pip install -e ".[bench]"') from None


def again(run: Run, server: str, points: list[Point]) -> list[Point]:
    """A peer's points with the best one measured anew, if it is one that is compared.

    The others stay for their latency alone: what was slower once is not the best now.
    """
    found = best(points)
    if not found.peer.ours and not in_contest(found.peer):
        return points
    new = measure_point(run, server, found.peer, found.writers)
    return [new if one is found else replace(one, per_second=0.0) for one in points]


def measure_point(run: Run, server: str, peer: Peer, writers: int) -> Point:
    """One peer with so many writers, on a new database or redis-server."""
    with (
        run.progress(f"{peer.name}, {writers} writers", run.seconds),
        contextlib.ExitStack() as stack,
    ):
        plan = asdict(peer) | {
            "database": stack.enter_context(empty_database(server)),
            "redis": stack.enter_context(redis_server(peer.redis)) if peer.redis is not None else None,
            "writers": writers,
            "processes": min(peer.processes, writers),
        }
        written, received = write_and_read(stack, plan, run.seconds)
    return point(peer, writers, written, received)


def write_and_read(
    stack: contextlib.ExitStack, plan: dict[str, Any], seconds: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the writing processes and the reader say at the end."""

    def start(program: str, **more: Any) -> Program:
        arguments = (f"benchmarks.peers_programs.{program}", json.dumps(plan | more))
        return stack.enter_context(Program(plan["database"], *arguments))

    start("prepare").hear()
    if plan["server"]:
        plan |= start(plan["server"]).hear()
    writing = [start("write", process=process) for process in range(plan["processes"])]
    all_say(writing, "ready")
    reader = start("read")
    all_say([reader], "following")
    all_tell(writing, "begin")
    all_say(writing, "warm")
    all_say([reader], "live")
    all_tell(writing, {"seconds": seconds})
    written = [program.hear() for program in writing]
    ended = max(one["ended"] for one in written)
    reader.tell({"acknowledged": acknowledged_counts(written), "ended": ended})
    return written, reader.hear()


def all_say(programs: list[Program], message: str) -> None:
    """Wait until each has said this."""
    for program in programs:
        heard = program.hear()
        if heard != message:
            raise BenchmarkError(f"{program.name} said {heard!r} where {message!r} was due.")


def all_tell(programs: list[Program], message: Any) -> None:
    """Send them all a message."""
    for program in programs:
        program.tell(message)


def data(survey: Survey) -> dict[str, Any]:
    """Every point, and what the peers are."""
    points = [
        asdict(one) | {"peer": one.peer.name, "per_second": round(one.per_second)}
        for points in survey.values()
        for one in points
    ]
    return {"points": points, "peers": [asdict(peer) for peer in PEERS], "redis-server": redis_version()}


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """Writes per second."""
    axes = figure.subplots()
    found = sorted(report["rows"], key=lambda row: -row["writes/s"])
    ours = {peer["name"] for peer in report["data"]["peers"] if peer["ours"]}
    durable = {peer["name"] for peer in report["data"]["peers"] if peer["durable"]}
    colors = [
        "C0" if row["peer"] in ours else "C7" if row["peer"] in durable else "lightgray" for row in found
    ]
    drawn = axes.barh([row["peer"] for row in found], [row["writes/s"] for row in found], color=colors)
    axes.bar_label(drawn, [label(row) for row in found], padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.tick_params(labelsize=8)
    axes.set_xlabel(
        "writes per second, at the best of 1, 16 and 64 writers\n(light: an acknowledged write may be lost)",
        fontsize=8,
    )


def label(row: dict[str, Any]) -> str:
    """The figures at the end of a bar."""
    latency = "" if row["p50 ms"] is None else f", p50 {row['p50 ms']:.3g} ms"
    lost = f", {row['lost %']:.3g} % lost" if row["lost %"] else ""
    return f"{row['writes/s']:,}{latency}{lost}"
