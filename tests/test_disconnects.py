"""Real servers that stop, whatever their sockets do, and clients that vanish: nothing is left."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from django.contrib.auth.models import User
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from django_pgstreams.models import Stream
from tests.servers import DEADLINE_SECONDS, Socket, headers_of, serving, untroubled

pytestmark = pytest.mark.once

CHUNKS = 20_000
IDLE, REPLAYING = 25, 25
SAYS = {"daphne": {1006, 4500}, "uvicorn": {1012}, "hypercorn": {1012}}
"""The codes that clients see when the server stops: Daphne just hangs up on those that have come lately."""


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
        assert set(codes) <= SAYS[kind]
        # Daphne would wait 10 before it kills, and uvicorn for ever; hypercorn gives sockets 3.
        assert seconds < 10
        if kind == "hypercorn":
            # On Python 3.11 its own connections complain of being cancelled.
            assert "django_pgstreams" not in server.output
        else:
            assert not server.trouble()


def test_clients_that_vanish_in_the_middle_of_a_replay_are_forgotten(stream, headers):
    with serving("uvicorn") as server, untroubled(server):
        visits = [Socket(server.url("a/b"), headers) for _ in range(REPLAYING)]
        for visit in visits:
            visit.frames("chunks")
        assert server.look()["followers"] == REPLAYING
        for visit in visits:
            visit.vanish()
