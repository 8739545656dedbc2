"""Crowds that come back at once: what they cost the database, and those who were there all the time."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time

import pytest
from django.contrib.auth.models import User
from django.db import connections

from django_pgstreams import conf
from django_pgstreams.models import Stream
from tests.servers import headers_of, serving
from tests.storm import Storm, Visit

pytestmark = pytest.mark.once  # nothing here depends on versions

STREAMS = 20
POSITIONS = (50, 100, 150, 199)
STORED = 200
LIVE_SOCKETS = 5
ALL_LIVE_SECONDS = 120.0  # 10 on a machine that does nothing else
LIVE_LATENCY_SECONDS = 1.0


@pytest.fixture
def owners(committed):
    """Users that are logged in: the headers of each."""
    return {user: headers_of(user) for user in (User.objects.create_user(f"u{n}") for n in range(STREAMS))}


class Watch:
    """In threads: appends to a stream ten times a second, and looks at the server's sessions."""

    def __init__(self, stream, role):
        self.appended = []  # when each chunk was committed
        self.sessions = []  # the application names, at each look
        self._stream, self._role = stream, role
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._every, args=pair) for pair in self._tasks()]

    def _tasks(self):
        def append():
            self._stream.append(len(self.appended))
            self.appended.append(time.monotonic())

        return (append, 0.1), (lambda: self.sessions.append(self._role.sessions()), 0.05)

    def _every(self, act, seconds):
        with contextlib.closing(connections["default"]):
            while not self._over.wait(seconds):
                act()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised):
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize(("kind", "sockets"), [("daphne", 2000), ("uvicorn", 400)])
def test_a_crowd_that_comes_back_at_once_shares_its_look_ups_and_reads(owners, kind, sockets):
    streams = [Stream.objects.create(key=f"storm/{n}", owner=user) for n, user in enumerate(owners)]
    for stream in streams:
        stream.append_many([{"number": number} for number in range(STORED)])
    quiet = Stream.objects.create(key="quiet", owner=streams[0].owner)
    visits = [
        Visit(f"/ws/streams/{stream.key}/", owners[stream.owner], position)
        for position in POSITIONS
        for stream in streams
    ] * (sockets // STREAMS // len(POSITIONS))
    with serving(kind) as server, Storm(server.port) as storm:
        there = storm.come([Visit("/ws/streams/quiet/", owners[quiet.owner], 0)] * LIVE_SOCKETS)
        storm.read_while(lambda: any(viewer.live_at is None for viewer in there))
        reads = server.role.page_queries()
        with Watch(quiet, server.role) as watch:
            began = time.monotonic()
            back = storm.come(visits, within_seconds=1)
            storm.read_while(lambda: any(viewer.live_at is None for viewer in back))
            seconds = max(viewer.live_at for viewer in back) - began
        storm.read_while(lambda: any(viewer.position < len(watch.appended) for viewer in there))

        assert len(back) == sockets
        assert {viewer.position for viewer in back} == {STORED}
        assert seconds < ALL_LIVE_SECONDS
        late = [at - watch.appended[position - 1] for viewer in there for at, position, _ in viewer.received]
        assert statistics.median(late) < LIVE_LATENCY_SECONDS
        # The read pool, the listener, and one for all look-ups of streams, users and permissions.
        assert max(map(len, watch.sessions)) <= conf.get().READ_POOL_SIZE + 2, max(watch.sessions, key=len)
        # Look-ups are shared: of streams by all who wait, and their connection by all of them. Of a machine
        # that is busy fewer come at once.
        assert server.role.calls('"pgstreams_stream"."key" IN') <= sockets / 2
        assert server.role.calls("set_config") <= sockets / 2  # once for each connection of Django's
        # What comes to the other stream takes a read each; else one read serves all at a position.
        assert server.role.page_queries() - reads - len(watch.appended) <= 3 * STREAMS * len(POSITIONS)
        assert not server.trouble()


def test_an_append_costs_five_hundred_sockets_one_read(owners):
    user, headers = next(iter(owners.items()))
    stream = Stream.objects.create(key="one", owner=user)
    with serving("daphne", PGSTREAMS={"POLL_INTERVAL_SECONDS": 300}) as server, Storm(server.port) as storm:
        viewers = storm.come([Visit("/ws/streams/one/", headers, 0)] * 500)
        storm.read_while(lambda: any(viewer.live_at is None for viewer in viewers))
        before = server.role.page_queries()
        stream.append("to all")
        storm.read_while(lambda: any(viewer.position < 1 for viewer in viewers))
        assert 1 <= server.role.page_queries() - before <= 2
