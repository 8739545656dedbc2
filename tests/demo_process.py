"""`manage.py demo` in a process and on a database of its own, and visitors without a browser."""

from __future__ import annotations

import http.cookiejar
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from django.db import connection
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT_ROOT = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 30.0


class DemoDatabase:
    """The database that a demo uses; tests look into it with plain SQL."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo

    def rows(self, query: str, *parameters: object) -> list[dict[str, Any]]:
        """What a query finds."""
        with psycopg.connect(self.conninfo, row_factory=dict_row) as own:
            return own.execute(query, parameters).fetchall()

    def stream(self, key: str) -> dict[str, Any]:
        """The row of a stream."""
        (row,) = self.rows("SELECT * FROM pgstreams_stream WHERE key = %s", key)
        return row

    def payloads(self, key: str) -> list[bytes]:
        """The payloads of a stream that are stored, in the order of their offsets."""
        rows = self.rows(
            'SELECT s.first_offset, c.payload, c."offset" FROM pgstreams_chunk c'
            " JOIN pgstreams_stream s ON s.id = c.stream_id"
            ' WHERE s.key = %s ORDER BY c."offset"',
            key,
        )
        first = rows[0]["first_offset"] if rows else 0
        assert [row["offset"] for row in rows] == list(range(first, first + len(rows)))
        return [bytes(row["payload"]) for row in rows]

    def trim(self, key: str, first_offset: int) -> None:
        """Delete a stream's chunks below an offset."""
        self.rows(
            "WITH stream AS ("
            "  UPDATE pgstreams_stream SET first_offset = %s WHERE key = %s RETURNING id, first_offset"
            ") DELETE FROM pgstreams_chunk c USING stream"
            '  WHERE c.stream_id = stream.id AND c."offset" < stream.first_offset RETURNING c.stream_id',
            first_offset,
            key,
        )


@contextmanager
def demo_database() -> Iterator[DemoDatabase]:
    """A new database on the server of the tests. Needs access to the tests' own database."""
    parameters = connection.get_connection_params()
    server = {name: parameters[name] for name in ("host", "port", "user", "password") if name in parameters}
    name = sql.Identifier(database := f"test_demo_{secrets.token_hex(4)}")
    with psycopg.connect(make_conninfo(dbname="postgres", **server), autocommit=True) as own:
        own.execute(sql.SQL("CREATE DATABASE {}").format(name))
        try:
            yield DemoDatabase(make_conninfo(dbname=database, **server))
        finally:
            own.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


class DemoProcess:
    """A running `manage.py demo`, and what it has printed."""

    def __init__(self, database: DemoDatabase, *arguments: str) -> None:
        self.database = database
        self._temporary = tempfile.TemporaryDirectory(prefix="demo-test-")
        self.scratch = Path(self._temporary.name)
        self._lines: list[str] = []
        environment = os.environ | {
            "DATABASE_URL": database.conninfo,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "TMPDIR": self._temporary.name,
            "PYTHONWARNINGS": "default",
        }
        self._process = subprocess.Popen(
            [sys.executable, "manage.py", "demo", *arguments],
            cwd=PROJECT_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self._lines.extend(iter(self._process.stdout.readline, ""))

    @property
    def output(self) -> str:
        """What it has printed so far, errors included."""
        return "".join(self._lines)

    def wait_ready(self) -> None:
        """Wait for the line `ready`."""
        wait_until(lambda: "ready\n" in self._lines or self._process.poll() is not None, "the demo starts")
        if "ready\n" not in self._lines:
            self._reader.join()
            pytest.fail(f"The demo ended before it was ready:\n{self.output}")

    @property
    def url(self) -> str:
        """The address of the start page, without the slash."""
        return re.search(r"start +(http://127\.0\.0\.1:\d+)/\n", self.output)[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def send(self, number: signal.Signals) -> None:
        """Signal the whole process group, as a terminal does."""
        os.killpg(self._process.pid, number)

    def wait(self) -> int:
        """Wait for its end, and return the exit code."""
        code = self._process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        return code

    def stop(self) -> int:
        """End it with Ctrl-C if it still runs, and return the exit code."""
        if self._process.poll() is None:
            self.send(signal.SIGINT)
        return self.wait()

    def close(self) -> None:
        """Make sure that it is gone, however the test went."""
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.wait()
        finally:
            self._process.stdout.close()
            self._temporary.cleanup()


class Visitor:
    """A browser session without a browser: cookies, forms, redirects."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._cookies = http.cookiejar.CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self._cookies))

    def get(self, path: str) -> tuple[int, str, str]:
        """The status, the final path and the text of a page."""
        return self._open(urllib.request.Request(self._url + path))

    def post(self, path: str, **fields: object) -> tuple[int, str, str]:
        """Post a form of the page at `path`, or of one seen before; then as `get`."""
        self.get("/ask/")  # sets the CSRF cookie
        token = next(cookie.value for cookie in self._cookies if cookie.name == "csrftoken")
        data = urllib.parse.urlencode({"csrfmiddlewaretoken": token, **fields}).encode()
        return self._open(urllib.request.Request(self._url + path, data))

    def ask(self, **fields: object) -> str:
        """Ask a question, and return the key of the answer's stream."""
        asked = {"prompt": "Why is a raven like a writing-desk?", **fields}
        status, path, _ = self.post("/ask/", **asked)
        assert status == 200
        return path.strip("/")

    def run(self, program: str) -> str:
        """Run a program, and return the key of its stream."""
        status, path, _ = self.post("/log/", program=program)
        assert status == 200
        return path.strip("/")

    def _open(self, request: urllib.request.Request) -> tuple[int, str, str]:
        try:
            answer = self._opener.open(request, timeout=DEADLINE_SECONDS)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            path = urllib.parse.urlsplit(answer.url).path
            return answer.status, path, answer.read().decode()
