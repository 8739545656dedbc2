"""What the tests of failing over share: a cluster as a Django alias, writers with a ledger, readers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psycopg
from django.db import DatabaseError, close_old_connections
from websockets.exceptions import ConnectionClosed

from benchmarks.shared.cluster import Cluster
from benchmarks.shared.postgres import migrate, new_database
from django_pgstreams import hub
from django_pgstreams.exceptions import OffsetConflict
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.aliases import alias, settings_of
from tests.concurrency import start
from tests.servers import ANYBODY, ServerProcess, Socket

_PAUSE_SECONDS = 0.002
_RETRY_SECONDS = 0.02


def everybody(user: Any, stream: Stream, action: str) -> bool:
    """A permission hook: these websockets have no session, and so need no database to say who they are."""
    return True


@contextlib.contextmanager
def database_on(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """A new database on the cluster, with the app's tables: its Django alias, and its address."""
    address = new_database(cluster.address)
    migrate(address)
    with alias("cluster", **settings_of(address)) as name:
        yield name, address


def stored(stream: Stream) -> list[Any]:
    """The values of a stream; fails unless they are contiguous."""
    close_old_connections()  # that to a server which is gone
    values = [chunk.data for chunk in stream.read(limit=1_000_000)]
    found = Stream.objects.using(stream._state.db).get(pk=stream.pk)
    assert len(values) == found.next_offset
    return values


# Writers -------------------------------------------------------------------------------------------


class Ledger:
    """What one writer was told is stored: values by offset, and when."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.values: dict[int, Any] = {}
        self.failures: list[Exception] = []
        self.last_at = 0.0

    def __len__(self) -> int:
        return len(self.values)

    def note(self, offset: int, value: Any) -> None:
        """An offset was acknowledged."""
        assert offset not in self.values
        self.values[offset] = value
        self.last_at = time.monotonic()


Write = Callable[[Ledger, int], None]


def write_by_append(ledger: Ledger, number: int) -> None:
    """`Stream.append`, tried again as README tells: the expected offset says what a lost reply hides."""
    stream = ledger.stream
    tail = stream.next_offset
    while True:
        try:
            chunk = stream.append(number, expected_offset=tail)
        except OffsetConflict:
            ledger.note(tail, number)  # nobody else appends here, so this was stored
            stream.refresh_from_db()
            return
        except DatabaseError as error:
            ledger.failures.append(error)
            close_old_connections()
            time.sleep(_RETRY_SECONDS)
        else:
            ledger.note(chunk.offset, number)
            return


def write_by_append_many(ledger: Ledger, number: int) -> None:
    """`Stream.append_many`, in the same way; the values of a call are stored together or not at all."""
    stream = ledger.stream
    values = [f"{number}.{part}" for part in range(3)]
    tail = stream.next_offset
    while True:
        try:
            stream.append_many(values, expected_offset=tail)
        except OffsetConflict:
            stream.refresh_from_db()
        except DatabaseError as error:
            ledger.failures.append(error)
            close_old_connections()
            time.sleep(_RETRY_SECONDS)
            continue
        for offset, value in enumerate(values, tail):
            ledger.note(offset, value)
        return


class SqlWriter:
    """`pgstreams_append`, by a program that knows nothing of Django; it tries again after any error."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: psycopg.Connection[Any] | None = None

    def __call__(self, ledger: Ledger, number: int) -> None:
        while True:
            try:
                if self._connection is None:
                    self._connection = psycopg.connect(self._address, autocommit=True)
                statement = "SELECT pgstreams_append(%s, convert_to(%s, 'UTF8'))"
                rows = self._connection.execute(statement, (ledger.stream.key, str(number))).fetchall()
            except psycopg.Error as error:
                ledger.failures.append(error)
                self.close()
                time.sleep(_RETRY_SECONDS)
            else:
                ledger.note(rows[0][0], number)
                return

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Writing:
    """One writer in a thread, which notes in its ledger what it is told, until the block ends."""

    def __init__(self, stream: Stream, write: Write) -> None:
        self.ledger = Ledger(stream)
        self._write = write
        self._over = threading.Event()
        self._done = start(self._run)

    def _run(self) -> None:
        number = 0
        while not self._over.wait(_PAUSE_SECONDS):
            self._write(self.ledger, number)
            number += 1

    def end(self) -> None:
        """Stop, once the append under way is answered."""
        self._over.set()
        self._done.result(60)


class Batching:
    """A `StreamWriter` with many appends in flight; the futures, each with its value."""

    IN_FLIGHT = 200

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.futures: list[Future[int]] = []
        self._over = threading.Event()
        self._done = start(self._run)

    def _run(self) -> None:
        writer = StreamWriter(self.stream)
        while not self._over.wait(_PAUSE_SECONDS):
            self.futures += [writer.append_nowait(len(self.futures) + n) for n in range(10)]
            if len(self.futures) > self.IN_FLIGHT:
                self.futures[-self.IN_FLIGHT].exception(60)

    @property
    def acknowledged(self) -> int:
        """How many appends were acknowledged."""
        return sum(future.done() and future.exception() is None for future in list(self.futures))

    def end(self) -> None:
        """Stop, once every future has an answer."""
        self._over.set()
        self._done.result(60)
        for future in self.futures:
            future.exception(60)


# Readers -------------------------------------------------------------------------------------------


class Following:
    """A reader in this process, in a thread of its own, until the stream ends."""

    def __init__(self, stream: Stream, offset: int = 0, epoch: str | None = None) -> None:
        self.values: list[Any] = []
        self.subscription = hub.subscribe(stream, offset, epoch=epoch)
        self._first = offset
        self.done = start(self._run)

    def _run(self) -> None:
        for chunk in self.subscription:
            assert chunk.offset == self._first + len(self.values)
            self.values.append(chunk.data)

    def end(self) -> None:
        """Leave."""
        self.subscription.close()
        self.done.result(60)


class Watching:
    """A reader over a websocket, as README's page is one: it comes back to its position and epoch."""

    def __init__(self, server: ServerProcess, stream: Stream) -> None:
        self.values: list[Any] = []
        self.frames: list[dict[str, Any]] = []
        self.visits = 0
        self._server = server
        self._key = stream.key
        self._epoch = ""
        self._socket: Socket | None = None
        self._left = False
        self.done = start(self._run)

    def _run(self) -> None:
        while not self._left:
            self.visits += 1
            url = self._server.url(self._key, offset=len(self.values), epoch=self._epoch)
            with contextlib.suppress(ConnectionClosed, OSError), Socket(url, ANYBODY) as self._socket:
                while True:
                    self._take(self._socket.frame())

    def _take(self, frame: dict[str, Any]) -> None:
        if frame["type"] == "chunks":
            assert frame["offset"] == len(self.values)
            self.values += frame["data"]
            return
        self.frames.append(frame)
        if frame["type"] == "subscribed":
            self._epoch = self._epoch or frame["epoch"]
        elif frame["type"] == "reset":
            self.values.clear()
            self._epoch = frame["epoch"]

    def seen(self, kind: str) -> list[dict[str, Any]]:
        """The frames of a type so far."""
        return [frame for frame in self.frames if frame["type"] == kind]

    def end(self) -> None:
        """Leave for good."""
        self._left = True
        if self._socket is not None:
            self._socket.websocket.close()
        self.done.result(60)
