"""Everything through a real PgBouncer in transaction mode, and `LISTEN` beside it.

What is heard and what is polled are told apart by the intervals: the one that a test does not wait for is
`NEVER_SECONDS` long.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import statistics
import threading
import time

import pytest

from django_pgstreams import health, hub, listener
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.concurrency import start
from tests.following import Process, in_thread, query, sessions, store, terminate, until, writer
from tests.pgbouncer import pooler
from tests.relay_process import RelayProcess
from tests.waiting import DEADLINE_SECONDS, wait_until
from tests.writing import is_stored, stored

pytestmark = [pytest.mark.usefixtures("alive"), pytest.mark.once]

NEVER_SECONDS = 300.0
PASSED_ON_SECONDS = 0.2
"""What the median wake-up takes at the most, on a machine that has more to do."""

APPEND_AND_TELL_WHEN = """
import json, sys, time
import django
django.setup()
from django_pgstreams.models import Stream
stream = Stream.objects.get(pk=sys.argv[1])
committed_at = []
for number in range(int(sys.argv[2])):
    stream.append(number)
    committed_at.append(time.monotonic())
    time.sleep(0.05)
print(json.dumps(committed_at), flush=True)
"""


@pytest.fixture
def pgbouncer(live):
    """A pooler, not started; streams are written to and read from the alias that leads through it."""
    yield from pooler()


@pytest.fixture(autouse=True)
def _pooled(settings, pgbouncer):
    class ThroughThePooler:
        def db_for_write(self, model, **hints):
            return pgbouncer.alias

        db_for_read = db_for_write

    settings.DATABASE_ROUTERS = [ThroughThePooler()]
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    yield
    settings.DATABASE_ROUTERS = []  # what cleans up goes the direct way


@pytest.fixture
def impatient(monkeypatch):
    """A process that is deaf tries again soon."""
    monkeypatch.setattr(listener, "_MAX_DEAF_BACKOFF_SECONDS", 0.5)


@contextlib.asynccontextmanager
async def following(stream, using):
    """What a subscriber has got so far, with the time of each; it has reached the tail."""
    arrivals = []

    async def follow():
        async for chunk in subscribe(stream):
            arrivals.append((chunk.offset, time.monotonic()))

    task = asyncio.create_task(follow())
    await until(lambda: health.get(using).subscribers == 1, "somebody follows")
    yield arrivals
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def arrives(arrivals, offset):
    """Seconds until a subscriber has got the chunk."""
    began = time.monotonic()
    await until(lambda: arrivals and arrivals[-1][0] >= offset, "the chunk arrives")
    return arrivals[-1][1] - began


# Listening -----------------------------------------------------------------------------------------


async def test_a_process_that_hears_nothing_says_so_once_and_polls_fast(pgbouncer, impatient, caplog):
    pgbouncer.start()
    stream = await in_thread(Stream.objects.create)(key="deaf")
    async with following(stream, pgbouncer.alias) as arrivals:
        await until(lambda: health.get(pgbouncer.alias).listening == "deaf", "it notices")
        seconds = []
        for offset in range(10):
            await in_thread(store)(stream, 1)
            seconds.append(await arrives(arrivals, offset))
        heard = listener.get(pgbouncer.alias)
        connects = heard.connects
        await until(lambda: heard.connects > connects + 1, "it tries again and again")
    assert statistics.median(seconds) < 1
    [error] = errors(caplog)
    assert 'PGSTREAMS["LISTEN_DATABASE"]' in error
    assert health.get(pgbouncer.alias).found_only_by_poll > 0


async def test_a_process_that_hears_nothing_leaves_the_pooler_no_session_that_listens(pgbouncer, caplog):
    pgbouncer.start(size=1)
    stream = await in_thread(Stream.objects.create)(key="left")
    async with following(stream, pgbouncer.alias):
        await until(lambda: errors(caplog), "it notices")
        assert await in_thread(pgbouncer.query)("SELECT * FROM pg_listening_channels()") == []


async def test_a_process_that_hears_again_polls_slowly_again(pgbouncer, impatient, caplog):
    caplog.set_level(logging.INFO, logger="django_pgstreams")
    pgbouncer.start()
    stream = await in_thread(Stream.objects.create)(key="again")
    async with following(stream, pgbouncer.alias) as arrivals:
        await until(lambda: health.get(pgbouncer.alias).listening == "deaf", "it notices")
        await in_thread(pgbouncer.stop)()
        await in_thread(pgbouncer.start)(mode="session")
        await until(lambda: health.get(pgbouncer.alias).listening == "yes", "it listens")
        polls = hub.get(pgbouncer.alias).polls
        began = time.monotonic()
        with writer("appends", stream, 0.05, DATABASE_URL=pgbouncer.url) as appending:
            appending.tell("go")
            await arrives(arrivals, 20)
            appending.tell("stop")
        assert hub.get(pgbouncer.alias).polls <= polls + 1 < polls + (time.monotonic() - began) / 0.25
    assert len(errors(caplog)) == 1


async def test_with_a_direct_way_for_listening_wake_ups_arrive_at_once(pgbouncer, settings, caplog):
    settings.PGSTREAMS |= {"LISTEN_DATABASE": "default", "FAST_POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    pgbouncer.start()
    stream = await in_thread(Stream.objects.create)(key="direct")
    async with following(stream, pgbouncer.alias) as arrivals:
        await until(lambda: health.get(pgbouncer.alias).listening == "yes", "it listens")
        appending = Process("-c", APPEND_AND_TELL_WHEN, str(stream.pk), "40", DATABASE_URL=pgbouncer.url)
        committed_at = await in_thread(appending.read)()
        await in_thread(appending.close)()
        await arrives(arrivals, 39)
        assert len(await in_thread(sessions)("listener")) == 1
        assert not hub.get(pgbouncer.alias).polls
    seconds = [at - committed_at[offset] for offset, at in arrivals]
    assert statistics.median(seconds) < PASSED_ON_SECONDS
    assert errors(caplog) == []


# Everything else -----------------------------------------------------------------------------------


async def test_a_long_stream_is_read_through_the_pooler_in_every_way(pgbouncer):
    pgbouncer.start()
    stream = await in_thread(Stream.objects.create)(key="long")
    await in_thread(store)(stream, 100_000)
    await in_thread(stream.close)()
    assert [chunk.offset async for chunk in subscribe(stream)] == list(range(100_000))
    assert await in_thread(lambda: [chunk.offset for chunk in stream.read()])() == list(range(100_000))


def test_a_writer_stores_each_append_once_though_its_pooler_and_its_sessions_are_killed(pgbouncer):
    pgbouncer.start()
    stream = Stream.objects.create(key="written")
    stopping = threading.Event()

    def append(name):
        writer, offsets = StreamWriter(stream), {}
        for number in itertools.count():
            value = f"{name}/{number}"
            offsets[value] = writer.append(value)
            if stopping.is_set():
                break
        return offsets

    def write_on():
        [(tail,)] = query("SELECT next_offset FROM pgstreams_stream WHERE id = %s", stream.pk)
        wait_until(lambda: is_stored(stream, tail + 50), "appends are stored")

    appending = [start(append, name) for name in range(4)]
    for _ in range(3):
        write_on()
        wait_until(lambda: terminate("writer"), "a session of the pooler's is the writer's")
        write_on()
        pgbouncer.stop()
        pgbouncer.start()
    write_on()
    stopping.set()
    offsets = {}
    for future in appending:
        offsets |= future.result(DEADLINE_SECONDS)
    assert stored(stream) == sorted(offsets, key=offsets.get)


def test_a_relay_announces_through_the_pooler(pgbouncer, ear):
    pgbouncer.start()
    stream = Stream.objects.create(key="relayed")
    relay = RelayProcess(DATABASE_URL=pgbouncer.url)
    try:
        wait_until(lambda: ear.heard("*"), "the relay announces everything at its start")
        store(stream, 3)
        wait_until(lambda: ear.heard(f"{stream.pk}:3"), "it announces what raw SQL wrote")
    finally:
        relay.close()
