from __future__ import annotations

import asyncio
import contextlib
import datetime

import pytest
from django.db import connections

from django_pgstreams import health, hub, notifier
from django_pgstreams.buffer import WakeUp
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.following import connect, in_thread, store, terminate, until
from tests.waiting import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("alive")

NEVER_SECONDS = 300.0
SLOW_SECONDS = 1.0


@contextlib.asynccontextmanager
async def followed(*streams):
    """How many chunks each stream's follower has got."""
    counts = [0] * len(streams)

    async def follow(number):
        async for _ in subscribe(streams[number]):
            counts[number] += 1

    tasks = [asyncio.create_task(follow(number)) for number in range(len(streams))]
    await until(lambda: health.get().subscribers == len(streams), "all follow")
    await until(lambda: health.get().listening == "yes", "it listens")
    yield counts
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_a_process_that_has_done_nothing_is_asked_without_a_connection(live):
    connections.close_all()
    sessions = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND backend_type = 'client backend'"
    )
    with connect() as own:
        wait_until(lambda: own.execute(sessions).fetchone() == (1,), "nobody else is connected")
        state = health.get("default")
        assert own.execute(sessions).fetchone() == (1,)
    assert (state.using, state.listening, state.connected_since) == ("default", "no", None)
    assert (state.subscribers, state.pending_wake_ups) == (0, 0)


async def test_who_follows_and_what_was_heard_and_since_when(settings, elsewhere):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    began = datetime.datetime.now(datetime.UTC)
    streams = [await in_thread(Stream.objects.create)(key=f"health/{number}") for number in range(3)]
    async with followed(*streams) as counts:
        since = health.get().connected_since
        assert began <= since <= datetime.datetime.now(datetime.UTC)
        await in_thread(elsewhere)(streams[1], "stream.append(0)")
        await until(lambda: counts[1] == 1, "it arrives")
        # A poll may have found it first.
        await until(lambda: (health.get().last_wake_up or began) >= since, "its wake-up is heard")
        await in_thread(terminate)("listener")
        await until(lambda: (health.get().connected_since or since) > since, "it listens anew")
    await until(lambda: health.get().subscribers == 0, "nobody follows any more")


async def test_only_what_no_wake_up_told_of_is_found_only_by_the_poll(settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": SLOW_SECONDS}
    told, untold = [await in_thread(Stream.objects.create)(key=key) for key in ("told", "untold")]
    async with followed(told, untold) as counts:
        found = health.get().found_only_by_poll
        for number in range(1, 6):
            await in_thread(told.append)(number)
            await in_thread(store)(untold, 1)
            await until(lambda number=number: counts == [number, number], "both arrive")
        polls = hub.get("default").polls
        await until(lambda: hub.get("default").polls > polls + 1, "it polls again")
        # The first may have been found by the look at everything with which listening begins.
        assert health.get().found_only_by_poll - found in (4, 5)
        before = health.get().last_poll
        await until(lambda: health.get().last_poll > before, "it polls")


def test_wake_ups_that_cannot_be_sent_are_seen(proxy):
    assert health.get(proxy.alias).failed_flushes == 0
    proxy.go_down()
    notifier.announce(proxy.alias, [WakeUp(number, 1) for number in range(5)])
    wait_until(lambda: health.get(proxy.alias).failed_flushes >= 2, "it tries in vain")
    wait_until(lambda: health.get(proxy.alias).pending_wake_ups == 5, "they wait")
    proxy.come_up()
    wait_until(lambda: health.get(proxy.alias).pending_wake_ups == 0, "they are sent")
    assert health.get("default").failed_flushes == 0


def test_what_a_writer_cannot_store_yet_is_counted(live):
    stream = Stream.objects.create(key="health/locked")
    writer = StreamWriter(stream)
    writer.append("connected")
    assert health.get().pending_append_bytes == 0
    with connect() as own, own.transaction():
        own.execute("SELECT FROM pgstreams_stream WHERE id = %s FOR UPDATE", [stream.pk])
        futures = [writer.append_nowait("x" * 1000) for _ in range(100)]
        assert 100_000 < health.get().pending_append_bytes < 200_000
    for future in futures:
        future.result(DEADLINE_SECONDS)
    wait_until(lambda: health.get().pending_append_bytes == 0, "all is stored")
