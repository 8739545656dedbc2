"""The figures of `peers`, from what the writers and the reader of each point said; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers_programs.catalogue import Peer
from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.results import Bar


@dataclass(frozen=True)
class Point:
    """A peer with so many writers."""

    peer: Peer
    writers: int
    per_second: float
    """Chunks acknowledged and arrived, by the time at which writing ended."""
    acknowledged: int
    lost: int
    """Acknowledged, and never arrived."""
    disordered: int
    """Arrived again, or behind a later one."""
    latency_ms: dict[str, float] | None
    """From before the append to the reader; None if nothing arrived."""


Survey = dict[str, list[Point]]
"""The points of each peer, by its name."""


def point(peer: Peer, writers: int, written: Sequence[dict[str, Any]], received: dict[str, Any]) -> Point:
    """The point, from what each writing process and the reader said.

    Raises `BenchmarkError` when this project lost, doubled or swapped a chunk, and when anybody received
    what nobody wrote.
    """
    acknowledged = acknowledged_counts(written)
    counts = received["counts"]
    for stream, (want, have) in enumerate(zip(acknowledged, counts, strict=True)):
        if have > want or (peer.ours and have < want):
            raise BenchmarkError(
                f"{peer.name}, stream {stream}: {have} of {want} acknowledged chunks arrived."
            )
    if peer.ours and (received["disordered"] or received["first_again"]):
        raise BenchmarkError(f"{peer.name}: chunks arrived again, or behind a later one: {received}.")
    seconds = max(one["ended"] for one in written) - min(one["started"] for one in written)
    return Point(
        peer=peer,
        writers=writers,
        per_second=received["in_time"] / seconds,
        acknowledged=sum(acknowledged) - len(acknowledged),
        lost=sum(acknowledged) - sum(counts),
        disordered=received["disordered"],
        latency_ms=received["latency_ms"],
    )


def acknowledged_counts(written: Iterable[dict[str, Any]]) -> list[int]:
    """How many chunks of each stream are acknowledged, the first ones included."""
    counts = {int(stream): count for one in written for stream, count in one["acknowledged"].items()}
    return [counts[stream] for stream in range(len(counts))]


def best(points: Iterable[Point]) -> Point:
    """The point with the most writes per second."""
    return max(points, key=lambda one: one.per_second)


def best_of_ours(survey: Survey, in_flight: int) -> Point:
    """This project's best with so many appends of a writer in flight."""
    everything = (one for points in survey.values() for one in points)
    return best(one for one in everything if one.peer.ours and one.peer.in_flight == in_flight)


def in_contest(peer: Peer) -> bool:
    """Whether this project must be ahead of it: it stores durably, and announces."""
    return peer.durable and peer.announces and not peer.ours


def rows(survey: Survey) -> list[dict[str, Any]]:
    """The table: each peer at its best, always in the same order, as medians are taken by place."""
    return [row(survey, best(points), shortest(points)) for points in survey.values()]


def row(survey: Survey, one: Point, its_shortest: float | None) -> dict[str, Any]:
    """A peer's line of the table."""
    ours = best_of_ours(survey, one.peer.in_flight)
    our_shortest = shortest(survey[ours.peer.name])
    return {
        "peer": one.peer.name,
        "writers": one.writers,
        "writes/s": round(one.per_second),
        "ours / its": ratio(ours, one),
        "p50 ms": one.latency_ms and one.latency_ms["p50"],
        "p99 ms": one.latency_ms and one.latency_ms["p99"],
        "shortest p50 ms": its_shortest,
        "lost %": round(100 * one.lost / max(one.acknowledged, 1), 1),
        "on disk when acknowledged": one.peer.on_disk,
        "stores": one.peer.stores,
        "announces": one.peer.announces,
        "resumes": one.peer.resumes,
        "order": one.peer.order,
        "where it is ahead": "" if one.peer.ours else ahead(ours, our_shortest, one, its_shortest),
    }


def ratio(ours: Point, its: Point) -> float:
    """How many times as many writes ours makes."""
    return round(ours.per_second / max(its.per_second, 1), 3)


def shortest(points: Iterable[Point]) -> float | None:
    """The shortest median latency, of whatever number of writers."""
    return min((one.latency_ms["p50"] for one in points if one.latency_ms), default=None)


def ahead(ours: Point, our_latency: float | None, its: Point, its_latency: float | None) -> str:
    """In what, by how much, and why a peer is ahead of ours; empty if it is not."""
    found = []
    if its.per_second > ours.per_second:
        found.append(f"{its.per_second / ours.per_second:.2f} times the writes")
    if our_latency and its_latency and its_latency < our_latency:
        found.append(f"shortest p50 {its_latency:.1f} ms to ours {our_latency:.1f} ms")
    return f"{' and '.join(found)}: {its.peer.strength}" if found else ""


def bars(survey: Survey) -> list[Bar]:
    """Ours, with as many appends in flight, ahead of each peer that stores durably and announces."""
    contest = [best(points) for points in survey.values() if in_contest(points[0].peer)]
    return [
        Bar(
            f"writes/s, ours / {one.peer.name}",
            ratio(best_of_ours(survey, one.peer.in_flight), one),
            ">=",
            1.0,
        )
        for one in contest
    ]
