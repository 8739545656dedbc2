"""Benchmarks of django_pgstreams: `python -m benchmarks NAME`.

How to write one. `benchmarks/NAME.py` asks one question; what it runs in other processes is beside it in
files or folders `NAME_*`, all of which go into the results as its scripts. `__main__` lists it; it defines

    a docstring               its first line is the question
    SECONDS = 10.0            the default of --seconds: how long one case is measured
    PACKAGES = ("dbos",)      if it measures packages beside ours, whose versions go into the results
    BARS_DECIDE = True        if a missed bar is a failure without --check too
    add_arguments(parser)     if it has options of its own
    measure(run) -> Result    one measurement: rows (the table), bars (what must hold), data (for the plot)
    plot(figure, report)      draws the rows into a matplotlib `Figure`; `report` is what the JSON file holds

    def measure(run: Run) -> Result:
        with run.database() as database, Program(database, "benchmarks.NAME_writer") as writer:
            with run.progress("appending", run.seconds):
                writer.tell({"seconds": run.seconds})
                acknowledged = writer.hear()["acknowledged"]
            …
        found = spread(latencies_ms(acknowledged, received))
        return Result(rows=[{"case": "appending", **found}], bars=[Bar("p99", found["p99"], "<=", 12, "ms")])

`run.database()` is a new, migrated database on a Postgres of its own: the embedded binaries, the default
configuration but for `max_connections` and the socket, data on disk, removed at the end. `run.server()`,
which takes an environment, and `fresh_database(server)` are its two halves. `Program` is a Python module in
another process, with the example project's settings and that database; they talk JSON lines, and its death
raises what it said on standard error. Its end is `say()`, `hear()` and, before what is measured, `settle()`
of `shared.talking`. `daphne(database)` and `uvicorn(database)` serve.

A reader always checks: `check(acknowledged, received)` raises `BenchmarkError`, exit code 2, unless every
acknowledged chunk arrived once and in order. Nothing in rows, bars or data may hold a path of the machine.
With `--check` the measurement runs three times; each bar, and each number of the rows, is the median.
The modules here import `shared`, the standard library and the `bench` extra alone: what else is measured is
imported by programs. Smoke tests give `--seconds` below 1 and a `--results` of their own.
"""
