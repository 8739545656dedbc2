"""`python -m benchmarks NAME`: run one benchmark, print its figures; see `--help`."""

from __future__ import annotations

import argparse
import sys

from benchmarks import latency

# Each module has a docstring, `add_arguments(parser)` and `run(options)`, which returns the exit code.
BENCHMARKS = {"latency": latency}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the arguments name, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, module in BENCHMARKS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.add_argument(
            "--database-url",
            metavar="URL",
            help="the Postgres to run on; else DATABASE_URL, else the example project's own",
        )
        command.add_argument(
            "--json", metavar="FILE", help="write the figures there too; - for standard output"
        )
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    return BENCHMARKS[options.name].run(options)


if __name__ == "__main__":
    sys.exit(main())
