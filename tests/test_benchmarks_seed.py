"""The benchmark `seed` runs, notices what went wrong, and holds its bars where it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psycopg
import pytest

from benchmarks import seed, seed_samples
from benchmarks.__main__ import main
from benchmarks.seed import BUFFERED, SLOWER, TRIGGER, Announcing
from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.postgres import fresh_database
from benchmarks.shared.processes import Program

pytestmark = pytest.mark.once

STREAMS = 3


def test_each_announcing_is_measured(database_url, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(seed, "POLLING", [Announcing("6 × polling", 6, 0.1)])
    monkeypatch.setattr(seed, "CLIENTS", 4)
    monkeypatch.setattr(seed, "PGBENCH", [*seed.PGBENCH[:2], "--client=4", "--define=number=0"])
    code = main(["seed", "--seconds=1", "--database-url", database_url, f"--results={tmp_path}"])
    printed = capfd.readouterr()
    assert (code, printed.err) == (0, "")
    assert printed.out.splitlines()[-1].startswith("seed: buffered ÷ trigger, as it is ")
    report = json.loads((tmp_path / "seed.json").read_text())
    assert [row["announcing"] for row in report["rows"]] == ["6 × polling", TRIGGER, BUFFERED]
    for row in report["rows"]:
        assert row["disk"] == "as it is"
        assert row["writes/s"] > 0
        assert 0 < row["p50"] <= row["p95"] <= row["p99"] <= row["max"]
        assert (row["polls/s"] > 0) == ("polling" in row["announcing"])
    assert {"seed.py", "seed_append.sql", "seed_slow_flush.c"} <= report["scripts"].keys()
    assert (tmp_path / "seed.png").stat().st_size > 0


def test_flushes_are_made_slower():
    flush = (
        "import os; file = os.open('.', os.O_TMPFILE | os.O_WRONLY)\nfor _ in range(200): os.fdatasync(file)"
    )
    with seed.flushes(SLOWER) as environment:
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", flush], check=True, env=os.environ | environment)
        assert time.monotonic() - started > 0.2


# What went wrong is noticed --------------------------------------------------------------------------


@pytest.fixture
def database(database_url):
    with fresh_database(database_url) as database:
        yield database


@pytest.fixture
def reader(database):
    """A reader that has received the first chunk of every stream."""
    with Program(database, "benchmarks.seed_reader", str(STREAMS), "1", "0.01") as reader:
        reader.hear()
        execute(database, seed.APPEND_TO_EACH)
        reader.hear()
        yield reader


def execute(database, statement):
    with psycopg.connect(database, autocommit=True) as own:
        own.execute(statement)


def append(database, *payloads):
    for payload in payloads:
        execute(database, f"SELECT pgstreams_append('seed/0', '{payload}')")


def test_a_reader_that_got_everything_says_how_long_it_took(database, reader):
    append(database, 1, 2, 3)
    reader.tell({"acknowledged": STREAMS + 3})
    latencies = reader.hear()["latencies"]
    assert 0 < latencies["p50"] <= latencies["max"]


def test_an_acknowledged_chunk_that_is_not_stored_fails_the_run(database, reader):
    append(database, 1, 2)
    reader.tell({"acknowledged": STREAMS + 3})
    with pytest.raises(BenchmarkError, match="6 chunks were acknowledged, 5 are stored"):
        reader.hear()


def test_a_payload_that_arrived_twice_fails_the_run(database, reader):
    append(database, 1, 1)
    reader.tell({"acknowledged": STREAMS + 2})
    with pytest.raises(BenchmarkError, match="arrived twice"):
        reader.hear()


# Figures ---------------------------------------------------------------------------------------------


def row(announcing, disk, writes, **cells):
    return {"announcing": announcing, "disk": disk, "writes/s": writes, **cells}


def rows(notify=(96, 0), p99=90, busy=95, buffered=(3000, 20_000)):
    return [
        row("1 × polling 1 s", "as it is", 9, **{"notify %": 0, "p99": 1000, "busy %": 10}),
        row(TRIGGER, "as it is", 1000, **{"notify %": notify[0], "p99": 500, "busy %": 20}),
        row(BUFFERED, "as it is", buffered[0], **{"notify %": notify[1], "p99": 20, "busy %": busy}),
        row(TRIGGER, SLOWER, 1000, **{"notify %": 97, "p99": 500, "busy %": 20}),
        row(BUFFERED, SLOWER, buffered[1], **{"notify %": 0, "p99": p99, "busy %": 20}),
    ]


def missed(found):
    return [bar.name for bar in seed.bars(found) if not bar.holds]


def test_the_bars_hold_at_their_limits():
    assert missed(rows()) == []
    assert missed(rows(notify=(50, 5), p99=100, busy=90)) == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"buffered": (2999, 20_000)}, "buffered ÷ trigger, as it is"),
        ({"buffered": (3000, 19_999)}, "buffered ÷ trigger, flush 1 ms slower (preload)"),
        ({"p99": 100.1}, "buffered p99"),
        ({"notify": (49, 0)}, "waits for NOTIFY, trigger"),
        ({"notify": (96, 5.1)}, "waits for NOTIFY, buffered"),
        ({"busy": 89.9}, "busy cores, buffered, as it is"),
    ],
)
def test_a_bar_is_missed(changed, name):
    assert missed(rows(**changed)) == [name]


def test_the_machine_is_read():
    machine = seed_samples.machine(None)
    assert len(machine.cores) == os.cpu_count()
    assert all(0 <= idle <= ticks for ticks, idle in machine.cores)
    assert machine.disk_operations is None
    assert seed_samples.device("no-such-directory") is None
