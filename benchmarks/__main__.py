"""`python -m benchmarks NAME`: run one benchmark, print its figures, keep them; see `--help`.

Exit code: 0, or with --check (of chaos always) 1 when a bar is missed; 2 for a run that went wrong, such as
a lost chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psycopg

from benchmarks import chaos, fanout, latency, orm, peers, scale, seed, writer
from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.reporting import save_plot, table
from benchmarks.shared.results import Bar, Result, median_result, report
from benchmarks.shared.running import Run

RESULTS = Path(__file__).resolve().parent / "results"
RUNS_OF_A_CHECK = 3

# What each module defines: see `benchmarks`.
BENCHMARKS: dict[str, ModuleType] = {
    "chaos": chaos,
    "fanout": fanout,
    "latency": latency,
    "orm": orm,
    "peers": peers,
    "scale": scale,
    "seed": seed,
    "writer": writer,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the arguments name, and return the exit code."""
    options = parse(arguments)
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        return run(options.name, BENCHMARKS[options.name], options)
    except (BenchmarkError, psycopg.Error) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)


def _leave(signal_number: int, _frame: object) -> NoReturn:
    """What was started is ended on the way out."""
    raise SystemExit(128 + signal_number)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the benchmark that the arguments name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in BENCHMARKS.items():
        command = commands.add_parser(
            name,
            help=question(module),
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_common_arguments(command, module.SECONDS)
        if hasattr(module, "add_arguments"):
            module.add_arguments(command)
    return parser.parse_args(arguments)


def question(module: ModuleType) -> str:
    """What a benchmark asks: the first line of its docstring."""
    return (module.__doc__ or "").partition("\n")[0]


def add_common_arguments(command: argparse.ArgumentParser, seconds: float) -> None:
    """The options of every benchmark."""
    command.add_argument(
        "--seconds", type=float, default=seconds, help="how long each case is measured (%(default)g)"
    )
    command.add_argument(
        "--check",
        action="store_true",
        help=f"measure {RUNS_OF_A_CHECK} times, take medians, and exit with 1 if one misses its bar",
    )
    command.add_argument(
        "--database-url",
        metavar="URL",
        help="the Postgres to run on; else DATABASE_URL, else one of its own, for this run only",
    )
    command.add_argument(
        "--json", metavar="FILE", help="write the figures there too; - for standard output, and only they"
    )
    command.add_argument(
        "--results",
        metavar="DIRECTORY",
        type=Path,
        default=RESULTS,
        help="where NAME.json and NAME.png go (benchmarks/results)",
    )


def run(name: str, module: ModuleType, options: argparse.Namespace) -> int:
    """Measure once, or three times to check; print and write what was found; the exit code."""
    # The figures are on standard output alone when they go there as JSON.
    to_people = sys.stderr if options.json == "-" else sys.stdout
    surroundings = Run(name, options, options.database_url or os.environ.get("DATABASE_URL"))
    load_before = os.getloadavg()[0]
    results: list[Result] = []
    for _ in range(RUNS_OF_A_CHECK if options.check else 1):
        results.append(module.measure(surroundings))
        print(f"{table(results[-1].rows)}\n", file=to_people, flush=True)
    found = report(
        name,
        question(module),
        results,
        seconds=options.seconds,
        packages=getattr(module, "PACKAGES", ()),
        postgres=surroundings.postgres,
        load_before=load_before,
    )
    write(found, module, options)
    bars = median_result(results).bars
    if len(results) > 1:
        print(f"Medians of {len(results)}:\n{table(found['rows'])}\n", file=to_people)
    print(conclusion(name, bars), file=to_people)
    decides = options.check or getattr(module, "BARS_DECIDE", False)
    return 1 if decides and not all(bar.holds for bar in bars) else 0


def conclusion(name: str, bars: Sequence[Bar]) -> str:
    """A line for each bar, and the last one: the figures."""
    return "\n".join([*map(str, bars), f"{name}: {'; '.join(bar.figure for bar in bars) or 'no bar'}"])


def write(found: dict[str, Any], module: ModuleType, options: argparse.Namespace) -> None:
    """The report as JSON and as a plot."""
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{options.name}.json").write_text(text, encoding="utf-8")
    save_plot(options.results / f"{options.name}.png", module.plot, found)
    if options.json == "-":
        sys.stdout.write(text)
    elif options.json:
        Path(options.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
