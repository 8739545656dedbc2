"""Appends that jump tenfold within a second: nothing is lost, memory stays bounded, and no backlog is left.

SPIKE_SECONDS=30 makes the spikes as long as those that the figures in the documents are about.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path

import pytest
from django.contrib.auth.models import User

from django_pgstreams import hub
from django_pgstreams.exceptions import WriterFull
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.following import Process
from tests.servers import headers_of, serving
from tests.storm import Storm, Visit
from tests.waiting import wait_until
from tests.writing import stored

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("live")]

SPIKE_SECONDS = float(os.environ.get("SPIKE_SECONDS", "6"))
BACKLOG_SECONDS = 10.0
SOCKETS_PER_STREAM = 5
MAX_GROWTH_KIB = 64 * 1024
"""Of a server: its windows are bounded by 1 MiB for each stream; of a writer: as much may be pending."""


def rss_kib(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


class Reader:
    """Reads a stream in a thread of this process, to its end."""

    def __init__(self, stream):
        self._subscription = hub.subscribe(stream.key)
        self.offsets = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        for batch in self._subscription.batches():
            self.offsets += [chunk.offset for chunk in batch]

    def close(self):
        self._subscription.close()
        self._thread.join()


@contextlib.contextmanager
def spiking(kind, per_second, streams):
    process = Process(
        "-m", "tests.spikes", kind, *map(str, [per_second, SPIKE_SECONDS]), *(str(s.pk) for s in streams)
    )
    try:
        assert process.read() == "ready"
        yield process
    finally:
        process.close()


@pytest.mark.parametrize(("kind", "processes", "per_second"), [("orm", 3, 15), ("writer", 1, 400)])
def test_a_tenfold_spike_loses_nothing_and_leaves_nothing_behind(kind, processes, per_second):
    owner = User.objects.create_user("owner")
    streams = [Stream.objects.create(key=f"spike/{number}", owner=owner) for number in range(4)]
    visits = [Visit(f"/ws/streams/{stream.key}/", headers_of(owner), 0) for stream in streams]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving("daphne", PGSTREAMS={"MAX_UNACKED_BYTES": 2**30}))
        storm = stack.enter_context(Storm(server.port))
        readers = [stack.enter_context(contextlib.closing(Reader(stream))) for stream in streams]
        viewers = storm.come(visits * SOCKETS_PER_STREAM)
        storm.read_while(lambda: any(viewer.live_at is None for viewer in viewers))
        spikes = [stack.enter_context(spiking(kind, per_second, streams)) for _ in range(processes)]
        before = rss_kib(server.pid)
        reports = []

        def watch(spike):
            spike.tell("go")
            reports.append(spike.read())

        threads = [threading.Thread(target=watch, args=[spike]) for spike in spikes]
        for thread in threads:
            thread.start()
        storm.read_while(lambda: len(reports) < processes)
        over = time.monotonic()
        counts = [sum(report["counts"][str(stream.pk)] for report in reports) for stream in streams]

        storm.read_while(lambda: [viewer.position for viewer in viewers] != counts * SOCKETS_PER_STREAM)
        wait_until(lambda: [len(reader.offsets) for reader in readers] == counts, "the readers have it all")
        assert time.monotonic() - over < BACKLOG_SECONDS
        for thread in threads:
            thread.join()
        for stream, reader, count in zip(streams, readers, counts, strict=True):
            assert reader.offsets == list(range(count))  # sockets check as they read
            stream.refresh_from_db()
            assert stream.next_offset == count > 10 * per_second * processes / len(streams)
        grown = [rss_kib(server.pid) - before, *(report["grown_kib"] for report in reports)]
        assert max(grown) < MAX_GROWTH_KIB
        assert not server.trouble()


def test_a_spike_above_the_writers_bound_waits_or_is_refused_and_loses_nothing(settings):
    settings.PGSTREAMS = {"WRITER_MAX_PENDING_BYTES": 20_000}
    stream = Stream.objects.create(key="flood")
    writer = StreamWriter(stream)
    refusals, accepted, waited = 0, [], []

    def wait_for_each(thread):
        for number in range(200):
            writer.append([thread, number])
            waited.append([thread, number])

    threads = [threading.Thread(target=wait_for_each, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    number = 0
    while (refusals < 100 or any(thread.is_alive() for thread in threads)) and time.monotonic() < deadline:
        try:
            accepted.append((["now", number], writer.append_nowait(["now", number])))
        except WriterFull:
            refusals += 1
        number += 1
    for thread in threads:
        thread.join()
    values = [value for value, future in accepted if future.result(60) is not None] + waited
    assert refusals >= 100
    assert sorted(stored(stream), key=str) == sorted(values, key=str)
