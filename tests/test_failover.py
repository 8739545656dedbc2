"""A primary dies and its standby takes over: real servers, a real replication, an address that moves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.shared.cluster import Cluster, cluster
from benchmarks.shared.processes import Program
from django_pgstreams import receivers
from tests.failing_over import (
    ALIAS,
    Batching,
    Following,
    SqlWriter,
    Watching,
    Writing,
    alias_of,
    make_stream,
    stored,
    write_by_append,
    write_by_append_many,
)
from tests.servers import ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.once

RECOVERY_SECONDS = 10.0
"""Within which all go on once the address has moved; a quiet machine needs a second or two."""

PATIENT = {"POLL_INTERVAL_SECONDS": 300.0, "QUERY_TIMEOUT_SECONDS": 3.0, "HEALTH_CHECK_SECONDS": 1.0}
"""Whoever goes on within the recovery time was woken: no poll is due."""


class Place:
    """A cluster, and its database."""

    def __init__(self, servers: Cluster, address: str) -> None:
        self.servers = servers
        self.address = address
        self.conninfo = address


@pytest.fixture(scope="module")
def synchronous(django_db_blocker) -> Iterator[Place]:
    with django_db_blocker.unblock(), cluster(synchronous=True) as made, alias_of(made) as address:
        yield Place(made, address)


@pytest.fixture
def place(synchronous, settings, caplog) -> Iterator[Place]:
    """The cluster with its standby, and patient settings; what is logged meanwhile is expected."""
    caplog.set_level(logging.CRITICAL, logger="django_pgstreams")
    if synchronous.servers.standby is None:
        synchronous.servers.rebuild_standby()
    settings.PGSTREAMS = PATIENT
    receivers.release()
    yield synchronous
    receivers.release()


def serve(stack: ExitStack, place: Place) -> ServerProcess:
    """A web server on the cluster, whose websockets are open to everybody."""
    own: dict[str, Any] = PATIENT | {"PERMISSION": "tests.failing_over.everybody"}
    server = ServerProcess("uvicorn", place, {"PGSTREAMS": own})
    stack.callback(server.close)
    server.wait_ready()
    return server


def relay(stack: ExitStack, place: Place) -> None:
    """A relay on the cluster."""
    program = stack.enter_context(Program(place.address, "django", "pgstreams", "relay"))
    program.wait_for_error_line("watches")


def test_writers_and_readers_carry_on_and_nothing_acknowledged_is_lost(place):
    streams = {name: make_stream(f"carry-on/{name}") for name in ("append", "many", "batches", "sql")}
    with ExitStack() as stack:
        server = serve(stack, place)
        relay(stack, place)
        sql_writer = SqlWriter(place.address)
        stack.callback(sql_writer.close)
        following = [Following(stream) for stream in streams.values()]
        watching = [Watching(server, stream) for stream in streams.values()]
        writers = [
            Writing(streams["append"], write_by_append),
            Writing(streams["many"], write_by_append_many),
            Writing(streams["sql"], sql_writer),
        ]
        batching = Batching(streams["batches"])
        wait_until(lambda: all(len(writer.ledger) > 30 for writer in writers), "all write")
        wait_until(lambda: batching.acknowledged > 300, "the batches are stored")
        wait_until(lambda: all(len(reader.values) > 20 for reader in (*following, *watching)), "all read")

        place.servers.fail_over()
        moved_at = time.monotonic()
        before = [len(writer.ledger) for writer in writers]
        acknowledged = batching.acknowledged
        tails = [len(reader.values) for reader in (*following, *watching)]
        wait_until(
            lambda: all(len(w.ledger) > n + 30 for w, n in zip(writers, before, strict=True)), "all write on"
        )
        wait_until(lambda: batching.acknowledged > acknowledged + 300, "batches are stored again")
        wait_until(
            lambda: all(len(r.values) > n + 20 for r, n in zip((*following, *watching), tails, strict=True)),
            "all read on",
        )
        recovery_seconds = time.monotonic() - moved_at
        for writer in (*writers, batching):
            writer.end()
        values = {name: stored(stream) for name, stream in streams.items()}
        expected = list(values.values())
        wait_until(lambda: [reader.values for reader in following] == expected, "readers have everything")
        wait_until(lambda: [reader.values for reader in watching] == expected, "sockets have everything")
        for reader in (*following, *watching):
            reader.end()
    logging.getLogger(__name__).info("All went on %.2f s after the address had moved", recovery_seconds)

    assert recovery_seconds < RECOVERY_SECONDS
    for writer in writers:
        assert writer.ledger.failures
        written = stored(writer.ledger.stream)
        assert all(written[offset] == value for offset, value in writer.ledger.values.items())
    for name in ("append", "many"):  # whoever expects an offset stores nothing twice
        assert len(set(values[name])) == len(values[name])
    # No outage was long and nobody has touched the writer's row: every future is right.
    offsets = [future.result() for future in batching.futures]
    assert [values["batches"][offset] for offset in offsets] == list(range(len(offsets)))
    assert len(values["batches"]) == len(offsets)
    assert all(reader.visits == 1 and not reader.seen("reset") for reader in watching)
