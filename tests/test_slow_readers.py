"""Real clients that stop reading, on real servers: each costs its window, and is not kept.

20,000 chunks of 10 KB would take minutes here; 5,000, more than the bound on memory, show the same.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.db import connections

from django_pgstreams.models import Stream
from tests.raw_client import RawClient
from tests.servers import DEADLINE_SECONDS, Socket, headers_of, serving, untroubled
from tests.waiting import wait_until

pytestmark = pytest.mark.once

CHUNK = "x" * 10_000
CHUNKS = 5_000
MOST_GROWTH_BYTES = 30_000_000
BOUND = 1024 * 1024

GIVEN = {"MAX_UNACKED_BYTES": BOUND, "STALL_SECONDS": 2.0, "HEARTBEAT_SECONDS": 1.0}


@pytest.fixture(params=["daphne", "uvicorn"])
def server(request, committed):
    with serving(request.param, PGSTREAMS=GIVEN) as server, untroubled(server):
        yield server


@pytest.fixture
def headers(committed):
    return headers_of(User.objects.create_user("owner"))


@pytest.fixture
def stream(headers):
    return Stream.objects.create(key="a/b", owner=User.objects.get())


def resident_bytes(server):
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def follow(visit, position, end):
    """Read up to a position; every chunk is there, once and in order."""
    while position < end:
        frame = visit.frame()
        if frame["type"] == "chunks":
            assert frame["offset"] == position
            assert frame["data"] == [CHUNK] * (frame["next"] - position)
            position = frame["next"]
        else:
            assert frame["type"] in ("subscribed", "live"), frame
        yield position


def test_a_client_that_stops_reading_costs_its_window_and_no_more(server, stream, headers):
    def write():
        try:
            for _ in range(CHUNKS // 100):
                stream.append_many([CHUNK] * 100)
        finally:
            connections.close_all()

    with Socket(server.url("a/b"), headers) as healthy, RawClient(server.url("a/b"), headers) as sleeper:
        healthy.frames("live")
        wait_until(lambda: server.look()["followers"] == 2, "both follow")
        before = resident_bytes(server)
        writing = threading.Thread(target=write)
        writing.start()
        most = max(resident_bytes(server) for _ in follow(healthy, 0, CHUNKS))
        writing.join(DEADLINE_SECONDS)
        assert most - before < MOST_GROWTH_BYTES < CHUNKS * len(CHUNK)

        wait_until(lambda: server.look()["followers"] == 1, "the sleeper is given up")
        wait_until(lambda: not sleeper.is_connected, "its connection is freed, though it reads nothing")
        stream.append(CHUNK)
        assert healthy.frame()["offset"] == CHUNKS
        frames, close = sleeper.read_all()

    chunks = [frame for frame in frames if frame["type"] == "chunks"]
    assert sum(len(json.dumps(frame, separators=(",", ":"))) for frame in chunks) <= BOUND
    position = 0
    for frame in chunks:
        assert frame["offset"] == position
        position = frame["next"]
    # Daphne resets the connection, which may cost what was on its way, and the code.
    assert close is None or close.code == 4408
    with Socket(server.url("a/b", offset=position), headers) as again:
        assert list(follow(again, position, CHUNKS + 1))[-1] == CHUNKS + 1


def test_a_client_that_reads_but_acknowledges_nothing_is_told_so(server, stream, headers):
    stream.append_many([CHUNK] * 200)
    with Socket(server.url("a/b"), headers, acknowledges=False) as visit:
        frames = visit.frames("error")
        assert frames[-1]["code"] == "stalled"
        assert visit.close_code() == 4408
    position = frames[-2]["next"]
    with Socket(server.url("a/b", offset=position), headers) as again:
        assert list(follow(again, position, 200))[-1] == 200


def test_a_server_that_waits_until_its_client_reads_is_not_kept(committed, headers, stream):
    """Where the bound is larger than what the kernel buffers, uvicorn's send waits, and its end would too."""
    stream.append_many([CHUNK] * 1000)
    given = GIVEN | {"MAX_UNACKED_BYTES": 100 * BOUND}
    with serving("uvicorn", PGSTREAMS=given) as server, RawClient(server.url("a/b"), headers) as sleeper:
        with untroubled(server):
            wait_until(lambda: server.look()["followers"] == 1, "it is followed")
            before = resident_bytes(server)
            wait_until(lambda: server.look()["followers"] == 0, "the client is given up")
            assert resident_bytes(server) - before < MOST_GROWTH_BYTES
            wait_until(lambda: not sleeper.is_connected, "its connection is freed")
        server.stop()
        assert not server.trouble()
