"""Real servers in processes of their own, on the tests' database, and real websockets to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from django.db import connection
from django.test import Client
from psycopg import sql
from psycopg.conninfo import make_conninfo
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT_ROOT = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 90.0
_TROUBLE = re.compile(
    r"Traceback|\bERROR\b|\bCRITICAL\b|ResourceWarning"
    r"|never retrieved|never awaited|took too long|destroyed but"
)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Role:
    """A database role for one server, so that its sessions can be told from everybody else's."""

    def __init__(self) -> None:
        self.name = f"pgstreams_served_{secrets.token_hex(4)}"
        self._password = secrets.token_hex(8)

    def create(self) -> None:
        self._execute("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}", sql.Literal(self._password))

    def drop(self) -> None:
        self.end_sessions()
        self._execute("DROP ROLE {}")

    def lock_out(self) -> None:
        """Let it neither go on nor come back, as a database that is away."""
        self._execute("ALTER ROLE {} NOLOGIN")
        self.end_sessions()

    def let_in(self) -> None:
        self._execute("ALTER ROLE {} LOGIN")

    def end_sessions(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [self.name]
            )

    def sessions(self) -> list[str]:
        """The application names of its sessions."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT application_name FROM pg_stat_activity WHERE usename = %s", [self.name])
            return sorted(name for (name,) in cursor.fetchall())

    def page_queries(self) -> int:
        """How often it has run the statement that reads chunks, by the server's own count."""
        return self.calls("pgstreams_pages")

    def calls(self, part: str) -> int:
        """How often it has run statements that hold a text, by the server's own count."""
        with connection.cursor() as cursor:
            cursor.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
            cursor.execute(
                """SELECT coalesce(sum(s.calls), 0) FROM pg_stat_statements AS s
                   JOIN pg_roles AS r ON r.oid = s.userid
                   WHERE r.rolname = %s AND position(%s IN s.query) > 0""",
                [self.name, part],
            )
            return int(cursor.fetchone()[0])

    @property
    def conninfo(self) -> str:
        """The tests' database, for this role."""
        own = connection.get_connection_params()
        place = {name: own[name] for name in ("host", "port", "dbname") if name in own}
        return make_conninfo(**place, user=self.name, password=self._password)

    def _execute(self, statement: str, *parts: sql.Composable) -> None:
        with connection.cursor() as cursor:
            cursor.cursor.execute(sql.SQL(statement).format(sql.Identifier(self.name), *parts))


_SERVED = "tests.served:application"
_GUNICORN = ["-m", "gunicorn", "--preload", "--workers", "4", "--bind", "127.0.0.1:0", "--worker-class"]
_GUNICORN_LISTENS = r"Listening at: http://127\.0\.0\.1:(\d+)"
_UWSGI = ["-c", "import pyuwsgi; pyuwsgi.run()", "--master", "--no-orphans", "--die-on-term", "--lazy-apps"]
_UWSGI_CHILDREN = ["--processes", "4", "--threads", "4"]
_PATIENT = ["--websocket_connect_timeout", "60"]
COMMANDS = {
    "daphne": (
        # With room for a crowd that comes at once, and time for its handshakes.
        [*["-m", "daphne", "-e", "tcp:port=0:interface=127.0.0.1:backlog=2048"], *_PATIENT, _SERVED],
        r"Listening on TCP address 127\.0\.0\.1:(\d+)",
    ),
    "uvicorn": (["-m", "uvicorn", "--port", "0", _SERVED], r"running on http://127\.0\.0\.1:(\d+)"),
    "hypercorn": (["-m", "hypercorn", "-b", "127.0.0.1:0", _SERVED], r"Running on http://127\.0\.0\.1:(\d+)"),
    "gunicorn sync": ([*_GUNICORN, "sync", "tests.preloaded:wsgi"], _GUNICORN_LISTENS),
    "gunicorn gthread": (
        [*_GUNICORN, "gthread", "--threads", "4", "tests.preloaded:wsgi"],
        _GUNICORN_LISTENS,
    ),
    "gunicorn uvicorn": (
        [*_GUNICORN, "uvicorn_worker.UvicornWorker", "tests.preloaded:asgi"],
        _GUNICORN_LISTENS,
    ),
    "uwsgi": (
        [*_UWSGI, *_UWSGI_CHILDREN, "--http-socket", "127.0.0.1:0", "--module", "tests.preloaded:wsgi"],
        r"bound to TCP address 127\.0\.0\.1:(\d+)",
    ),
}


class ServerProcess:
    """A running server, and what it has printed."""

    def __init__(self, kind: str, role: Role, settings: dict[str, Any]) -> None:
        arguments, self._listens = COMMANDS[kind]
        self.role = role
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=PROJECT_ROOT,
            env=os.environ
            | {
                "DATABASE_URL": role.conninfo,
                "DJANGO_SETTINGS_MODULE": "tests.served_settings",
                "SERVED_SETTINGS": json.dumps(settings),
                "PYTHONWARNINGS": "default",
            },
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

    def wait_ready(self) -> None:
        wait_until(
            lambda: re.search(self._listens, self.output) or self._process.poll() is not None,
            "the server listens",
        )
        assert self._process.poll() is None, self.output
        self.port = int(re.search(self._listens, self.output)[1])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def trouble(self, since: int = 0) -> str:
        """What it has printed from a line on, if it holds an error or a warning that nobody wants to see."""
        output = "".join(self._lines[since:])
        return output if _TROUBLE.search(output) else ""

    @property
    def lines_printed(self) -> int:
        return len(self._lines)

    def look(self) -> dict[str, Any]:
        """Its sockets, followers and tasks."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=DEADLINE_SECONDS) as answer:
            return json.load(answer)

    def wait_empty(self) -> None:
        """Wait until no socket has left anything in it."""
        nothing = {"sockets": 0, "followers": 0, "tasks": []}
        wait_until(lambda: self.look() == nothing, "the server forgets its sockets")

    def url(self, key: str = "", *, port: int | None = None, safe: str = "/", **query: Any) -> str:
        """The websocket's URL for one stream, or for many."""
        path = f"{urllib.parse.quote(key, safe=safe)}/" if key else ""
        return f"ws://127.0.0.1:{port or self.port}/ws/streams/{path}?{urllib.parse.urlencode(query)}".rstrip(
            "?"
        )

    def stop(self) -> int:
        """End it as a supervisor does, and return the exit code."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        return code

    def close(self) -> None:
        """Make sure that it is gone, with its children, however the test went."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        self._process.stdout.close()


@contextlib.contextmanager
def serving(kind: str, **settings: Any) -> Iterator[ServerProcess]:
    """A server on the tests' database."""
    role = Role()
    role.create()
    try:
        server = ServerProcess(kind, role, settings)
        try:
            server.wait_ready()
            yield server
        finally:
            server.close()
    finally:
        role.drop()


@contextlib.contextmanager
def untroubled(server: ServerProcess) -> Iterator[ServerProcess]:
    """A server that has forgotten every socket at the end, and has nothing to complain of."""
    since = server.lines_printed
    yield server
    server.wait_empty()
    assert not server.trouble(since)


def headers_of(user: Any) -> dict[str, str]:
    """The headers of a browser that is logged in as a user."""
    client = Client()
    client.force_login(user)
    return {"Cookie": f"sessionid={client.cookies['sessionid'].value}", "Origin": "http://127.0.0.1"}


ANYBODY = {"Origin": "http://127.0.0.1"}


class Connection(ClientConnection):
    """A client's connection that keeps what came with the server's close when the answer to it fails.

    The server may have gone by then; the library drops all that it read in one piece with the close.
    """

    def send_data(self) -> None:
        try:
            super().send_data()
        except ConnectionError:
            if not self.protocol.close_expected():
                raise


class Socket:
    """A real websocket. Pings of the protocol are left out; what is read as a frame is acknowledged."""

    def __init__(
        self, url: str, headers: dict[str, str], *, acknowledges: bool = True, **options: Any
    ) -> None:
        self._acknowledges = acknowledges
        connecting = connect(
            url,
            additional_headers=headers,
            open_timeout=DEADLINE_SECONDS,
            compression=None,
            max_size=None,
            proxy=None,
            create_connection=Connection,
            **options,
        )
        self._end = contextlib.ExitStack()
        self.websocket: ClientConnection = self._end.enter_context(connecting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Close as a browser does."""
        self._end.close()

    def send(self, kind: str, stream: str, **fields: Any) -> None:
        self.websocket.send(json.dumps({"type": kind, "stream": stream, **fields}))

    def text(self) -> str:
        while (text := self.websocket.recv(DEADLINE_SECONDS)) == '{"type":"ping"}':
            pass
        return text

    def frame(self) -> dict[str, Any]:
        frame = json.loads(self.text())
        if frame["type"] == "chunks" and self._acknowledges:
            with contextlib.suppress(ConnectionClosed):
                self.send("ack", frame["stream"], offset=frame["next"])
        return frame

    def frames(self, last: str) -> list[dict[str, Any]]:
        """The next frames, up to the first of a type."""
        found = [self.frame()]
        while found[-1]["type"] != last:
            found.append(self.frame())
        return found

    def close_code(self) -> int:
        """The code that the server closes with; fails when a frame comes instead."""
        try:
            text = self.text()
        except ConnectionClosed:
            return self.websocket.close_code
        raise AssertionError(f"A frame came instead of the end: {text[:200]}")

    def vanish(self) -> None:
        """Reset the connection: no closing handshake, as when a cable is pulled."""
        raw = self.websocket.socket
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)
        raw.close()
