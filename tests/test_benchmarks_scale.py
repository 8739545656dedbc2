"""The benchmark of growth runs, its figures are right, and its followers notice what goes wrong."""

from __future__ import annotations

import json

import pytest
from matplotlib.figure import Figure

from benchmarks import scale, scale_following
from benchmarks.__main__ import main
from benchmarks.scale_database import new_database
from benchmarks.scale_figures import busiest_second, slope
from benchmarks.scale_following import BUSIEST, LISTENERS, Followers
from benchmarks.shared.errors import BenchmarkError

pytestmark = pytest.mark.once

SMALL = {
    "streams": (10, 50),
    "chunks": (20_000, 40_000),
    "processes": (1, 2),
    "subscriptions": (20, 60),
}


def test_scale_says_the_slope_of_each_cost(database_url, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(scale, "SIZES", SMALL)
    code = main(["scale", "--seconds=0.5", "--database-url", database_url, f"--results={tmp_path}"])
    printed = capfd.readouterr()
    assert (code, printed.err) == (0, "")
    assert printed.out.splitlines()[-1].startswith("scale: steepest slope by streams ")
    report = json.loads((tmp_path / "scale.json").read_text())
    costs = {what: {row["cost"] for row in report["rows"] if row["of"] == what} for what in SMALL}
    stored = {"page, ms", "stream.append(), ms", "StreamWriter append, ms"}
    assert costs["streams"] >= stored
    assert costs["chunks"] == stored
    assert {"flushes a second", BUSIEST} <= costs["processes"]
    assert {"poll, CPU ms", "tick, one moved, CPU ms", "memory, MiB", LISTENERS} <= costs["subscriptions"]
    assert len(report["bars"]) == len(SMALL) + 2
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("exponent", [0, 0.5, 1, 1.1, 2])
def test_the_slope_is_the_exponent_of_the_growth(exponent):
    sizes = (200, 2_000, 20_000)
    assert slope(sizes, [3 * size**exponent for size in sizes]) == pytest.approx(exponent)


def test_the_slope_is_that_of_the_least_squares():
    assert slope((1, 10, 100), (1, 1, 1_000)) == pytest.approx(1.5)
    assert slope((1, 10, 100), (1, 1_000, 1)) == pytest.approx(0)


def test_the_busiest_second_is_that_of_all_counters_together():
    steady = [(at / 10, at * 10) for at in range(51)]
    late = [(0.0, 0), (2.0, 0), (2.5, 300), (5.0, 300)]
    assert busiest_second([steady]) == pytest.approx(100)
    assert busiest_second([steady, late]) == pytest.approx(400)


def test_the_busiest_second_of_less_than_a_second_is_the_rate():
    assert busiest_second([[(0.0, 0), (0.5, 100)], [(0.0, 0), (0.5, 50)]]) == pytest.approx(300)


def found(costs):
    return [(size, cost) for size, cost in zip((10, 100), costs, strict=True)]


def rows(flushes=(90.0, 900.0), listeners=(1, 1)):
    announcing = found([{BUSIEST: flushes[0]}, {BUSIEST: flushes[1]}])
    following = found([{LISTENERS: listeners[0]}, {LISTENERS: listeners[1], "poll, CPU ms": 3.0}])
    return scale.rows_of("processes", announcing) + scale.rows_of("subscriptions", following)


def test_a_row_has_the_costs_in_the_order_of_the_sizes():
    assert rows()[0] == {
        "of": "processes",
        "sizes": "10 … 100",
        "cost": BUSIEST,
        "slope": 1.0,
        "1st": 90.0,
        "2nd": 900.0,
    }
    # What is not known at all sizes has no slope.
    assert [row["cost"] for row in rows()] == [BUSIEST, LISTENERS]


@pytest.mark.parametrize(
    ("given", "missed"),
    [
        ({}, []),
        ({"flushes": (90.0, 1_001.0)}, [f"{BUSIEST} with 100 processes"]),
        ({"flushes": (9.0, 900.0)}, ["steepest slope by processes"]),
        ({"listeners": (2, 2)}, [f"{LISTENERS} with 100 subscriptions"]),
    ],
)
def test_each_bar_is_missed_by_what_is_beyond_it(given, missed):
    assert [bar.name for bar in scale.bars(rows(**given)) if not bar.holds] == missed


def test_the_plot_has_a_panel_for_each_thing_that_grows(monkeypatch):
    monkeypatch.setattr(scale, "SIZES", dict.fromkeys(scale.SIZES, (10, 100)))
    figure = Figure()
    costs = found([{"page, ms": 1.0}, {"page, ms": 2.0}])
    scale.plot(figure, {"rows": [row for what in scale.SIZES for row in scale.rows_of(what, costs)]})
    assert [axes.get_xlabel() for axes in figure.axes] == list(scale.SIZES)
    assert [list(axes.lines[0].get_ydata()) for axes in figure.axes] == [[1.0, 2.0]] * 4


def test_followers_notice_a_chunk_that_is_another_than_was_acknowledged(database_url):
    with new_database(database_url) as database:
        database.add_streams(2, 3)
        with Followers(database) as followers:
            followers.expect({"scale/0": [database.append("scale/0")]})
            followers.expect({"scale/1": [(database.append("scale/1")[0], 17)]})
            with pytest.raises(BenchmarkError, match="at offset 3, 17 was acknowledged and 3 arrived"):
                followers.check()


def test_followers_that_never_receive_a_chunk_fail_the_run(database_url, monkeypatch):
    with new_database(database_url) as database:
        database.add_streams(2, 3)
        with Followers(database) as followers:
            assert followers.spent(started=False)["cpu_seconds"] < followers.spent()["cpu_seconds"]
            followers.expect({"scale/0": [(3, 3)]})
            monkeypatch.setattr(scale_following, "PATIENCE_SECONDS", 1.0)
            with pytest.raises(BenchmarkError, match="said nothing for 1 s"):
                followers.check()
