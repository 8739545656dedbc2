"""Raw psycopg connections made from a Django alias, for work that Django's own connections cannot do.

Every one has an application name, notices a dead peer, is in autocommit, and keeps no session state, so that it
also works through a transaction pooler (the listener's `LISTEN` is the exception).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

_CONNECT_SECONDS = 10
_DEAD_PEER = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_APPLICATION_PREFIX = "pgstreams-"


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
    return {
        "connect_timeout": _CONNECT_SECONDS,
        **_DEAD_PEER,
        **own,
        "application_name": application_name(role),
        "autocommit": True,
    }


def connect(using: str, role: str) -> psycopg.Connection[tuple[Any, ...]]:
    """A new blocking connection. Raises `psycopg.OperationalError`."""
    return psycopg.connect(**parameters(using, role))


async def aconnect(using: str, role: str) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """A new asyncio connection. Raises `psycopg.OperationalError`."""
    given = await asyncio.to_thread(parameters, using, role)
    return await psycopg.AsyncConnection.connect(**given)


class ReadPool:
    """At most `size` asyncio connections of one event loop, opened when needed and served first come, first served.

    It has no task of its own, so nothing outlives the loop that uses it: whoever owns it calls `close_idle` now and
    then, and `close` at the end.
    """

    def __init__(self, using: str, role: str, *, size: int, timeout_seconds: float) -> None:
        self._using = using
        self._role = role
        self._timeout_seconds = timeout_seconds
        self._turns = asyncio.Semaphore(size)
        self._idle: deque[tuple[float, psycopg.AsyncConnection[tuple[Any, ...]]]] = deque()

    async def fetch(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement on a free connection and return its rows.

        Raises `psycopg.Error`, or `TimeoutError` past the deadline; the connection is given up then.
        """
        async with self._turns, self._connection() as connection:
            async with asyncio.timeout(self._timeout_seconds):
                cursor = await connection.execute(statement, parameters, binary=True)
                return await cursor.fetchall()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
        if self._idle:
            _, connection = self._idle.pop()
        else:
            connection = await aconnect(self._using, self._role)
        try:
            yield connection
        except BaseException:
            # Half-read or broken: it must not serve the next reader.
            await connection.close()
            raise
        self._idle.append((time.monotonic(), connection))

    async def close_idle(self, idle_seconds: float) -> None:
        """Close the connections that nobody has used for so long."""
        before = time.monotonic() - idle_seconds
        while self._idle and self._idle[0][0] <= before:
            await self._idle.popleft()[1].close()

    async def close(self) -> None:
        """Close the connections that are not in use."""
        await self.close_idle(0)
