"""Raw psycopg connections made from a Django alias, for work that Django's own connections cannot do.

Every one has an application name, is in autocommit, and keeps no session state, so that it also works through
a transaction pooler (the listener's `LISTEN` is the exception). Invariants: whatever is asked of a connection
has a deadline (`execute`, `within`), since a peer that is gone without a word never answers; a forked child
never ends a session of its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import selectors
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

import psycopg
import psycopg.errors
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from psycopg import pq

from . import sql
from .arrays import Array

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
Value: TypeAlias = str | Array | None
"""A parameter of `execute`: text, an array in binary form, or null."""

_CONNECT_SECONDS = 5
_CANCEL_SECONDS = 3.0
_DEAD_PEER = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_APPLICATION_PREFIX = "pgstreams-"


class Connection(psycopg.Connection[Row]):
    """A blocking connection of one process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner = os.getpid()

    def close(self) -> None:
        """Disconnect; in a forked child nothing, since that would end the parent's session."""
        if self._owner == os.getpid():
            super().close()


class AsyncConnection(psycopg.AsyncConnection[Row]):
    """An asyncio connection of one process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner = os.getpid()

    async def close(self) -> None:
        """Like `Connection.close`; safe too when the event loop of the connection has been closed."""
        if self._owner == os.getpid():
            await super().close()


def application_name(role: str) -> str:
    """The application name of a role (`listener`, `notifier`, `reader`), as `pg_stat_activity` shows it."""
    return _APPLICATION_PREFIX + role


def parameters(using: str, role: str) -> dict[str, Any]:
    """Keyword arguments for psycopg's `connect`. Call it in a thread: the backend may do work here.

    The alias's own libpq options win, except for the application name.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"Streams need Postgres, but the database alias {using!r} is {connection.vendor}."
        )
    own = connection.get_connection_params()
    own.pop("cursor_factory", None)  # Django's binds on the client's side, for Django's SQL
    own.pop("context", None)
    role_of_queries = connection.settings_dict["OPTIONS"].get("assume_role")
    if role_of_queries:
        # As Django's own connections, but from the start: no statement sets session state here.
        escaped = re.sub(r"([\\\s])", r"\\\1", role_of_queries)
        own["options"] = f"{own.get('options', '')} -c role={escaped}".strip()
    return {
        "connect_timeout": _CONNECT_SECONDS,
        **_DEAD_PEER,
        **own,
        "application_name": application_name(role),
        "autocommit": True,
    }


def backoff_seconds(failures: int, longest_seconds: float = 5.0) -> float:
    """Time to wait after so many failures in a row before a fresh try: doubling, capped, jittered."""
    # The exponent is bounded too: a float cannot hold two to the failures of a night.
    return random.uniform(0.5, 1) * min(math.ldexp(0.05, min(failures, 10)), longest_seconds)


def connect(using: str, role: str, *, timeout_seconds: float = _CONNECT_SECONDS) -> Connection:
    """A new blocking connection. Raises `psycopg.OperationalError`."""
    return Connection.connect(**_within(timeout_seconds, parameters(using, role)))


async def aconnect(using: str, role: str, *, timeout_seconds: float = _CONNECT_SECONDS) -> AsyncConnection:
    """A new asyncio connection. Raises `psycopg.OperationalError`."""
    given = await asyncio.to_thread(parameters, using, role)
    return await AsyncConnection.connect(**_within(timeout_seconds, given))


def _within(seconds: float, given: dict[str, Any]) -> dict[str, Any]:
    """Parameters with a time limit for connecting to each host; libpq knows none below 2 s."""
    own = int(given["connect_timeout"] or _CONNECT_SECONDS)
    return {**given, "connect_timeout": min(own, max(2, int(seconds)))}


# Deadlines -----------------------------------------------------------------------------------------


def execute(
    connection: Connection, statement: str, values: Sequence[Value], *, timeout_seconds: float
) -> list[list[str | None]]:
    """Run a statement (placeholders `$1` …) on a blocking connection; text and arrays in, text out.

    Raises `psycopg.Error`, or `TimeoutError` past the deadline; then close the connection. It speaks to libpq
    itself, because psycopg's blocking calls wait without a limit.
    """
    deadline = time.monotonic() + timeout_seconds
    link = connection.pgconn
    link.send_query_params(
        statement.encode(),
        [
            value.data if isinstance(value, Array) else None if value is None else value.encode()
            for value in values
        ],
        param_types=[value.oid if isinstance(value, Array) else 0 for value in values],
        param_formats=[pq.Format.BINARY if isinstance(value, Array) else pq.Format.TEXT for value in values],
    )
    while link.flush():
        _wait(link, selectors.EVENT_READ | selectors.EVENT_WRITE, deadline)
        link.consume_input()
    rows: list[list[str | None]] = []
    error: psycopg.Error | None = None
    while (result := _next_result(link, deadline)) is not None:
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            # Read on: until there is no more, the connection is not ready for another statement.
            error = error or psycopg.errors.error_from_result(result)
            continue
        for row in range(result.ntuples):
            cells = (result.get_value(row, column) for column in range(result.nfields))
            rows.append([None if cell is None else cell.decode() for cell in cells])
    while link.notifies():
        pass  # a pooler's session may listen for somebody who has gone: libpq would keep all it hears
    if error is not None:
        raise error
    return rows


def notify(connection: Connection, channel: str, payloads: Value, *, timeout_seconds: float) -> None:
    """Send notifications, one for each element of the array of payloads. Raises what `execute` raises."""
    try:
        execute(connection, sql.NOTIFY, [channel, payloads], timeout_seconds=timeout_seconds)
    except psycopg.errors.ProgramLimitExceeded:
        # The queue is full. It is for the next attempt, if its listeners are up to date again.
        execute(connection, sql.FREE_NOTIFICATION_QUEUE, [], timeout_seconds=timeout_seconds)
        raise


def _next_result(link: pq.abc.PGconn, deadline: float) -> pq.abc.PGresult | None:
    while link.is_busy():
        _wait(link, selectors.EVENT_READ, deadline)
        link.consume_input()
    return link.get_result()


def _wait(link: pq.abc.PGconn, events: int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(link.socket, events)
        if not selector.select(max(0, deadline - time.monotonic())):
            raise TimeoutError("the server did not answer in time")


async def within(seconds: float, connection: AsyncConnection, work: Coroutine[Any, Any, T]) -> T:
    """What `work` on a connection returns. Raises `TimeoutError` past the deadline; then close it.

    A statement that is given up, also because the caller is cancelled, is cancelled at the server, so that it
    holds nothing there. Past the deadline nobody waits for that: the peer may be gone without a word.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work, name="pgstreams-statement")
    task.add_done_callback(mark_retrieved)  # who is cancelled just when it fails does not look
    late: set[asyncio.Task[T]] = set()
    try:
        _, late = await asyncio.wait({task}, timeout=seconds)
        if late:
            await _cancel_at_server(connection)
            _shut_down(connection)
            await asyncio.wait(late)
    finally:
        if not task.done():
            shut_down = loop.call_later(_CANCEL_SECONDS, _shut_down, connection)
            task.add_done_callback(lambda _: shut_down.cancel())
            # psycopg asks the server to cancel the statement, and would give up when cancelled once more: an
            # event loop that ends has done it already.
            if not task.cancelling():
                task.cancel()
            await asyncio.wait({task})
    if late or task.cancelled():
        raise TimeoutError("the server did not answer in time")
    return task.result()


_cancelling: set[asyncio.Task[None]] = set()
"""Requests on their way: an event loop holds its tasks weakly."""


async def _cancel_at_server(connection: AsyncConnection) -> None:
    """Send the server a request, over a connection of its own, to cancel what `connection` runs."""

    async def send() -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            await connection.cancel_safe(timeout=_CANCEL_SECONDS)

    request = asyncio.get_running_loop().create_task(send(), name="pgstreams-cancel-statement")
    _cancelling.add(request)
    request.add_done_callback(_cancelling.discard)
    await asyncio.sleep(0)  # it has begun, and needs `connection` no more


def mark_retrieved(task: asyncio.Future[Any]) -> None:
    """Whoever was cancelled does not want the error any more."""
    if not task.cancelled():
        task.exception()


def _shut_down(connection: AsyncConnection) -> None:
    """Have libpq find its connection ended, without a word from the other side."""
    with (
        contextlib.suppress(psycopg.Error, OSError),
        socket.socket(fileno=os.dup(connection.pgconn.socket)) as own,
    ):
        own.shutdown(socket.SHUT_RDWR)


# Reading -------------------------------------------------------------------------------------------


class ReadPool:
    """At most `size` asyncio connections of one event loop, opened when needed; first come, first served.

    It has no task of its own, so nothing outlives the loop that uses it: whoever owns it calls `close_idle`
    now and then, and `close` at the end.
    """

    def __init__(self, using: str, role: str, *, size: int, timeout_seconds: float) -> None:
        self._using = using
        self._role = role
        self._timeout_seconds = timeout_seconds
        self._turns = asyncio.Semaphore(size)
        self._idle: deque[tuple[float, AsyncConnection]] = deque()
        self._open: set[AsyncConnection] = set()

    async def fetch(self, statement: str, parameters: dict[str, Any]) -> list[Row]:
        """Run a statement on a free connection and return its rows.

        Raises `psycopg.Error`, or `TimeoutError` past the deadline; the connection is given up then.
        """
        async with self._turns, self._connection() as connection:
            return await within(self._timeout_seconds, connection, _fetch(connection, statement, parameters))

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        if self._idle:
            _, connection = self._idle.pop()
        else:
            connection = await aconnect(self._using, self._role, timeout_seconds=self._timeout_seconds)
            self._open.add(connection)
            connection.add_notify_handler(_ignore)
        try:
            yield connection
        except BaseException as error:
            # Half-read or broken: it must not serve the next reader.
            await self._close(connection)
            if isinstance(error, (psycopg.OperationalError, TimeoutError)):
                await self.close()  # what broke this one has not spared those that are idle
            raise
        self._idle.append((time.monotonic(), connection))

    async def close_idle(self, idle_seconds: float) -> None:
        """Close the connections that nobody has used for so long."""
        before = time.monotonic() - idle_seconds
        while self._idle and self._idle[0][0] <= before:
            await self._close(self._idle.popleft()[1])

    async def close(self) -> None:
        """Close the connections that are not in use."""
        await self.close_idle(0)

    async def _close(self, connection: AsyncConnection) -> None:
        self._open.discard(connection)
        await connection.close()

    def abandon(self) -> None:
        """Close every connection, after the event loop has been closed."""
        while self._open:
            self._open.pop().pgconn.finish()
        self._idle.clear()


def _ignore(notification: psycopg.Notify) -> None:
    """A pooler's session may listen for somebody who has gone: psycopg would keep all it hears."""


async def _fetch(connection: AsyncConnection, statement: str, parameters: dict[str, Any]) -> list[Row]:
    cursor = await connection.execute(statement, parameters, binary=True)
    return await cursor.fetchall()
