"""Everything at once: replies lost, waiting statements cut, and another process that writes the same."""

from __future__ import annotations

import collections
import logging
import random
import threading
import time

import pytest

from django_pgstreams.exceptions import AppendUnknown
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.concurrency import start
from tests.following import Process, query, terminate, waiting_for_lock
from tests.losing_proxy import Lose, losing
from tests.writing import make_streams

BATCH, SETTLE = b"pgstreams_store(", b"SET seq = seq + 1"

BESIDE = """
import json, os, random, sys, time
import django
django.setup()
from django.db import transaction
from django_pgstreams.models import Stream
streams = [Stream.objects.get(pk=pk) for pk in sys.argv[1:]]
print('"ready"', flush=True)
sys.stdin.readline()
os.set_blocking(sys.stdin.fileno(), False)
offsets = []
while not sys.stdin.read(1):
    stream = random.choice(streams)
    with transaction.atomic():
        offsets.append((stream.pk, stream.append("same").offset))
        if random.random() < 0.1:
            time.sleep(0.1)
print(json.dumps(offsets), flush=True)
"""


@pytest.fixture
def proxy(live):
    with losing() as made:
        yield made


def stored_offsets(streams):
    """Every stored chunk; fails unless each stream is contiguous and holds nothing else than "same"."""
    found = set()
    for stream in streams:
        rows = query('SELECT "offset", payload FROM pgstreams_chunk WHERE stream_id = %s', stream.pk)
        offsets = {offset for offset, _ in rows}
        assert offsets == set(range(Stream.objects.get(pk=stream.pk).next_offset))
        assert {bytes(payload) for _, payload in rows} <= {b'"same"'}
        found |= {(stream.pk, offset) for offset in offsets}
    return found


def offsets_of(futures):
    """The offsets acknowledged, and how many appends nobody knows about."""
    acknowledged, unknown = [], 0
    for stream, future in futures:
        error = future.exception(60)
        if isinstance(error, AppendUnknown):
            unknown += 1
        else:
            assert error is None
            acknowledged.append((stream.pk, future.result()))
    return acknowledged, unknown


def run_writers(streams, alias, deadline):
    """Append to all streams until then, a bounded number at a time; the futures in order."""
    futures = []

    def write(stream):
        writer = StreamWriter(stream, using=alias)
        own = collections.deque()
        while time.monotonic() < deadline:
            own.append((stream, writer.append_nowait("same")))
            if len(own) > 50:
                own[-50][1].exception(60)
            time.sleep(0.0005)
        return own

    for writing in [start(write, stream) for stream in streams]:
        futures += writing.result(120)
    return futures


def disturb(proxy, over, chance):
    """Cut what waits for a lock, and end sessions, now and then."""
    while not over.wait(0.02):
        if waiting_for_lock("writer") and chance.random() < 0.5:
            proxy.go_down()
            proxy.come_up()
        elif chance.random() < 0.05:
            terminate("writer")


@pytest.mark.parametrize("seed", [1, 2])
def test_every_append_is_stored_once_and_every_future_is_right(proxy, seed, caplog):
    caplog.set_level(logging.CRITICAL, logger="django_pgstreams")
    chance = random.Random(seed)
    streams = make_streams(8)
    proxy.marks = (BATCH, SETTLE)
    proxy.fate = lambda _: chance.choice(list(Lose)) if chance.random() < 0.15 else None
    beside = Process("-c", BESIDE, *(str(stream.pk) for stream in streams))
    assert beside.read() == "ready"
    beside.tell("go")
    over = threading.Event()
    disturbing = start(disturb, proxy, over, chance)
    futures = run_writers(streams, proxy.alias, time.monotonic() + 3)
    over.set()
    disturbing.result(60)
    proxy.marks = ()
    ours, unknown = offsets_of(futures)
    beside.tell("stop")
    theirs = [tuple(pair) for pair in beside.read()]
    beside.close()
    found = stored_offsets(streams)
    assert collections.Counter(proxy.lost).keys() == set(Lose)
    assert len(ours) > 100
    assert len(theirs) > 20
    assert len(set(ours)) == len(ours)
    assert not set(ours) & set(theirs)
    assert set(ours) | set(theirs) <= found
    assert unknown == 0  # nobody has touched the writers' rows, and no outage was long
    assert len(found) == len(ours) + len(theirs)
    for stream in streams:
        own = [offset for pk, offset in ours if pk == stream.pk]
        assert own == sorted(own)


def test_nothing_is_stored_twice_when_the_writers_rows_are_deleted_too(proxy, caplog):
    caplog.set_level(logging.CRITICAL, logger="django_pgstreams")
    chance = random.Random(3)
    streams = make_streams(4)
    proxy.marks = (BATCH, SETTLE)
    proxy.fate = lambda _: chance.choice(list(Lose)) if chance.random() < 0.2 else None
    over = threading.Event()

    def delete_rows():
        while not over.wait(0.03):
            query("DELETE FROM pgstreams_writer")

    deleting = start(delete_rows)
    futures = run_writers(streams, proxy.alias, time.monotonic() + 2)
    over.set()
    deleting.result(60)
    proxy.marks = ()
    ours, unknown = offsets_of(futures)
    found = stored_offsets(streams)
    assert len(set(ours)) == len(ours)
    assert set(ours) <= found
    assert unknown > 0
    assert len(ours) <= len(found) <= len(ours) + unknown
