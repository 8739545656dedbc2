"""The benchmark of `StreamWriter` runs, and no chunk that went wrong passes."""

from __future__ import annotations

import json

import pytest

from benchmarks import writer
from benchmarks.__main__ import main
from benchmarks.shared.errors import BenchmarkError
from benchmarks.writer_append import Producer
from benchmarks.writer_reader import Checker
from django_pgstreams.models import Chunk, Stream
from django_pgstreams.pages import Run

pytestmark = pytest.mark.once

NOW = 820_540_800_000_000  # microseconds, as Postgres counts them


def test_it_reports_each_case_beside_copy(database_url, tmp_path, capfd):
    code = main(["writer", "--seconds=0.2", "--database-url", database_url, f"--results={tmp_path}"])
    printed = capfd.readouterr()
    assert (code, printed.err) == (0, "")
    assert printed.out.splitlines()[-1].startswith("writer: 50 × 10 ")
    report = json.loads((tmp_path / "writer.json").read_text())
    rows = {row["case"]: row for row in report["rows"]}
    assert list(rows) == ["50 × 1", "50 × 10", "COPY, commits of 500", "500 × 4", "64 threads"]
    for row in rows.values():
        assert row["chunks/s"] > 0
        if row["case"] != writer.COPY:
            # What is not stored yet cannot have arrived; half of it may have before its writer was told.
            assert 0 < row["ack p50"] < row["reader max"]
            assert row["reader p50"] <= row["reader p95"] <= row["reader p99"] <= row["reader max"]
    assert {"writer.py", "writer_append.py", "writer_copy.py", "writer_reader.py"} == set(report["scripts"])
    assert (tmp_path / "writer.png").read_bytes().startswith(b"\x89PNG")


def test_the_bars_are_those_of_their_cases():
    rows = {
        "50 × 1": {"chunks/s": 50_000},
        "50 × 10": {"chunks/s": 120_000, "reader p99": 20},
        "500 × 4": {"chunks/s": 1, "reader p99": 1000},
        "64 threads": {"chunks/s": 20_000},
        writer.COPY: {"chunks/s": 300_000},
    }
    found = [(bar.name, bar.value, bar.limit, bar.holds) for bar in writer.bars(rows)]
    assert found == [
        ("50 × 10", 120_000, 100_000, True),
        ("50 × 10 of COPY's rate", 0.4, 0.3, True),
        ("50 × 10 p99 to the reader", 20, 30, True),
        ("50 × 1", 50_000, 45_000, True),
        ("64 threads", 20_000, 25_000, False),
    ]


@pytest.mark.parametrize("received", [{}, {"a": 2, "b": 0}, {"a": 3, "b": 1}, {"b": 1}], ids=str)
def test_streams_of_which_not_all_arrived_fail_the_run(received):
    writer.check({"a": 3, "b": 0}, {"a": 3, "b": 0})
    with pytest.raises(BenchmarkError, match="acknowledged chunks"):
        writer.check({"a": 3, "b": 0}, received)


def test_an_append_is_acknowledged_with_its_number():
    producer = Producer(0, Stream(pk=1, key="a"))
    producer.take(0, 0)
    producer.take(1, 1)
    assert producer.acknowledged == 2
    with pytest.raises(BenchmarkError, match="Append 2 to a was acknowledged as offset 3"):
        producer.take(2, 3)


def chunks(*numbers: int, first: int = 0, place: int = 7) -> list[Chunk]:
    """Chunks at consecutive offsets whose payloads have these numbers."""
    payloads = [json.dumps({"stream": place, "number": n, "at": 1000}).encode() for n in numbers]
    return Chunk.stored(Stream(pk=1, key="a"), Run(first, payloads, [NOW] * len(payloads)))


def test_what_arrives_in_order_is_counted_and_timed():
    checker = Checker(7)
    checker.take(chunks(0, 1), now=1500)
    checker.take(chunks(2, first=2), now=1700)
    assert checker.next == 3
    assert list(checker.nanoseconds) == [500, 500, 700]


@pytest.mark.parametrize(
    "arrived",
    [
        pytest.param(chunks(0, 1, 3), id="another in its place"),
        pytest.param(chunks(0, 2, 1), id="swapped"),
        pytest.param(chunks(0, 1, 1), id="stored twice"),
        pytest.param([*chunks(0, 1), *chunks(1, first=1)], id="delivered twice"),
        pytest.param([*chunks(0), *chunks(2, first=2)], id="lost"),
        pytest.param(chunks(1, first=1), id="lost at the start"),
        pytest.param(chunks(0, place=6), id="of another stream"),
    ],
)
def test_a_chunk_that_was_not_due_fails_the_run(arrived):
    with pytest.raises(BenchmarkError, match="was due"):
        Checker(7).take(arrived, now=1500)
