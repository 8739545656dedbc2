"""What the tests of announcing and following share: fixtures, waiting, the server, other processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from asgiref.sync import sync_to_async
from channels.db import database_sync_to_async
from django.db import connection, connections
from psycopg.conninfo import make_conninfo

from django_pgstreams import hub, listener, receivers, wire
from django_pgstreams.models import Stream
from tests.concurrency import DEADLINE_SECONDS
from tests.postgres_proxy import PostgresProxy, proxied
from tests.waiting import wait_until

_FAREWELL_SECONDS = 10
PROJECT_ROOT = Path(__file__).resolve().parents[1]


# Fixtures ------------------------------------------------------------------------------------------


@pytest.fixture
def live(committed: None) -> Iterator[None]:
    """Commits are real, and nothing of the app is connected before or after."""
    receivers.release()
    yield
    receivers.release()
    wait_until(lambda: not hub._hubs, "every hub is gone")


@pytest.fixture
async def alive(live: None) -> AsyncIterator[None]:
    """The same for an async test, whose database work happens in a thread."""
    yield
    await sync_to_async(connections.close_all)()


@pytest.fixture
def proxy(live: None) -> Iterator[PostgresProxy]:
    """A proxy before the test database; the Django alias `proxy.alias` goes through it."""
    with proxied(PostgresProxy()) as made:
        yield made


# Waiting -------------------------------------------------------------------------------------------


async def until(condition: Callable[[], object], what: str) -> None:
    """`wait_until` for the event loop."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {DEADLINE_SECONDS:.0f} s")
        await asyncio.sleep(0.01)


in_thread = database_sync_to_async


# The server ----------------------------------------------------------------------------------------


def conninfo(**more: Any) -> str:
    """How to reach the test database."""
    given = connection.get_connection_params()
    names = ("host", "port", "user", "password", "dbname")
    return make_conninfo(**{name: given[name] for name in names if name in given}, **more)


def connect(**more: Any) -> psycopg.Connection[Any]:
    """A connection of the test's own, in autocommit."""
    return psycopg.connect(conninfo(**more), autocommit=True)


def query(statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """The rows of a statement on a connection of its own."""
    with connect() as own:
        cursor = own.execute(statement, values)
        return cursor.fetchall() if cursor.description else []


def sessions(role: str, state: str | None = None) -> list[int]:
    """The server processes of this database's sessions in a role (`listener`, …)."""
    rows = query(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s "
        "AND (%s::text IS NULL OR state = %s) ORDER BY pid",
        f"pgstreams-{role}",
        state,
        state,
    )
    return [pid for (pid,) in rows]


def terminate(role: str) -> int:
    """End the sessions in a role; how many there were."""
    return len(
        query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = %s",
            f"pgstreams-{role}",
        )
    )


def waiting_for_lock(role: str) -> list[int]:
    """The server processes in a role that wait for a lock."""
    rows = query(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = %s AND wait_event_type = 'Lock'",
        f"pgstreams-{role}",
    )
    return [pid for (pid,) in rows]


class Ear:
    """A session that listens on the app's channel, as another process would."""

    def __init__(self, channel: str = "pgstreams") -> None:
        self._connection = connect()
        self._connection.execute(f'LISTEN "{channel}"')
        self.payloads: list[str] = []

    def hear(self, seconds: float = 0.0) -> list[str]:
        """Every payload so far, and of the next `seconds`."""
        notes = self._connection.notifies(timeout=seconds)
        # What listeners prove themselves by is about no stream.
        self.payloads += [note.payload for note in notes if not wire.is_probe(note.payload)]
        return self.payloads

    def words(self) -> list[str]:
        """The wake-ups in what was heard so far."""
        return [word for payload in self.hear() for word in payload.split()]

    def heard(self, word: str) -> bool:
        """Whether a wake-up has been heard."""
        return word in self.words()

    def close(self) -> None:
        """Stop listening."""
        self._connection.close()


@pytest.fixture
def ear(live: None) -> Iterator[Ear]:
    """Hears what is announced."""
    made = Ear()
    yield made
    made.close()


# Other processes -----------------------------------------------------------------------------------


def database_url(**changes: object) -> dict[str, str]:
    """The variable that leads a process to the test database."""
    params = connection.get_connection_params() | changes
    query_string = "&".join(
        f"{name}={quote(str(params[name]), safe='')}"
        for name in ("host", "port", "user", "password")
        if params.get(name)
    )
    return {"DATABASE_URL": f"postgresql:///{params['dbname']}?{query_string}"}


def environment(**more: str) -> dict[str, str]:
    """For a Python of its own that works on the test database."""
    return {
        **os.environ,
        **database_url(),
        "WRITER_CONNINFO": conninfo(),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": str(PROJECT_ROOT),
        **more,
    }


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, warnings being errors, and return what it printed."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env=environment(),
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_SECONDS,
    )


class Process:
    """A process that prints JSON lines, and reads lines as commands."""

    def __init__(self, *command: str, **more: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=environment(**more),
            cwd=PROJECT_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def read(self) -> Any:
        """The next line it prints, read as JSON."""
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the process ended: {self._process.wait(DEADLINE_SECONDS)}")
        return json.loads(line)

    def tell(self, command: str) -> None:
        """Send it a line."""
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(4 * DEADLINE_SECONDS)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self._process.kill()
        self._process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        """Let it end, as most do when there is nothing more to read; else end it."""
        self._process.stdin.close()
        try:
            self._process.wait(_FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()


@pytest.fixture(scope="session")
def elsewhere(django_db_setup: None) -> Iterator[Callable[[Stream, str], None]]:
    """Runs a line of Python about a `stream` in another process, which announces what it writes."""
    process = Process("-m", "tests.writers", "commands")
    assert process.read() == "ready"

    def run(stream: Stream, line: str) -> None:
        process.tell(json.dumps([stream.pk, line]))
        assert process.read() == "done"

    yield run
    process.close()


@contextlib.contextmanager
def writer(mode: str, stream: Stream, *arguments: object, **more: str) -> Iterator[Process]:
    """`tests.writers` in a process of its own, which is ready to write."""
    process = Process("-m", "tests.writers", mode, str(stream.pk), *map(str, arguments), **more)
    try:
        assert process.read() == "ready"
        yield process
    finally:
        process.close()


# Streams -------------------------------------------------------------------------------------------


def store(stream: Stream, count: int, given: psycopg.Connection[Any] | None = None) -> None:
    """Append without a word to anybody, as another program does; value = offset."""
    with contextlib.nullcontext(given) if given else connect() as own:
        own.execute(
            """
            WITH taken AS (
                UPDATE pgstreams_stream SET next_offset = next_offset + %(count)s, appended_at = now()
                WHERE id = %(stream)s RETURNING next_offset - %(count)s AS first
            )
            INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
            SELECT %(stream)s, taken.first + n, convert_to((taken.first + n)::text, 'UTF8'), now()
            FROM taken, generate_series(0, %(count)s - 1) AS n
            """,
            {"stream": stream.pk, "count": count},
        )


def trim(stream: Stream, first: int) -> None:
    """Delete the chunks below an offset, as retention does."""
    with connect() as own, own.transaction():
        own.execute(
            "UPDATE pgstreams_stream SET first_offset = greatest(first_offset, %s) WHERE id = %s",
            (first, stream.pk),
        )
        own.execute('DELETE FROM pgstreams_chunk WHERE stream_id = %s AND "offset" < %s', (stream.pk, first))


def is_listening(using: str = "default") -> bool:
    """Whether this process has heard from its own listener."""
    return listener.get(using).connects > 0
