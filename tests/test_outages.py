"""Connections that are open and dead, sessions that are ended, a server that goes and comes back.

Times are scaled down by settings: a dead connection is to be found within `HEALTH_CHECK_SECONDS` and
`QUERY_TIMEOUT_SECONDS`, both 15 by default and 2 here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time

import pytest
from django.contrib.auth.models import User
from django.db import connections

from django_pgstreams import listener, notifier
from django_pgstreams.buffer import WakeUp
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from django_pgstreams.relay import Relay
from django_pgstreams.writer import StreamWriter
from tests.concurrency import start
from tests.following import Process, database_url, is_listening, sessions, store, terminate
from tests.relay_process import RelayProcess
from tests.servers import Socket, headers_of, serving
from tests.waiting import DEADLINE_SECONDS, wait_until

pytestmark = [pytest.mark.usefixtures("live"), pytest.mark.once]

LIMIT_SECONDS = 2.0
LATE_SECONDS = 10.0
"""Well above the limit, with room for a busy machine; well below what waiting without one would take."""
NEVER_SECONDS = 1000.0


@pytest.fixture
def quick(settings):
    """Dead connections are found in 2 s instead of 15."""
    settings.PGSTREAMS = {
        "HEALTH_CHECK_SECONDS": LIMIT_SECONDS,
        "QUERY_TIMEOUT_SECONDS": LIMIT_SECONDS,
        "POLL_INTERVAL_SECONDS": 1.0,
    }
    return settings


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="outage")


class Follower:
    """Follows a stream in a thread, up to its end."""

    def __init__(self, stream, using):
        self._subscription = subscribe(stream.key, using=using)
        self._reading = start(lambda: [chunk.data for chunk in self._subscription])
        self._using = using
        wait_until(lambda: is_listening(using), "it listens")

    def wait_for(self, position):
        """How long it took until the chunks before the position were here."""
        began = time.monotonic()
        wait_until(lambda: self._subscription.position >= position or self._reading.done(), "they arrive")
        return time.monotonic() - began

    def wait_until_woken(self, stream):
        """Until an append arrives by a notification that another session has sent."""
        heard = listener.get(self._using)
        before = heard.wake_ups
        self.wait_for(stream.append("woken").offset + 1)
        wait_until(lambda: heard.wake_ups > before, "a wake-up is heard")

    def values(self):
        """All values, once the stream has ended."""
        return self._reading.result(DEADLINE_SECONDS)


def warnings(caplog):
    """Who has logged a warning or more; one line for each change of state is expected."""
    return sorted(record.name for record in caplog.records if record.levelno >= logging.WARNING)


# Connections that are open and dead --------------------------------------------------------------------


@pytest.mark.parametrize("new_ones", [False, True], ids=["those there are", "new ones too"])
def test_readers_find_dead_connections_in_time_and_lose_nothing(quick, proxy, stream, caplog, new_ones):
    following = Follower(stream, proxy.alias)
    store(stream, 1)
    following.wait_for(1)
    proxy.strand(new_ones=new_ones)
    tried = proxy.accepted
    store(stream, 1)
    began = time.monotonic()
    if new_ones:
        wait_until(lambda: proxy.accepted >= tried + 4, "the listener and the reader try again, twice each")
        proxy.come_up()
        began = time.monotonic()
    following.wait_for(2)
    wait_until(lambda: listener.get(proxy.alias).connects == 2, "it listens again")
    assert time.monotonic() - began < LATE_SECONDS
    # The server does not know of the death: the dead session is still there.
    assert len(sessions("listener")) == 2
    following.wait_until_woken(stream)
    stream.close()
    assert following.values() == [0, 1, "woken"]
    assert warnings(caplog) == ["django_pgstreams.hub", "django_pgstreams.listener"]


def test_writer_notifier_and_relay_find_dead_connections_in_time(quick, proxy, stream, ear, caplog):
    quick.PGSTREAMS |= {"NOTIFIER": "thread"}
    relay = Relay(
        proxy.alias,
        channel="pgstreams",
        interval_seconds=0.01,
        idle_interval_seconds=0.05,
        timeout_seconds=LIMIT_SECONDS,
    )
    relay.start()
    writer = StreamWriter(stream, using=proxy.alias)
    assert writer.append(0) == 0
    wait_until(lambda: ear.heard("*"), "the relay works")
    notifier.announce(proxy.alias, [WakeUp(1, 1)])
    wait_until(lambda: ear.heard("1:1"), "the notifier works")
    proxy.strand()
    began = time.monotonic()
    ear.payloads.clear()
    other = Stream.objects.create(key="by SQL")
    store(other, 1)
    notifier.announce(proxy.alias, [WakeUp(2, 2)])
    assert writer.append(1) == 1
    wait_until(lambda: {f"{other.pk}:1", "2:2", f"{stream.pk}:2"} <= set(ear.words()), "all is announced")
    assert time.monotonic() - began < LATE_SECONDS
    assert [chunk.data for chunk in stream.read()] == [0, 1]
    assert relay.close(LATE_SECONDS)
    assert warnings(caplog) == [f"django_pgstreams.{name}" for name in ("notifier", "relay", "settling")]


@pytest.mark.parametrize("command", ["appends", "announces"])
def test_a_process_that_writes_ends_in_time(stream, proxy, command):
    code = """
import sys
import django
django.setup()
from django_pgstreams import notifier
from django_pgstreams.buffer import WakeUp
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
stream = Stream.objects.get(pk=sys.argv[1])
stream.append(0)
writer = StreamWriter(stream)
writer.append(1)
print("1", flush=True)
sys.stdin.readline()
if sys.argv[2] == "appends":
    writer.append_nowait(2)
notifier.announce("default", [WakeUp(1, 1)])
"""
    process = Process("-c", code, str(stream.pk), command, **database_url(host="127.0.0.1", port=proxy.port))
    assert process.read() == 1
    proxy.strand(new_ones=True)
    process.tell("go")
    began = time.monotonic()
    assert process.wait() == 0
    assert time.monotonic() - began < 2 * LATE_SECONDS
    process.close()


def test_a_relay_ends_in_time(proxy, ear):
    relay = RelayProcess(**database_url(host="127.0.0.1", port=proxy.port))
    try:
        wait_until(lambda: ear.heard("*"), "it runs")
        proxy.strand(new_ones=True)
        began = time.monotonic()
        assert relay.stop()[0] == 0
        assert time.monotonic() - began < LATE_SECONDS
    finally:
        relay.close()


def test_a_web_server_with_sockets_ends_in_time(proxy):
    """Unless a query of Django's own is under way: those wait for as long as their alias says."""
    headers = headers_of(owner := User.objects.create_user("owner"))
    stream = Stream.objects.create(key="a/b", owner=owner)
    served = {name: connections.settings[proxy.alias][name] for name in ("ENGINE", "HOST", "PORT")}
    given = connections["default"].get_connection_params()
    served |= {"NAME": given["dbname"], "USER": given["user"], "PASSWORD": given.get("password", "")}
    with serving("daphne", DATABASES={"default": served}) as server, contextlib.ExitStack() as sockets:
        for _ in range(3):
            one = sockets.enter_context(Socket(server.url(), headers))
            one.send("subscribe", "a/b")
            one.frames("live")
        proxy.strand(new_ones=True)
        store(stream, 1)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < LATE_SECONDS


# Sessions that are ended ---------------------------------------------------------------------------------


def test_a_listener_that_is_ended_again_and_again_is_always_replaced_by_one(settings, stream):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    following = Follower(stream, "default")
    for times in range(1, 51):
        [_] = wait_until(lambda: len(found := sessions("listener")) == 1 and found, "one session listens")
        assert terminate("listener") == 1
        store(stream, 1)
        wait_until(lambda times=times: listener.get("default").connects > times, "it listens again")
        following.wait_for(times)
    following.wait_until_woken(stream)
    assert len(sessions("listener")) == 1
    stream.close()
    assert following.values() == [*range(50), "woken"]


# A server that goes and comes back -------------------------------------------------------------------------


class Writing:
    """Appends numbers in a thread, and remembers which were acknowledged."""

    def __init__(self, stream, using):
        self._over = threading.Event()
        self._writer = StreamWriter(stream, using=using)
        self._offsets = []
        self._writing = start(self._write)

    def _write(self):
        for number in itertools.count():
            if self._over.wait(0.005):
                break
            self._offsets.append(self._writer.append(number))
        return self._offsets

    @property
    def count(self):
        return len(self._offsets)

    def stop(self):
        self._over.set()
        return self._writing.result(DEADLINE_SECONDS)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_goes_and_comes_back_costs_nobody_more_than_time(private, caplog, monkeypatch, mode):
    """It stays away for longer than the longest back-off, which is a second here."""
    caplog.set_level(logging.INFO, logger="django_pgstreams")
    monkeypatch.setattr(listener, "_MAX_BACKOFF_SECONDS", 1.0)
    stream = Stream.objects.using(private.alias).create(key="outage")
    quiet = Stream.objects.using(private.alias).create(key="by SQL")
    relay = RelayProcess(DATABASE_URL=private.conninfo)
    try:
        wait_until(lambda: private.sessions("relay"), "the relay runs")
        following, of_quiet = Follower(stream, private.alias), Follower(quiet, private.alias)
        writing = Writing(stream, private.alias)
        following.wait_for(100)
        store_in(private, quiet)
        of_quiet.wait_for(1)
        private.stop(mode)
        stopped = time.monotonic()
        wait_until(lambda: time.monotonic() - stopped > 4, "it is away for four seconds")
        private.start()
        count = writing.count
        following.wait_for(count + 100)
        store_in(private, quiet)
        of_quiet.wait_for(2)
        wait_until(lambda: len(private.sessions("listener")) == 1, "one session listens")
        offsets = writing.stop()
        connections[private.alias].close()
        stream.close()
        quiet.close()
        assert offsets == list(range(len(offsets)))
        assert following.values() == offsets
        assert of_quiet.values() == [0, 1]
        code, log = relay.stop()
        assert code == 0
        counts = {text: log.count(text) for text in ("Traceback", "tries again", "works again")}
        assert counts == {"Traceback": 0, "tries again": 1, "works again": 1}
        assert "already closed" not in log + caplog.text
    finally:
        relay.close()


def store_in(private, stream):
    with private.connect() as own:
        store(stream, 1, own)
