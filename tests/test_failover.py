"""A primary dies and its standby takes over: real servers, a real replication, an address that moves."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from django.db import InternalError, close_old_connections
from psycopg.conninfo import conninfo_to_dict

from benchmarks.shared.cluster import Cluster, cluster
from benchmarks.shared.processes import PROJECT_ROOT, Program
from django_pgstreams import hub, receivers
from django_pgstreams.exceptions import StreamReset
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.failing_over import (
    Batching,
    Following,
    SqlWriter,
    Watching,
    Writing,
    database_on,
    stored,
    write_by_append,
    write_by_append_many,
)
from tests.servers import ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.once

RECOVERY_SECONDS = 30.0
"""Within which all go on once the address has moved; a quiet machine needs less than one."""

README = PROJECT_ROOT / "README.md"
REFUSALS = {"LISTEN", "UPDATE"}

PATIENT = {"POLL_INTERVAL_SECONDS": 300.0, "QUERY_TIMEOUT_SECONDS": 3.0, "HEALTH_CHECK_SECONDS": 1.0}
"""Whoever goes on within the recovery time was woken: no poll is due."""


def reads() -> int:
    """How often this process's hubs have asked for chunks."""
    return sum(known.queries for known in hub._all())


class Place:
    """A cluster, and its database."""

    def __init__(self, servers: Cluster, alias: str, address: str) -> None:
        self.servers = servers
        self.alias = alias
        self.address = address
        self.conninfo = address
        self.database = conninfo_to_dict(address)["dbname"]

    def make_stream(self, key: str) -> Stream:
        """A new stream in the database."""
        return Stream.objects.using(self.alias).create(key=key)


@pytest.fixture(scope="module")
def replicated(django_db_blocker) -> Iterator[Place]:
    # Processes are killed here, not machines, so what was written is kept all the same.
    quick = cluster(synchronous=True, settings={"fsync": "off"})
    with django_db_blocker.unblock(), quick as made, database_on(made) as (alias, address):
        yield Place(made, alias, address)


@pytest.fixture
def place(replicated, settings, caplog) -> Iterator[Place]:
    """The cluster with its synchronous standby, and patient settings; what is logged is expected."""
    caplog.set_level(logging.CRITICAL, logger="django_pgstreams")
    if replicated.servers.standby is None:
        replicated.servers.rebuild_standby()
    replicated.servers.set_synchronous(True)
    settings.PGSTREAMS = PATIENT
    receivers.release()
    close_old_connections()  # those to a server which is gone
    yield replicated
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
    streams = {name: place.make_stream(f"carry-on/{name}") for name in ("append", "many", "batches", "sql")}
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


def test_a_standby_is_waited_for_and_not_believed(place):
    """The address leads to it before its promotion, and it lags behind what has been read."""
    servers = place.servers
    streams = [place.make_stream("early/append"), place.make_stream("early/batches")]
    servers.wait_until_in_sync()
    with psycopg.connect(servers.standby.address, autocommit=True) as own:
        own.execute("SELECT pg_wal_replay_pause()")
        paused = "SELECT pg_get_wal_replay_pause_state()"
        wait_until(lambda: own.execute(paused).fetchone() == ("paused",), "the standby stands still")
        writing, batching = Writing(streams[0], write_by_append), Batching(streams[1])
        readers = [Following(stream) for stream in streams]
        wait_until(lambda: all(len(reader.values) > 20 for reader in readers), "all is read")
        servers.proxy.move(servers.standby.socket)
        servers.proxy.reset()
        refused = re.compile(r"cannot execute (\w+)").findall
        wait_until(lambda: set(refused(servers.standby.log)) >= REFUSALS, "it refuses")
        queries = reads()
        wait_until(lambda: reads() > queries + 3, "it is read from, in vain")
    tails = [len(reader.values) for reader in readers]
    servers.promote()
    for reader, tail in zip(readers, tails, strict=True):
        wait_until(lambda reader=reader, tail=tail: len(reader.values) > tail + 20, "it is read on")
    for part in (writing, batching, *readers):
        part.end()
    assert any(isinstance(error, InternalError) for error in writing.ledger.failures)
    for stream, reader in zip(streams, readers, strict=True):
        values = stored(stream)
        assert values == list(range(len(values)))
        assert reader.values == values[: len(reader.values)]
    assert [future.result() for future in batching.futures] == list(range(len(batching.futures)))


def test_an_old_primary_that_falls_silent_is_left(place):
    """No reset and no end reaches its clients: the host is gone, or the network to it."""
    stream = place.make_stream("silent")
    batching = Batching(stream)
    following = Following(stream)
    wait_until(lambda: len(following.values) > 300, "it is read")
    place.servers.wait_until_in_sync()
    place.servers.proxy.strand()
    place.servers.promote()
    acknowledged, tail = batching.acknowledged, len(following.values)
    wait_until(lambda: batching.acknowledged > acknowledged + 300, "it is stored again")
    wait_until(lambda: len(following.values) > tail + 300, "it is read on")
    batching.end()
    values = stored(stream)
    wait_until(lambda: following.values == values, "all is read")
    following.end()
    assert [future.result() for future in batching.futures] == list(range(len(values)))


# A standby that lacks what was acknowledged ------------------------------------------------------------


@pytest.fixture
def lossy(place) -> Place:
    """The cluster, whose standby may lack what was acknowledged."""
    place.servers.set_synchronous(False)
    return place


def append(stream: Stream, *values: Any) -> None:
    """Append to a stream whose counter this instance may not know."""
    close_old_connections()
    stream.append_many(values)


def values_of(name: str, first: int, last: int) -> list[str]:
    return [f"{name} {offset}" for offset in range(first, last)]


@contextlib.contextmanager
def lost(place: Place) -> Iterator[None]:
    """What is stored in the block is lost: the standby, which takes over at its end, is not there."""
    servers = place.servers
    servers.wait_until_in_sync()
    servers.standby.stop()
    yield
    servers.primary.kill()
    servers.standby.start()
    servers.promote()


def test_chunks_that_were_lost_are_a_reset_never_a_silent_hole(lossy):
    """Whatever became of the offsets: not taken yet, taken up to the reader's position, or beyond it."""
    old, lost_values = values_of("old", 0, 5), values_of("lost", 5, 10)
    new = {name: values_of("new", 5, 5 + count) for name, count in (("short", 0), ("same", 5), ("long", 9))}
    streams = {name: lossy.make_stream(f"lost/{name}") for name in new}
    with ExitStack() as stack:
        server = serve(stack, lossy)
        for stream in streams.values():
            append(stream, *old)
        following = {name: Following(stream) for name, stream in streams.items()}
        watching = {name: Watching(server, stream) for name, stream in streams.items()}
        with lost(lossy):
            for stream in streams.values():
                append(stream, *lost_values)
            for reader in (*following.values(), *watching.values()):
                wait_until(lambda reader=reader: reader.values == old + lost_values, "all is read")
            lossy.servers.proxy.hold()  # nobody looks before the offsets are taken again
        with psycopg.connect(lossy.servers.primary.address, dbname=lossy.database, autocommit=True) as own:
            for name, values in new.items():
                for value in values:
                    statement = "SELECT pgstreams_append(%s, convert_to(to_json(%s::text)::text, 'UTF8'))"
                    own.execute(statement, [streams[name].key, value])
        lossy.servers.proxy.come_up()
        for name, reader in following.items():
            with pytest.raises(StreamReset, match=f"lost/{name}"):
                reader.done.result(60)
            assert reader.values == old + lost_values
        for name, reader in watching.items():
            wait_until(lambda reader=reader, name=name: reader.values == old + new[name], "it is read anew")
            assert [frame["epoch"] for frame in reader.seen("reset")] == [streams[name].epoch]
            reader.end()


def test_with_new_epochs_whoever_comes_back_later_is_told_too(lossy):
    """The statement that README has for it, given before the address moves."""
    stream = lossy.make_stream("later")
    epoch = stream.epoch
    append(stream, *values_of("old", 0, 5))
    with lost(lossy):
        append(stream, *values_of("lost", 5, 10))
    with psycopg.connect(lossy.servers.primary.address, dbname=lossy.database, autocommit=True) as own:
        own.execute(re.search(r"^UPDATE pgstreams_stream SET epoch.*;$", README.read_text(), re.MULTILINE)[0])
    append(stream, *values_of("new", 5, 15))
    with pytest.raises(StreamReset) as reset:
        Following(stream, 10, epoch).done.result(60)
    stream.refresh_from_db()
    assert reset.value.epoch == stream.epoch != epoch


def test_who_has_read_nothing_that_was_lost_goes_on(lossy):
    stream = lossy.make_stream("kept")
    append(stream, *values_of("old", 0, 5))
    following = Following(stream)
    wait_until(lambda: len(following.values) == 5, "it is read")
    with lost(lossy):
        pass
    append(stream, *values_of("new", 5, 10))
    expected = values_of("old", 0, 5) + values_of("new", 5, 10)
    wait_until(lambda: following.values == expected, "it is read on")
    following.end()


def test_a_writer_whose_last_batches_were_lost_goes_on_behind_what_is_left(lossy):
    stream = lossy.make_stream("writer")
    with StreamWriter(stream) as writer:
        assert [writer.append(f"old {n}") for n in range(3)] == [0, 1, 2]
        with lost(lossy):
            assert [writer.append(f"lost {n}") for n in range(3)] == [3, 4, 5]
        assert [writer.append(f"new {n}") for n in range(3)] == [3, 4, 5]
    assert stored(stream) == ["old 0", "old 1", "old 2", "new 0", "new 1", "new 2"]
