"""The threads that write the demo's streams, and how the streams of a killed demo are recognised.

A process that writes streams holds an advisory lock in Postgres under a number of its own, and
notes the number in each stream. The server lets go of the lock however the process ends, so an
open stream whose number can be locked has lost its writer.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from django.db import connection, connections

from django_pgstreams.exceptions import StreamClosed, StreamMissing
from django_pgstreams.models import Stream

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)

STOPPED = "The demo was stopped while this was being written."
ABANDONED = "The demo was killed while this was being written."
STOP_SECONDS = 5.0

Write = Callable[[Stream], None]


class Producers:
    """One thread per stream that is being written; `stop` ends them all."""

    def __init__(self, tokens_per_second: float) -> None:
        self.tokens_per_second = tokens_per_second
        self.stopping = threading.Event()
        self._running: dict[threading.Thread, Stream] = {}
        self._lock = threading.Lock()
        self._writer: int | None = None
        self._writer_connection: BaseDatabaseWrapper | None = None

    def writer(self) -> int:
        """This process's number, for `metadata["writer"]`; its lock is taken on first use."""
        with self._lock:
            if self._writer is None:
                number = secrets.randbits(62)
                # Of its own, since Django closes a thread's connection when a request ends.
                own = connection.copy()
                own.inc_thread_sharing()
                with own.cursor() as cursor:
                    cursor.execute("SELECT pg_advisory_lock(%s)", [number])
                self._writer, self._writer_connection = number, own
            return self._writer

    def start(self, stream: Stream, write: Write) -> None:
        """Run `write(stream)` in a thread. An error in it fails the stream."""
        thread = threading.Thread(
            target=self._run, args=(stream, write), name=f"demo-{stream.key}", daemon=True
        )
        with self._lock:
            self._running[thread] = stream
        thread.start()

    def stop(self) -> None:
        """Fail what is still being written, and wait for its threads."""
        self.stopping.set()
        with self._lock:
            running = dict(self._running)
        for stream in Stream.objects.filter(pk__in=[stream.pk for stream in running.values()]):
            _fail(stream, STOPPED)
        deadline = time.monotonic() + STOP_SECONDS
        for thread in running:
            thread.join(max(0, deadline - time.monotonic()))
        if self._writer_connection is not None:
            self._writer_connection.close()
        connections.close_all()

    def _run(self, stream: Stream, write: Write) -> None:
        try:
            write(stream)
        except (StreamClosed, StreamMissing):
            logger.info("Stream %s was ended by somebody else", stream.key)
        except Exception as error:
            logger.exception("Writing stream %s failed", stream.key)
            _fail(stream, f"{type(error).__name__}: {error}")
        finally:
            connections.close_all()
            with self._lock:
                del self._running[threading.current_thread()]


producers = Producers(tokens_per_second=25)


def fail_abandoned_streams() -> int:
    """Fail the open streams whose writer is gone, and return how many there were."""
    failed = 0
    for stream in Stream.objects.filter(state=Stream.State.OPEN, metadata__has_key="writer"):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_lock(%s)", [stream.metadata["writer"]])
            (is_gone,) = cursor.fetchone()
            if is_gone:
                failed += _fail(stream, ABANDONED)
                cursor.execute("SELECT pg_advisory_unlock(%s)", [stream.metadata["writer"]])
    return failed


def _fail(stream: Stream, reason: str) -> bool:
    with contextlib.suppress(StreamClosed, StreamMissing):
        stream.fail(reason)
        return True
    return False
