"""What does `stream.append()` cost beside a plain `objects.create()`?

One process, one thread, each call a transaction of its own: rounds of 100 calls in turns, so that whatever
else the machine does meets all alike. The plain models have a table, a serial primary key and columns like a
chunk's; a chunk's data, 80 bytes of JSON, once in a JSONField and once as bytes. The bar is against the
faster of them.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.shared.processes import Program
from benchmarks.shared.results import Bar, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 20.0
BAR = 0.7


def measure(run: Run) -> Result:
    """Rounds in turns, all in one process."""
    with (
        run.database() as database,
        run.progress("appending and creating", run.seconds),
        Program(database, "benchmarks.orm_append", str(run.seconds)) as writer,
    ):
        measured = writer.hear()
    return result(measured["calls"], measured["rounds"])


def result(calls: int, rounds: dict[str, list[float]]) -> Result:
    """The figures of rounds of so many calls, from the seconds of each; `append` is among their names."""
    rows = [
        {
            "call": name,
            "per second": round(calls / statistics.median(seconds)),
            "microseconds": round(statistics.median(seconds) / calls * 1e6, 1),
            "append's rate / its": round(ratio(rounds["append"], seconds), 3),
        }
        for name, seconds in rounds.items()
    ]
    bar = min(ratio(rounds["append"], seconds) for name, seconds in rounds.items() if name != "append")
    return Result(rows, [Bar("append() / create()", round(bar, 3), ">=", BAR)])


def ratio(appending: list[float], creating: list[float]) -> float:
    """How fast appends are, as a part of how fast creates are: the median of the pairs of rounds."""
    return statistics.median(other / own for own, other in zip(appending, creating, strict=True))


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """Calls per second."""
    axes = figure.subplots()
    names = [row["call"] for row in report["rows"]]
    bars = axes.barh(names, [row["per second"] for row in report["rows"]], color=["C0", "C7", "C7"])
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("calls per second, one process, each call a transaction")
