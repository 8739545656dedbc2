"""What following costs as announcing processes or subscriptions grow; see `scale_storing` for the shape.

Followers check: they must receive every acknowledged chunk, once and in order.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from benchmarks.scale_database import Database, ServerTime, new_database
from benchmarks.scale_figures import busiest_second
from benchmarks.shared.checking import Entry, check
from benchmarks.shared.processes import Program

ANNOUNCED_STREAMS = 64
START_SECONDS = 0.2
ROUNDS = (5, 25)
"""Of few subscriptions more than of many: what the garbage collector takes now and then is in the means."""
CHUNKS_OF_ROUNDS = 40_000
EVERYTHING = "SELECT pg_notify('pgstreams', '*')"
"""A wake-up without a list: all that is followed is looked at, as by a poll."""
PATIENCE_SECONDS = 120.0
FLUSHES = "flushes a second"
BUSIEST = "flushes in the busiest second"
LISTENERS = "listener sessions"

Costs = dict[str, float]
Measure = Callable[[int], Costs]
Entries = Mapping[str, Sequence[Entry]]


class Followers:
    """A process with a subscription to each stream of a database, and what it must receive."""

    def __init__(self, database: Database) -> None:
        self._program = Program(database.address, "benchmarks.scale_followers")
        self._due = database.chunks()
        self._acknowledged: dict[str, list[Entry]] = {}

    def __enter__(self) -> Self:
        self._program.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._program.__exit__(*raised)

    def expect(self, acknowledged: Entries) -> None:
        """They must receive these chunks, by stream: each's offset and number."""
        for key, entries in acknowledged.items():
            self._acknowledged.setdefault(key, []).extend(entries)
            self._due += len(entries)

    def spent(self, *, started: bool = True) -> dict[str, float]:
        """Wait until all that is due has arrived, and say what they have taken; also before they start."""
        self._program.tell(self._due if started else 0)
        answer: dict[str, float] = self._program.hear(PATIENCE_SECONDS)
        return answer

    def check(self) -> None:
        """End them. Raises `BenchmarkError` unless they received what was due, and in order."""
        self.spent()
        self._program.tell(None)
        check(self._acknowledged, self._program.hear(PATIENCE_SECONDS)["received"])


# Processes that announce ---------------------------------------------------------------------------


@contextlib.contextmanager
def processes(server: str, seconds: float) -> Iterator[Measure]:
    """Flushes and appends of so many processes that append at once, while another one follows all streams."""
    with new_database(server) as database:
        database.add_streams(ANNOUNCED_STREAMS, 1)

        def measure(size: int) -> Costs:
            with contextlib.ExitStack() as running:
                followers = running.enter_context(Followers(database))
                followers.spent()
                announcers = [
                    running.enter_context(_announcer(database, number, size)) for number in range(size)
                ]
                return _announce(followers, announcers, seconds)

        yield measure


def _announcer(database: Database, number: int, size: int) -> Program:
    """One of so many; no two append to the same stream."""
    keys = [f"scale/{stream}" for stream in range(number, ANNOUNCED_STREAMS, size)]
    return Program(database.address, "benchmarks.scale_announcer", json.dumps(keys))


def _announce(followers: Followers, announcers: list[Program], seconds: float) -> Costs:
    for announcer in announcers:
        announcer.hear()
    begin_at = time.monotonic() + START_SECONDS
    for announcer in announcers:
        announcer.tell({"at": begin_at, "seconds": seconds})
    found = [announcer.hear(PATIENCE_SECONDS) for announcer in announcers]
    for one in found:
        followers.expect(one["acknowledged"])
    followers.check()
    appended = sum(len(entries) for one in found for entries in one["acknowledged"].values())
    flushes = [one["flushes"] for one in found]
    return {
        FLUSHES: sum(samples[-1][1] for samples in flushes) / seconds,
        BUSIEST: busiest_second(flushes),
        "append, all together, ms": seconds / appended * 1000,
    }


# Subscriptions -------------------------------------------------------------------------------------


@contextlib.contextmanager
def subscriptions(server: str, seconds: float) -> Iterator[Measure]:
    """What so many subscriptions, each to a stream of its own, cost one process."""
    with new_database(server) as database:

        def measure(size: int) -> Costs:
            database.add_streams(size, 1)
            database.settle()
            with (
                Program(database.address, "benchmarks.scale_writer") as writer,
                Followers(database) as followers,
            ):
                costs = _subscribe(followers)
                keys = [f"scale/{number}" for number in range(size)]
                costs |= _wake(database, followers, writer, keys, rounds_of(size, seconds))
                followers.check()
            return costs

        yield measure


def rounds_of(size: int, seconds: float) -> int:
    """How often so many subscriptions are woken."""
    fewest, most = ROUNDS
    rounds = min(most, max(fewest, CHUNKS_OF_ROUNDS // size))
    return rounds if seconds >= 1 else 2


def _subscribe(followers: Followers) -> Costs:
    before, after = followers.spent(started=False), followers.spent()
    return {
        "subscribing, CPU ms": (after["cpu_seconds"] - before["cpu_seconds"]) * 1000,
        "memory, MiB": (after["memory_bytes"] - before["memory_bytes"]) / 2**20,
    }


def _wake(database: Database, followers: Followers, writer: Program, keys: list[str], rounds: int) -> Costs:
    """Ticks in which one stream has moved and in which each has, and polls."""

    def poll() -> Entries:
        key = random.choice(keys)
        entry = database.append(key)
        database.connection.execute(EVERYTHING)
        return {key: [entry]}

    def write(moving: list[str]) -> Entries:
        writer.tell(moving)
        return {key: [entry] for key, entry in writer.hear(PATIENCE_SECONDS).items()}

    acts: dict[str, Callable[[], Entries]] = {
        "poll": poll,
        "tick, one moved": lambda: write([random.choice(keys)]),
        "tick, all moved": lambda: write(keys),
    }
    costs: Costs = {LISTENERS: len(database.backends("pgstreams-listener"))}
    for name, act in acts.items():
        costs |= _rounds(database, followers, act, rounds, name)
    return costs


def _rounds(
    database: Database, followers: Followers, act: Callable[[], Entries], rounds: int, name: str
) -> Costs:
    """The processor time that the followers' process, and the server for it, take for a round: means."""
    server = ServerTime(database, "pgstreams-reader")
    before = followers.spent()["cpu_seconds"]
    at_server = []
    for _ in range(rounds):
        followers.expect(act())
        after = followers.spent()["cpu_seconds"]
        at_server.append(server.spent_ms())
    costs = {f"{name}, CPU ms": (after - before) / rounds * 1000}
    known = [spent for spent in at_server if spent is not None]
    return costs | ({f"{name}, server ms": statistics.mean(known)} if known else {})
