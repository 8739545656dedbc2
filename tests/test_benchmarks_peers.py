"""Every peer can be measured; what is lost, doubled or swapped is noticed; figures are of what arrived."""

from __future__ import annotations

import argparse
import dataclasses
import shutil

import pytest
from matplotlib.figure import Figure

from benchmarks import peers
from benchmarks.peers_figures import Point, bars, point, rows
from benchmarks.peers_programs.catalogue import PEERS, Peer
from benchmarks.peers_programs.received import Received
from benchmarks.peers_programs.work import STREAMS, Work, payload
from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.results import Result, median_result
from benchmarks.shared.running import Run

pytestmark = pytest.mark.once


@pytest.fixture
def short_run(database_url):
    return Run("peers", argparse.Namespace(seconds=0.3), database_url)


def peer_named(name):
    [found] = [peer for peer in PEERS if peer.name == name]
    return found


# Everybody can be measured ---------------------------------------------------------------------------

# One of each module.
MEASURED = [
    "django-pgstreams StreamWriter",
    "django-pgstreams ORM",
    "Redis Streams, AOF always",
    "dbos streams",
    "rakaia-streams Django store",
    "channels_postgres groups",
    "django-pgstreams StreamWriter, 10 in flight",
    "Redis Streams, AOF always, 10 in flight",
]


@pytest.mark.parametrize("name", MEASURED)
def test_a_peer_writes_and_reads(name, database_url, short_run):
    peer = peer_named(name)
    if peer.redis is not None and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    found = peers.measure_point(short_run, database_url, peer, 2)
    assert (found.peer, found.writers, found.lost, found.disordered) == (peer, 2, 0, 0)
    assert 0 < found.per_second <= found.acknowledged / 0.3
    assert 0 < found.latency_ms["p50"] <= found.latency_ms["max"]


def test_all_modules_are_measured_here():
    assert {peer_named(name).module for name in MEASURED} == {peer.module for peer in PEERS}


def test_a_peer_that_is_not_installed_fails_the_run(monkeypatch, short_run):
    monkeypatch.setattr(peers, "PACKAGES", ("django-pgstreams", "no-such-peer"))
    with pytest.raises(BenchmarkError, match="no-such-peer is missing"):
        peers.measure(short_run)


def test_further_rounds_measure_anew_only_who_is_compared_and_as_it_was_best(monkeypatch, short_run):
    measured = []

    def measure(_run, _server, peer, writers):
        measured.append((peer.name, writers))
        return a_point(peer, writers=writers, per_second=writers if writers < 64 else 2)

    monkeypatch.setattr(peers, "measure_point", measure)
    monkeypatch.setattr(peers, "redis_version", lambda: "7")
    first, second = peers.measure(short_run), peers.measure(short_run)
    everybody = [(peer.name, writers) for peer in PEERS for writers in (1, 16, 64)]
    compared = [(peer.name, 16) for peer in PEERS if peer.durable]
    assert measured == everybody + compared
    assert first.rows == second.rows


def test_a_further_round_counts_what_it_measured_even_if_slower(monkeypatch, short_run):
    points = [a_point(OURS, writers=1, per_second=50.0, p50=1.0), a_point(OURS, writers=64, per_second=90.0)]
    monkeypatch.setattr(peers, "measure_point", lambda *_: a_point(OURS, writers=64, per_second=40.0))
    [row] = rows({OURS.name: peers.again(short_run, "", points)})
    assert (row["writers"], row["writes/s"], row["shortest p50 ms"]) == (64, 40, 1)


# Work, and what arrives of it ------------------------------------------------------------------------


@pytest.mark.parametrize(("writers", "processes"), [(1, 1), (16, 1), (16, 2), (64, 3)])
def test_each_stream_has_one_writer(writers, processes):
    shares = [Work(range(process, writers, processes), writers) for process in range(processes)]
    owned = [stream for work in shares for writer in work.mine for stream in work.streams(writer)]
    assert sorted(owned) == list(range(STREAMS))


def test_a_chunk_counts_once_the_next_is_asked_for(capsys):
    work = Work(range(1), 1)
    chunks = work.first(0)
    for _ in range(3):
        next(chunks)
    work.done()
    assert '"acknowledged":{"0":1,"1":1,"2":0,' in capsys.readouterr().out


def test_several_in_flight_are_consecutive_chunks_of_a_stream(monkeypatch):
    work = Work(range(1), 1, in_flight=3)
    monkeypatch.setattr(work, "_deadline", float("inf"))
    turns = work.turns(0)
    rounds = [next(turns) for _ in range(STREAMS + 1)]
    assert [
        (stream, [chunk["number"] for chunk in chunks]) for stream, chunks in (rounds[0], rounds[-1])
    ] == [
        (0, [0, 1, 2]),
        (0, [3, 4, 5]),
    ]


def received(*numbers):
    """What a reader has of stream 0 to which these chunks came."""
    found = Received()
    for number in numbers:
        found.take(payload(0, number))
    return found.report(ended=float("inf"))


def test_received_chunks_are_counted_and_timed():
    found = received(0, 1, 2)
    assert (found["counts"][0], found["in_time"], found["disordered"], found["first_again"]) == (3, 2, 0, 0)
    assert found["latency_ms"]["p50"] >= 0


@pytest.mark.parametrize(
    ("numbers", "count", "disordered", "first_again"),
    [
        ([0, 1, 3], 3, 0, 0),
        ([0, 1, 1, 2], 3, 1, 0),
        ([0, 2, 1, 3], 3, 1, 0),
        ([0, 0, 1], 2, 0, 1),
    ],
    ids=["lost", "doubled", "swapped", "first doubled"],
)
def test_what_went_wrong_is_noticed(numbers, count, disordered, first_again):
    found = received(*numbers)
    assert (found["counts"][0], found["disordered"], found["first_again"]) == (count, disordered, first_again)


def test_what_comes_after_the_end_is_late():
    found = Received()
    for number in range(3):
        found.take(payload(0, number))
    assert found.report(ended=0)["in_time"] == 0


# Figures ---------------------------------------------------------------------------------------------

OURS = peer_named("django-pgstreams StreamWriter")
REDIS = peer_named("Redis Streams, AOF always")
GROUPS = peer_named("channels_redis groups")


def written(*counts):
    halves = [
        {str(stream): n for stream, n in enumerate(counts) if stream % 2 == process} for process in (0, 1)
    ]
    times = [(10.0, 12.0), (10.5, 14.0)]
    return [
        {"acknowledged": half, "started": started, "ended": ended}
        for half, (started, ended) in zip(halves, times, strict=True)
    ]


def reported(*counts, **more):
    return {
        "counts": list(counts),
        "in_time": sum(counts) - len(counts),
        "disordered": 0,
        "first_again": 0,
        "latency_ms": {"p50": 1.0, "p95": 2.0, "p99": 3.0, "max": 4.0},
        **more,
    }


def test_writes_are_counted_from_the_first_start_to_the_last_end():
    found = point(OURS, 2, written(5, 9), reported(5, 9, in_time=10))
    assert (found.per_second, found.acknowledged, found.lost) == (2.5, 12, 0)


def test_what_a_peer_loses_is_counted():
    found = point(GROUPS, 2, written(5, 9), reported(5, 3))
    assert (found.lost, found.acknowledged) == (6, 12)


@pytest.mark.parametrize(
    ("peer", "report"),
    [
        (OURS, reported(5, 8)),
        (OURS, reported(5, 9, disordered=1)),
        (OURS, reported(5, 9, first_again=1)),
        (OURS, reported(5, 10)),
        (GROUPS, reported(5, 10)),
    ],
    ids=["lost", "disordered", "first doubled", "never written", "never written, a peer"],
)
def test_a_chunk_that_went_wrong_is_no_figure(peer, report):
    with pytest.raises(BenchmarkError):
        point(peer, 2, written(5, 9), report)


def a_point(peer: Peer, *, writers=1, per_second=1000.0, p50=2.0, lost=0):
    latency = {"p50": p50, "p95": 2 * p50, "p99": 3 * p50, "max": 4 * p50}
    return Point(peer, writers, per_second, 1000, lost, 0, latency)


SURVEY = {
    OURS.name: [a_point(OURS, per_second=300, p50=3.0), a_point(OURS, writers=64, per_second=4000, p50=9.0)],
    REDIS.name: [a_point(REDIS, per_second=1000, p50=0.5), a_point(REDIS, writers=64, per_second=800)],
    GROUPS.name: [a_point(GROUPS, per_second=8000, p50=5.0, lost=250)],
}


def test_the_table_has_each_peer_at_its_best():
    found = rows(SURVEY)
    assert [(row["peer"], row["writers"], row["writes/s"], row["ours / its"]) for row in found] == [
        (OURS.name, 64, 4000, 1.0),
        (REDIS.name, 1, 1000, 4.0),
        (GROUPS.name, 1, 8000, 0.5),
    ]
    assert [row["lost %"] for row in found] == [0, 0, 25]
    assert [row["shortest p50 ms"] for row in found] == [3, 0.5, 5]


def test_rounds_whose_order_of_speed_differs_have_the_medians_of_each_peer():
    rounds = [
        {
            peer.name: [a_point(peer, per_second=speed)]
            for peer, speed in zip((OURS, REDIS), speeds, strict=True)
        }
        for speeds in ((100, 200), (300, 200), (500, 600))
    ]
    found = median_result([Result(rows(survey), bars(survey)) for survey in rounds])
    assert [(row["peer"], row["writes/s"]) for row in found.rows] == [(OURS.name, 300), (REDIS.name, 200)]


def test_the_table_says_where_a_peer_is_ahead_by_how_much_and_why():
    ours, redis, groups = (row["where it is ahead"] for row in rows(SURVEY))
    assert groups == f"2.00 times the writes: {GROUPS.strength}"
    assert ours == ""
    assert redis == f"shortest p50 0.5 ms to ours 3.0 ms: {REDIS.strength}"


def test_ours_must_be_ahead_of_who_stores_durably_and_announces():
    [bar] = bars(SURVEY)
    assert REDIS.name in bar.name
    assert (bar.value, bar.holds) == (4.0, True)
    # What has as many appends in flight is compared.
    several = peer_named("django-pgstreams StreamWriter, 10 in flight")
    assert bars(SURVEY | {several.name: [a_point(several, per_second=9000)]}) == [bar]
    slower = SURVEY | {OURS.name: [a_point(OURS, per_second=999)]}
    [bar] = bars(slower)
    assert not bar.holds


def test_the_bars_name_all_durable_peers():
    survey = {peer.name: [a_point(peer)] for peer in PEERS}
    assert [bar.name.removeprefix("writes/s, ours / ") for bar in bars(survey)] == [
        "Redis Streams, AOF always",
        "dbos streams",
        "rakaia-streams Django store",
        "channels_postgres groups",
        "Redis Streams, AOF always, 10 in flight",
    ]


def test_the_plot_shows_all_peers():
    figure = Figure()
    report = {"rows": rows(SURVEY), "data": {"peers": [dataclasses.asdict(peer) for peer in PEERS]}}
    peers.plot(figure, report)
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [GROUPS.name, OURS.name, REDIS.name]
    assert axes.texts[0].get_text() == "8,000, p50 5 ms, 25 % lost"
