"""A program that does all that the app can do, and forks in the middle of it.

`python -m tests.forking STREAM WRITTEN ENDING`: the ids of two streams, and how the children end. What it
finds wrong is a traceback, of a child too.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import django

if __name__ == "__main__":
    django.setup()

from django.db import connection

from django_pgstreams import background, committer, hub, listener, notifier
from django_pgstreams.buffer import WakeUp
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.concurrency import start
from tests.following import sessions
from tests.waiting import wait_until

if TYPE_CHECKING:
    from concurrent.futures import Future

CHILDREN = 4
APPENDS = 50
"""Of each child, with a `StreamWriter`."""
MARKS = 10**12
"""From here on, ids of streams that do not exist: one is announced at each fork."""
ROLES = ("listener", "reader", "notifier", "writer")


class Work:
    """Two readers and a writer, in threads, whose connections are open and in use."""

    def __init__(self, stream: Stream, written: Stream) -> None:
        self._stream = stream
        self._written = written
        self._over = threading.Event()
        self.seen: list[Any] = []
        self.seen_async: list[Any] = []
        self.acknowledged: list[Future[int]] = []
        self._threads = [start(self._read), start(lambda: asyncio.run(self._follow())), start(self._write)]

    def _read(self) -> None:
        for chunk in subscribe(self._stream):
            self.seen.append(chunk.data)

    async def _follow(self) -> None:
        async for chunk in subscribe(self._stream):
            self.seen_async.append(chunk.data)

    def _write(self) -> None:
        writer = StreamWriter(self._written)
        while not self._over.is_set():
            self.acknowledged.append(writer.append_nowait("parent"))
            time.sleep(0.0005)  # at each fork some appends are on their way

    def have_seen(self, values: set[str]) -> bool:
        """Whether both readers have these."""
        return values <= set(self.seen) and values <= set(self.seen_async)

    def end(self) -> None:
        """End the stream and the threads, and check what they got."""
        self._stream.append("parent again", close=True)
        self._over.set()
        for thread in self._threads:
            thread.result(60)
        assert self.seen == self.seen_async == [chunk.data for chunk in self._stream.read()]
        offsets = [future.result(60) for future in self.acknowledged]
        assert offsets == sorted(set(offsets))


def open_sessions() -> set[int]:
    """The server processes of what the app has open, in this process and in others."""
    return {pid for role in ROLES for pid in sessions(role)}


def own_session() -> int:
    """The server process of Django's own connection."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def in_child(number: int, stream: Stream, written: Stream) -> None:
    """What a child does: all of it anew. In a thread, since Django's connection here is its parent's."""
    assert not notifier._notifiers
    assert not hub._hubs
    assert not listener._listeners
    assert not committer._committers
    assert not background.is_running()
    gc.collect()
    start(append_and_follow, f"child {number}", stream, written).result(60)


def append_and_follow(value: str, stream: Stream, written: Stream) -> None:
    """Append in both ways, and follow until the own value comes."""
    Stream.objects.get(pk=stream.pk).append(value)
    assert value in (chunk.data for chunk in subscribe(stream))
    with StreamWriter(written) as writer:
        for _ in range(APPENDS):
            writer.append_nowait(value)


def fork(number: int, ending: str, *streams: Stream) -> int:
    """A child by `os.fork`; its id."""
    child = os.fork()
    if not child:
        code = 1
        try:
            in_child(number, *streams)
            code = 0
        finally:
            if ending == "at once":
                os._exit(code)
        sys.exit(code)
    return child


def run_children(ending: str, *streams: Stream) -> None:
    """Start all, and wait until they have ended well."""
    if ending == "multiprocessing":
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=in_child, args=[n, *streams]) for n in range(CHILDREN)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * CHILDREN
    else:
        ids = [fork(number, ending, *streams) for number in range(CHILDREN)]
        assert [os.waitpid(child, 0)[1] for child in ids] == [0] * CHILDREN


def main(stream_id: str, written_id: str, ending: str) -> None:
    """Work, fork, and see that the work went on as if nothing had happened."""
    streams = Stream.objects.get(pk=stream_id), Stream.objects.get(pk=written_id)
    session = own_session()
    work = Work(*streams)
    streams[0].append("parent")
    wait_until(lambda: work.have_seen({"parent"}) and len(work.acknowledged) > 100, "all works")
    wait_until(lambda: all(sessions(role) for role in ROLES), "all is connected")
    before = open_sessions()

    marks = itertools.count(MARKS)
    os.register_at_fork(before=lambda: notifier.announce("default", [WakeUp(next(marks), 1)]))
    run_children(ending, *streams)

    wait_until(
        lambda: work.have_seen({f"child {n}" for n in range(CHILDREN)}), "the children's appends arrive"
    )
    assert before <= open_sessions()
    assert session == own_session()
    work.end()
    assert listener.get("default").connects == 1
    assert notifier.get("default").failed_flushes == 0


if __name__ == "__main__":
    # From Python 3.12 on; the app is made for it.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    main(*sys.argv[1:])
