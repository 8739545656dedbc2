"""How does cost grow with streams, stored chunks, announcing processes, and subscriptions of one process?

For each cost the slope of its line on logarithmic axes, by least squares over all sizes: 0 when it stays as
it is, 1 when it grows as fast as the size, above 1 when it outgrows it.

- `streams` open, with 20 chunks each, and `chunks` stored in 100 streams: the time of `stream.append()`, of
  an append by `StreamWriter` (500 in flight), and of reading a page (all 20 chunks; 100 at a random
  position); streams are chosen at random. For the relay the processor time of a look, its own and the
  server's.
- `processes` that append by `stream.append()` as fast as they can, all beginning at once: the flushes of
  their notifiers a second, all together, on average and in the busiest second from the first one on; and
  the time of an append, all together. Another process follows all streams.
- `subscriptions`, each to a stream of its own, all in one process: the processor time of subscribing, of a
  tick when one stream has moved or all have, and of a poll, in the process and at the server; and its
  memory. A poll here is a wake-up that says no more than "look at everything", and finds a chunk that
  nobody announced.

The subscribing process runs `gc.freeze()` once it follows everything, as a process with as many long-lived
objects should: else Python's full collections, which visit a million of them at 20,000 subscriptions, take
up to half of the time in which all streams move. The tables are filled at the server. What a size measures
is checked: each acknowledged chunk is stored, or received by the followers, once and in order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from benchmarks import scale_following, scale_storing
from benchmarks.scale_figures import slope
from benchmarks.scale_following import BUSIEST, LISTENERS
from benchmarks.shared.results import Bar, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 2.0
SIZES = {
    "streams": (10, 100, 1_000, 10_000, 100_000),
    "chunks": (10_000, 100_000, 1_000_000, 10_000_000),
    "processes": (1, 2, 4, 8, 16),
    "subscriptions": (200, 2_000, 20_000),
}
MEASUREMENTS: dict[str, Callable[[str, float], AbstractContextManager[Callable[[int], dict[str, float]]]]] = {
    "streams": scale_storing.streams,
    "chunks": scale_storing.chunks,
    "processes": scale_following.processes,
    "subscriptions": scale_following.subscriptions,
}
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")
"""The sizes in order: the columns of what costs at each."""
BAR = 1.1
MAX_FLUSHES = 1_000
MAX_LISTENERS = 1


def measure(run: Run) -> Result:
    """Each cost at each size; a short run takes the two smallest sizes of each alone."""
    rows = []
    for what, sizes in SIZES.items():
        with run.server() as server, MEASUREMENTS[what](server, run.seconds) as costs:
            found = []
            for size in sizes if run.seconds >= 1 else sizes[:2]:
                with run.progress(f"{size:,} {what}", run.seconds * 3):
                    found.append((size, costs(size)))
        rows += rows_of(what, found)
    return Result(rows, bars(rows))


def rows_of(what: str, found: list[tuple[int, dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each cost that is known at all sizes: its slope, and what it is at each of them."""
    sizes = [size for size, _ in found]
    names = [name for name in found[0][1] if all(name in costs for _, costs in found)]
    rows = []
    for name in names:
        costs = [costs[name] for _, costs in found]
        row = {"of": what, "sizes": f"{sizes[0]:,} … {sizes[-1]:,}", "cost": name}
        row["slope"] = round(slope(sizes, costs), 3)
        rows.append(row | dict(zip(ORDINALS, [round(cost, 4) for cost in costs], strict=False)))
    return rows


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """The steepest slope of each, the flushes of the most processes, the listeners of all subscriptions."""
    found = [
        Bar(f"steepest slope by {what}", max(row["slope"] for row in rows if row["of"] == what), "<=", BAR)
        for what in dict.fromkeys(row["of"] for row in rows)
    ]
    for name, limit in ((BUSIEST, MAX_FLUSHES), (LISTENERS, MAX_LISTENERS)):
        [row] = [row for row in rows if row["cost"] == name]
        found.append(Bar(f"{name} with {row['sizes'].split()[-1]} {row['of']}", last(row), "<=", limit))
    return found


def costs_of(row: dict[str, Any]) -> list[float]:
    """What it is at each size."""
    return [row[name] for name in ORDINALS if name in row]


def last(row: dict[str, Any]) -> float:
    """What it is at the largest size."""
    return costs_of(row)[-1]


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """Each cost as a multiple of what it is at the smallest size, beside what the bar allows."""
    for axes, (what, sizes) in zip(figure.subplots(2, 2).flat, SIZES.items(), strict=True):
        for row in report["rows"]:
            if row["of"] == what:
                costs = costs_of(row)
                known = sizes[: len(costs)]
                axes.loglog(
                    known,
                    [cost / costs[0] for cost in costs],
                    ".-",
                    label=f"{row['cost']}: {row['slope']:.2f}",
                )
        allowed = [(size / known[0]) ** BAR for size in known]
        axes.loglog(known, allowed, ":", color="gray", label=f"the bar: {BAR}")
        axes.set_xlabel(what, fontsize=7)
        axes.set_ylabel("times the first", fontsize=7)
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=5)
