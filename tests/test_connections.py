"""What README.md says a process connects with is what it connects with, and what is idle is closed."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import TYPE_CHECKING

import pytest

from django_pgstreams.hub import subscribe
from django_pgstreams.writer import StreamWriter
from tests.concurrency import DEADLINE_SECONDS, run_all, start
from tests.following import connect, sessions, store
from tests.test_readme_tables import names, table
from tests.waiting import wait_until
from tests.writing import held, make_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_pgstreams.models import Stream

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("live")]
READ_POOL_SIZE = 3
EVENT_LOOPS = 2
STREAMS = 10
CHUNKS = 5000
_COUNT = """
    SELECT application_name, count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'pgstreams-%' GROUP BY 1
"""


def documented() -> dict[str, int]:
    """The sessions that README.md allows a process with these settings and so many event loops."""
    limits = {}
    for name, most, *_ in table("| name in `pg_stat_activity` | at most | opened by | closed |"):
        number = READ_POOL_SIZE if "READ_POOL_SIZE" in most else int(re.findall(r"\d+", most)[0])
        limits[names(name)[0]] = number * (EVENT_LOOPS if "event loop" in most else 1)
    return limits


@pytest.fixture
def most(live: None) -> Iterator[dict[str, int]]:
    """The most sessions by application name that there were at a time."""
    found: dict[str, int] = {}
    over = threading.Event()

    def watch() -> None:
        with connect() as own:
            while not over.wait(0.002):
                for name, count in own.execute(_COUNT).fetchall():
                    found[name] = max(count, found.get(name, 0))

    watching = start(watch)
    yield found
    over.set()
    watching.result(DEADLINE_SECONDS)


def follow(stream: Stream) -> int:
    """Read a stream to its end."""
    return sum(1 for _ in subscribe(stream))


def follow_all_async(streams: list[Stream]) -> list[int]:
    """The same for many, in an event loop of their own."""

    async def follow_one(stream: Stream) -> int:
        return len([chunk async for chunk in subscribe(stream)])

    async def follow_each() -> list[int]:
        return await asyncio.gather(*[follow_one(stream) for stream in streams])

    return asyncio.run(follow_each())


def test_a_process_connects_as_documented_and_lets_go_of_what_is_idle(settings, most):
    settings.PGSTREAMS = {"IDLE_SECONDS": 1.0, "READ_POOL_SIZE": READ_POOL_SIZE, "PAGE_CHUNKS": 100}
    streams = make_streams(STREAMS)
    assert most == {}
    for stream in streams:
        store(stream, CHUNKS)
        stream.append("announced")
    assert set(most) <= {"pgstreams-notifier"}
    writers = [StreamWriter(stream) for stream in streams]
    with held(streams[0]):
        parked = writers[0].append_nowait("written")
        wait_until(
            lambda: [writer.append("written") for writer in writers[1:]] and len(sessions("writer")) == 2,
            "one session waits for the stream that is held, the other writes on",
        )
    parked.result(DEADLINE_SECONDS)
    assert "pgstreams-listener" not in most
    assert "pgstreams-reader" not in most
    reading = [start(follow, stream) for stream in streams for _ in range(2)]
    reading_async = start(follow_all_async, streams * 2)
    wait_until(lambda: sessions("listener"), "it listens")
    run_all(*[stream.close for stream in streams])
    read = {future.result(DEADLINE_SECONDS) for future in reading}
    assert min(read | set(reading_async.result(DEADLINE_SECONDS))) >= CHUNKS + 2
    for role in ("notifier", "writer", "reader", "listener"):
        wait_until(lambda role=role: not sessions(role), f"nothing is left of the {role}")

    allowed = documented()
    del allowed["pgstreams-relay"]  # a process of its own
    assert {name: count for name, count in most.items() if count > allowed.get(name, 0)} == {}
    assert set(most) | {"pgstreams-probe"} == set(allowed)  # that one is too brief to be seen each time
    assert {name for name, count in most.items() if count > 1} == {"pgstreams-reader", "pgstreams-writer"}
