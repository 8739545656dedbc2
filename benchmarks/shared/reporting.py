"""A report for people: the table, and the plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned columns; a row may lack some."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in names]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: Any) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        case _:
            return str(value)


def save_plot(path: Path, plot: Callable[[Figure, dict[str, Any]], None], report: dict[str, Any]) -> None:
    """Let the benchmark draw its report, name the machine below, and write the picture."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    plot(figure, report)
    machine, postgres = report["machine"], report["postgres"]
    figure.supxlabel(
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{machine['system']}, Postgres {postgres['version'] if postgres else '–'}, {report['measured_on']}",
        fontsize=7,
        color="gray",
    )
    # No date and no version in the file: the same figures give the same picture.
    figure.savefig(path, dpi=150, metadata={"Software": None})
