"""The benchmarks run, and report wrong results as such; their speed is for quiet machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from benchmarks import __main__ as command
from benchmarks import latency, orm
from benchmarks.__main__ import main
from benchmarks.shared.checking import check, latencies_ms, medians, percentile, spread
from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.processes import PROJECT_ROOT
from benchmarks.shared.reporting import table
from benchmarks.shared.results import Bar, Result, median_result
from benchmarks.shared.running import Run
from tests.waiting import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.once


def has_no_leftovers(database_url):
    with psycopg.connect(database_url) as own:
        query = "SELECT datname FROM pg_database WHERE datname LIKE 'pgstreams_benchmark_%'"
        return not own.execute(query).fetchall()


# The benchmarks run ----------------------------------------------------------------------------------


def test_latency_reports_each_reader_of_what_stream_writers_store(database_url, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(latency, "DELAYS_MS", (0,))
    monkeypatch.setattr(latency, "RATES", (100,))
    monkeypatch.setattr(latency, "MOST_APPENDS", 10)
    code = main(["latency", "--seconds=0.3", "--database-url", database_url, f"--results={tmp_path}"])
    printed = capfd.readouterr()
    assert (code, printed.err) == (0, "")
    assert printed.out.splitlines()[-1].startswith("latency: p50 to a subscriber at 100/s ")
    report = json.loads((tmp_path / "latency.json").read_text())
    assert [row["to"] for row in report["rows"]] == ["subscriber", "websocket"]
    for row in report["rows"]:
        assert row["p50"] <= row["p95"] <= row["p99"] <= row["max"]
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    # Another run of the tests may use this server too.
    wait_until(lambda: has_no_leftovers(database_url), "the benchmark's database is dropped")


def test_a_slower_network_is_as_slow_as_it_says(database_url, monkeypatch):
    monkeypatch.setattr(latency, "READERS", ("subscriber",))
    monkeypatch.setattr(latency, "RATES", (20,))  # by stream.append()
    surroundings = Run("latency", SimpleNamespace(seconds=0.3), database_url)
    [row] = latency.measure_network(surroundings, database_url, 5)
    assert row["kept"] >= 5
    # The wake-up to Postgres and to the reader, then the reader's question and its answer, less the
    # acknowledgement's own way to the writer.
    assert row["p50"] >= 3 * 5


def test_orm_compares_appending_with_creating(database_url, tmp_path, capfd):
    code = main(["orm", "--seconds=0.1", "--database-url", database_url, f"--results={tmp_path}"])
    printed = capfd.readouterr()
    assert (code, printed.err) == (0, "")
    report = json.loads((tmp_path / "orm.json").read_text())
    assert [row["call"] for row in report["rows"]] == ["append", "create with JSON", "create with bytes"]
    [bar] = report["bars"]
    assert bar["holds"] == (bar["value"] >= 0.7)


def test_a_report_says_what_made_it_but_not_where(database_url, tmp_path):
    report = tmp_path / "elsewhere.json"
    options = ["--database-url", database_url, f"--results={tmp_path}", f"--json={report}"]
    assert main(["orm", "--seconds=0.1", *options]) == 0
    assert report.read_text() == (tmp_path / "orm.json").read_text()
    found = json.loads(report.read_text())
    assert set(found["scripts"]) == {"orm.py", "orm_append.py"}
    assert found["machine"]["cores"] >= 1
    assert {"Python", "Django", "psycopg", "django-pgstreams"} <= set(found["versions"])
    assert int(found["postgres"]["version"].split(".")[0]) >= 15
    assert "max_connections" in found["postgres"]["settings"]
    assert os.fspath(PROJECT_ROOT) not in report.read_text()
    assert not [value for value in found["postgres"]["settings"].values() if value.startswith("/")]


@pytest.fixture
def own_servers(tmp_path_factory):
    """Where a benchmark's own Postgres goes; a short path, for the socket."""
    directory = Path("/tmp") / f"pgb-{os.getpid()}"
    directory.mkdir(mode=0o711)
    yield directory
    directory.rmdir()  # fails if anything was left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_stopped_takes_its_postgres_along(own_servers, tmp_path, number):
    environment = os.environ | {"PGSTREAMS_EMBEDDED_DIR": os.fspath(own_servers)}
    environment.pop("DATABASE_URL", None)
    arguments = ["-m", "benchmarks", "orm", "--seconds=600", f"--results={tmp_path}"]
    running = subprocess.Popen(
        [sys.executable, *arguments], cwd=PROJECT_ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    with running:
        try:
            wait_until(lambda: appends(own_servers), "the benchmark appends")
        finally:
            running.send_signal(number)
            _, errors = running.communicate(timeout=DEADLINE_SECONDS)
    assert (running.returncode, errors) == (128 + number, "")
    assert list(own_servers.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def appends(own_servers):
    """Whether the benchmark's own server has a stream."""
    [*data] = own_servers.glob("bench-*/*/data")
    if not data:
        return False
    try:
        with psycopg.connect(host=os.fspath(data[0]), user="postgres", dbname="postgres") as own:
            activity = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pgstreams_chunk%'"
            return own.execute(activity).fetchone()[0] > 1
    except psycopg.OperationalError:
        return False


def test_a_server_that_is_not_there_is_said_plainly(tmp_path, capfd):
    code = main(["orm", "--database-url", "postgresql://127.0.0.1:1/x", f"--results={tmp_path}"])
    printed = capfd.readouterr()
    assert (code, printed.out) == (2, "")
    assert "port 1" in printed.err
    assert "Traceback" not in printed.err
    assert list(tmp_path.iterdir()) == []


# What becomes of figures -------------------------------------------------------------------------------


class Scripted(SimpleNamespace):
    """A benchmark whose measurements are given; `plot` notes what it draws."""

    __doc__ = "How much?"
    SECONDS = 1.0

    def measure(self, run):
        return self.results.pop(0)

    def plot(self, figure, report):
        self.drawn = report["rows"]


def result(value, *, limit=4, comparison="<=", **data):
    return Result([{"case": "one", "value": value}], [Bar("value", value, comparison, limit, "ms")], data)


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """Runs the command with measurements that are given."""

    def run(results, *arguments):
        module = Scripted(results=list(results))
        monkeypatch.setitem(command.BENCHMARKS, "scripted", module)
        return main(["scripted", f"--results={tmp_path}", *arguments]), module

    return run


def test_a_check_takes_the_median_of_three(scripted, tmp_path, capfd):
    code, module = scripted([result(5.0), result(1.0), result(2.0)], "--check")
    assert code == 0
    assert module.drawn == [{"case": "one", "value": 2.0}]
    report = json.loads((tmp_path / "scripted.json").read_text())
    assert [run["bars"] for run in report["runs"]] == [{"value": 5.0}, {"value": 1.0}, {"value": 2.0}]
    assert [bar["value"] for bar in report["bars"]] == [2.0]
    assert capfd.readouterr().out.splitlines()[-2:] == [
        "value 2 ms, at most 4 ms: yes",
        "scripted: value 2 ms",
    ]


def test_a_missed_bar_is_an_exit_code_on_demand(scripted, capfd):
    missed = [result(1.0, limit=2.5, comparison=">=") for _ in range(3)]
    assert scripted(missed, "--check")[0] == 1
    assert "value 1 ms, at least 2.5 ms: NO, missed by 1.5 ms" in capfd.readouterr().out
    assert scripted(missed[:1])[0] == 0
    assert "value 1 ms, at least 2.5 ms: NO, missed by 1.5 ms" in capfd.readouterr().out


def test_json_on_standard_output_stands_alone(scripted, capfd):
    assert scripted([result(1.0)], "--json=-")[0] == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["rows"] == [{"case": "one", "value": 1.0}]
    assert "value 1 ms, at most 4 ms: yes" in printed.err


def test_bars_hold_at_their_limits():
    assert Bar("a", 4, "<=", 4).holds
    assert Bar("a", 4, ">=", 4).holds
    assert not Bar("a", 4.1, "<=", 4).holds
    assert not Bar("a", 3.9, ">=", 4).holds


def test_medians_are_those_of_each_number():
    assert medians([3, 1, 2]) == 2
    assert medians([{"a": 1, "b": "x"}, {"a": 5, "b": "x"}, {"a": 2, "b": "x"}]) == {"a": 2, "b": "x"}
    assert medians([[1, True], [2, True], [9, False]]) == [2, True]
    both = median_result([result(1.0, kept=1), result(9.0, kept=2), result(2.0, kept=3)])
    assert (both.bars[0].value, both.rows[0]["value"], both.data) == (2.0, 2.0, {"kept": 1})


def test_a_table_is_aligned_and_says_what_is_missing():
    rows = [{"to": "websocket", "rate": 10_000, "p50": 1.23456}, {"to": "us", "rate": 20, "kept": 1234.5}]
    assert table(rows).splitlines() == [
        "to           rate   p50   kept",
        "websocket  10,000  1.23      –",
        "us             20     –  1,234",
    ]


def test_the_figure_of_orm_is_the_median_of_its_pairs():
    found = orm.result(
        100, {"append": [0.2, 0.2, 9], "create with JSON": [0.1, 0.1, 0.1], "b": [0.1, 0.2, 9]}
    )
    assert found.rows[0] == {
        "call": "append",
        "per second": 500,
        "microseconds": 2000,
        "append's rate / its": 1,
    }
    assert [row["append's rate / its"] for row in found.rows[1:]] == [0.5, 1]
    assert (found.bars[0].value, found.bars[0].holds) == (0.5, False)


# What arrived against what was acknowledged --------------------------------------------------------------

ACKNOWLEDGED = {"a": [(0, "x", 1.0), (1, "y", 2.0), (2, "z", 3.0)]}


def test_latency_is_counted_from_the_acknowledgement():
    arrived = [(0, "x", 1.001), (1, "y", 2.004), (2, "z", 3.009)]
    found = spread(latencies_ms(ACKNOWLEDGED, {"a": arrived}))
    assert found == {"p50": 4.0, "p95": 9.0, "p99": 9.0, "max": 9.0}


def test_acknowledgements_come_in_any_order_and_may_be_fewer():
    arrived = [(4, "w", 1.0), (5, "x", 1.0), (6, "y", 1.0), (7, "z", 2.0)]
    assert check({"a": [(7, "z"), (5, "x")]}, {"a": arrived, "b": []}) == 2


@pytest.mark.parametrize(
    ("arrived", "message"),
    [
        ([], "of 3 acknowledged chunks 0 arrived; offset 0 did not"),
        ([(0, "x"), (1, "y")], "of 3 acknowledged chunks 2 arrived; offset 2 did not"),
        ([(1, "y"), (2, "z")], "offset 0 did not"),
        ([(0, "x"), (2, "z")], "offset 2 arrived where 1 was due"),
        ([(0, "x"), (1, "y"), (2, "z"), (2, "z")], "offset 2 arrived where 3 was due"),
        ([(0, "x"), (2, "z"), (1, "y")], "offset 2 arrived where 1 was due"),
        ([(0, "x"), (1, "z"), (2, "y")], "at offset 1, 'y' was acknowledged and 'z' arrived"),
        ([(0, "x"), (1, "y"), (2, "z"), (3, "y")], "a payload arrived twice"),
        ([(1, "x"), (2, "y"), (3, "z")], "offset 0 did not"),
    ],
    ids=["none", "lost", "first lost", "hole", "twice", "out of order", "swapped", "stored twice", "moved"],
)
def test_a_chunk_that_went_wrong_ends_the_run(arrived, message):
    with pytest.raises(BenchmarkError, match=message):
        check(ACKNOWLEDGED, {"a": arrived})


def test_an_offset_that_was_given_twice_ends_the_run():
    with pytest.raises(BenchmarkError, match="acknowledged twice"):
        check({"a": [(0, "x"), (0, "y")]}, {"a": [(0, "x")]})


def test_a_stream_of_which_nothing_arrived_ends_the_run():
    with pytest.raises(BenchmarkError, match="of 1 acknowledged chunks 0 arrived"):
        check({"a": [(0, "x")], "b": [(0, "x")]}, {"a": [(0, "x")]})


def test_percentiles_are_those_of_the_nearest_rank():
    values = [float(number) for number in range(1, 201)]
    assert [percentile(values, percent) for percent in (0, 50, 95, 99, 99.9, 100)] == [
        *(1, 100, 190, 198, 200, 200)
    ]
    with pytest.raises(BenchmarkError, match="Nothing was measured"):
        spread([])
