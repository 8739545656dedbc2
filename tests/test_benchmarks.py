"""The benchmarks run, and report wrong results as such; their speed is for quiet machines."""

from __future__ import annotations

import json

import psycopg
import pytest
from django.db import connection
from psycopg.conninfo import make_conninfo

from benchmarks import latency
from benchmarks.__main__ import main
from benchmarks.processes import BenchmarkError


@pytest.fixture
def database_url(django_db_setup, django_db_blocker):
    """The server of the tests."""
    with django_db_blocker.unblock():
        own = connection.get_connection_params()
    names = ("host", "port", "user", "password")
    return make_conninfo(dbname="postgres", **{name: own[name] for name in names if name in own})


def leftovers(database_url):
    with psycopg.connect(database_url) as own:
        query = "SELECT datname FROM pg_database WHERE datname LIKE 'pgstreams_benchmark_%'"
        return own.execute(query).fetchall()


def test_latency_reports_every_chunk(database_url, tmp_path, capfd):
    report = tmp_path / "latency.json"
    code = main(["latency", "--seconds=1.5", "--database-url", database_url, f"--json={report}"])
    printed = capfd.readouterr()
    assert (code, printed.err) == (0, "")
    assert "every chunk arrived once, in order" in printed.out
    found = json.loads(report.read_text())
    assert found["benchmark"] == "latency"
    assert (found["chunks"], found["appends_per_second"]) == (30, 20)
    assert set(found["versions"]) == {"django_pgstreams", "Python", "Django", "Postgres"}
    milliseconds = found["latency_ms"]
    assert list(milliseconds) == ["min", "p50", "p95", "p99", "max"]
    assert list(milliseconds.values()) == sorted(milliseconds.values())
    assert 0 < milliseconds["p50"] < 5000
    assert found["passed"] == (milliseconds["p50"] <= found["bar_ms"] == 5)
    assert leftovers(database_url) == []


def test_a_missed_bar_is_an_exit_code_on_demand(database_url, monkeypatch, capfd):
    monkeypatch.setattr(latency, "BAR_MS", 0.0)
    code = main(["latency", "--seconds=0.2", "--check", "--database-url", database_url, "--json=-"])
    printed = capfd.readouterr()
    assert code == 1
    assert json.loads(printed.out)["passed"] is False
    assert "median at most 0 ms: NO" in printed.err


def test_a_server_that_is_not_there_is_said_plainly(capfd):
    assert main(["latency", "--database-url", "postgresql://127.0.0.1:1/x"]) == 2
    assert "Traceback" not in capfd.readouterr().err


APPENDED = [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_latency_is_counted_from_the_append():
    found = latency.figures(APPENDED, [(0, 0, 1.001), (1, 1, 2.004), (2, 2, 3.009)])
    assert found["latency_ms"] == {"min": 1.0, "p50": 4.0, "p95": 9.0, "p99": 9.0, "max": 9.0}
    assert found["passed"] is True


def test_percentiles_are_those_of_the_nearest_rank():
    appended = [(number, 0.0) for number in range(200)]
    received = [(number, number, (number + 1) / 1000) for number in range(200)]
    found = latency.figures(appended, received)["latency_ms"]
    assert found == {"min": 1.0, "p50": 100.5, "p95": 190.0, "p99": 198.0, "max": 200.0}


@pytest.mark.parametrize(
    "received",
    [
        [],
        [(0, 0, 1.0), (1, 1, 2.0)],
        [(0, 0, 1.0), (1, 1, 2.0), (2, 2, 3.0), (2, 2, 3.0)],
        [(0, 0, 1.0), (2, 2, 2.0), (1, 1, 3.0)],
        [(0, 0, 1.0), (1, 2, 2.0), (2, 1, 3.0)],
        [(1, 0, 1.0), (2, 1, 2.0), (3, 2, 3.0)],
    ],
    ids=["none", "one missing", "one twice", "out of order", "swapped", "other offsets"],
)
def test_a_chunk_that_went_wrong_is_no_latency(received):
    with pytest.raises(BenchmarkError, match=f"Of 3 appended chunks {len(received)} arrived"):
        latency.figures(APPENDED, received)
