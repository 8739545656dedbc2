"""Real servers that stop, whatever their sockets do, and clients that vanish: nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time

import pytest
from django.contrib.auth.models import User
from django.db import connections
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from django_pgstreams.models import Stream
from tests.following import connect as connect_to_database
from tests.following import query
from tests.raw_client import RawClient
from tests.served import HOOK_LOCK
from tests.servers import DEADLINE_SECONDS, headers_of, serving, untroubled
from tests.waiting import wait_until

pytestmark = pytest.mark.once

CHUNKS = 20_000
IDLE, REPLAYING = 25, 25
VANISHING = 3
AHEAD_BYTES = 6 * 1024 * 1024
"""How far the server may be ahead: more than the kernel takes for a client that does not read."""
FRAME_BYTES = 256 * 1024
CHUNK = "x" * 20_000
SAYS = {"daphne": 4500, "uvicorn": 1012}
"""The code that clients see when the server stops, unless it is too busy to say it (1006).

Daphne just hangs up on all when one of them has come lately.
"""
if sys.version_info < (3, 12):
    # From 3.12 on, Hypercorn 0.18 waits until all clients have left before it tells anybody that it stops.
    SAYS["hypercorn"] = 1012


@pytest.fixture
def headers(committed):
    return headers_of(User.objects.create_user("owner"))


@pytest.fixture
def stream(headers):
    stream = Stream.objects.create(key="a/b", owner=User.objects.get())
    for _ in range(CHUNKS // 1000):
        stream.append_many(["x" * 500] * 1000)
    return stream


async def visit(url, headers, ready):
    """Read and acknowledge until the server closes; the code of that."""
    async with connect(
        url,
        additional_headers=headers,
        compression=None,
        proxy=None,
        open_timeout=DEADLINE_SECONDS,
        max_size=None,
        ping_interval=None,
    ) as websocket:
        try:
            while True:
                frame = json.loads(await asyncio.wait_for(websocket.recv(), DEADLINE_SECONDS))
                if frame["type"] in ("chunks", "live"):
                    ready.set()
                if frame["type"] == "chunks":
                    ack = {"type": "ack", "stream": frame["stream"], "offset": frame["next"]}
                    await websocket.send(json.dumps(ack))
        except ConnectionClosed:
            return websocket.close_code


async def ends(server, headers):
    """Stop a server with sockets that are idle or in mid-replay: how long, and the close codes."""
    urls = [server.url("a/b", offset="tail")] * IDLE + [server.url("a/b")] * REPLAYING
    ready = [asyncio.Event() for _ in urls]
    tasks = [asyncio.create_task(visit(url, headers, each)) for url, each in zip(urls, ready, strict=True)]
    for each in ready:
        await asyncio.wait_for(each.wait(), DEADLINE_SECONDS)
    began = time.monotonic()
    await asyncio.to_thread(server.stop)
    return time.monotonic() - began, await asyncio.gather(*tasks)


@pytest.mark.parametrize("kind", SAYS)
def test_a_server_stops_at_once_whatever_its_sockets_do(stream, headers, kind):
    with serving(kind) as server:
        seconds, codes = asyncio.run(ends(server, headers))
        assert set(codes) <= {SAYS[kind], 1006}
        assert SAYS[kind] in codes or kind == "daphne"
        # Daphne would wait 10 before it kills, and uvicorn for ever; hypercorn gives sockets 3.
        assert seconds < 30
        if kind == "hypercorn":
            # On Python 3.11 its own connections complain of being cancelled.
            assert "django_pgstreams" not in server.output
        else:
            assert not server.trouble()


# Clients that vanish --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["daphne", "uvicorn"])
def running(request, test_database, django_db_blocker):
    given = {
        "PERMISSION": "tests.served.patient",
        "MAX_UNACKED_BYTES": AHEAD_BYTES,
        "MAX_FRAME_BYTES": FRAME_BYTES,
    }
    with django_db_blocker.unblock():
        with serving(request.param, PGSTREAMS=given) as server:
            yield server
        connections.close_all()


@pytest.fixture(params=[RawClient.reset, RawClient.close], ids=lambda vanish: vanish.__name__)
def vanish(request):
    return request.param


@pytest.fixture
def server(running, committed):
    with untroubled(running):
        yield running


@pytest.fixture
def short_stream(headers):
    stream = Stream.objects.create(key="a/b", owner=User.objects.get())
    stream.append(CHUNK)
    return stream


@pytest.fixture
def long_stream(short_stream):
    short_stream.append_many([CHUNK] * (AHEAD_BYTES // len(CHUNK) + 50))
    return short_stream


@pytest.fixture
def visitors(headers):
    """A function that makes clients that ask for a URL."""
    with contextlib.ExitStack() as stack:

        def visit(url, **options):
            return [stack.enter_context(RawClient(url, headers, **options)) for _ in range(VANISHING)]

        yield visit


@contextlib.contextmanager
def waiting_at(server, statement):
    """A transaction that has run a statement, and a function that waits until it holds the server up."""
    with connect_to_database() as own:
        own.execute("BEGIN")
        own.execute(statement)
        yield lambda: wait_until(lambda: waits(server), "the server waits for the lock")
        own.execute("ROLLBACK")


def waits(server):
    waiting = "SELECT pid FROM pg_stat_activity WHERE usename = %s AND wait_event_type = 'Lock'"
    return query(waiting, server.role.name)


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("LOCK TABLE django_session IN ACCESS EXCLUSIVE MODE", id="before_accept"),
        pytest.param(f"SELECT pg_advisory_xact_lock({HOOK_LOCK})", id="in_permission"),
        pytest.param("LOCK TABLE pgstreams_chunk IN ACCESS EXCLUSIVE MODE", id="while_a_page_is_read"),
    ],
)
def test_a_client_vanishes_while_the_database_is_waited_for(
    server, short_stream, visitors, statement, vanish
):
    with waiting_at(server, statement) as wait_for_server:
        clients = visitors(server.url("a/b"))
        wait_for_server()
        for client in clients:
            vanish(client)
        nothing = {"followers": 0, "tasks": []}
        wait_until(lambda: nothing.items() <= server.look().items(), "the subscriptions end")


def test_a_client_vanishes_right_after_its_request(server, short_stream, visitors, vanish):
    for client in visitors(server.url("a/b")):
        vanish(client)


def test_a_client_vanishes_that_does_not_read(server, long_stream, visitors, vanish):
    clients = visitors(server.url("a/b"), buffer_bytes=4096)
    for client in clients:
        client.read(FRAME_BYTES)
    assert server.look()["followers"] == VANISHING
    for client in clients:
        vanish(client)


def test_a_client_vanishes_that_acknowledges_nothing(server, long_stream, visitors, vanish):
    clients = visitors(server.url("a/b"))
    for client in clients:
        client.read(AHEAD_BYTES - FRAME_BYTES)
    assert server.look()["followers"] == VANISHING
    for client in clients:
        vanish(client)


def test_a_client_vanishes_while_it_cancels(server, short_stream, visitors, vanish):
    hold = f"SELECT FROM pgstreams_stream WHERE id = {short_stream.pk} FOR UPDATE"
    with waiting_at(server, hold) as wait_for_server:
        clients = visitors(server.url())
        for client in clients:
            client.read(1)
            client.send("cancel", "a/b")
        wait_for_server()
        for client in clients:
            vanish(client)
    server.wait_empty()
    short_stream.refresh_from_db()
    assert short_stream.state == Stream.State.CANCELLED
