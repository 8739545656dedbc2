"""A real PgBouncer before the test database, and Django aliases that lead through it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psycopg
from django.db import connection
from psycopg.conninfo import make_conninfo

from example_project.embedded.cluster import become, server_account
from tests.aliases import alias
from tests.postgres_proxy import through
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRAM = "/usr/sbin/pgbouncer"


class PgBouncer:
    """A pooler on a port of its own, in one mode at a time; the Django alias `alias` goes through it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._account = server_account()
        self._process: subprocess.Popen[bytes] | None = None
        self._server = connection.get_connection_params()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.alias = ""
        self._write("users", f'"{self.user}" "{self._server.get("password", "")}"\n')
        if self._account is not None:
            os.chown(directory, self._account.uid, self._account.gid)

    @property
    def user(self) -> str:
        """Who logs in, without a password."""
        return str(self._server["user"])

    @property
    def conninfo(self) -> str:
        """The test database, through the pooler."""
        return make_conninfo(
            host="127.0.0.1", port=self.port, user=self.user, dbname=self._server["dbname"], sslmode="disable"
        )

    @property
    def url(self) -> str:
        """The same, for a process's DATABASE_URL."""
        return (
            f"postgresql://{quote(self.user, safe='')}@127.0.0.1:{self.port}/{self._server['dbname']}"
            "?sslmode=disable"
        )

    def start(self, *, mode: str = "transaction", size: int = 20) -> None:
        """Start it with a pool of so many sessions, and wait until it passes queries on."""
        host = self._server.get("host", "localhost")
        self._write(
            "pgbouncer.ini",
            f"""
            [databases]
            * = host={host} port={self._server.get("port", 5432)}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = trust
            auth_file = {self._directory}/users
            pool_mode = {mode}
            default_pool_size = {size}
            """,
        )
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_PROGRAM, "--quiet", self._directory / "pgbouncer.ini"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                **become(self._account),
            )
        wait_until(self._answers, "the pooler passes queries on")

    def _write(self, name: str, text: str) -> None:
        path = self._directory / name
        path.write_text("\n".join(line.strip() for line in text.splitlines()) + "\n")
        if self._account is not None:
            os.chown(path, self._account.uid, self._account.gid)
        path.chmod(0o600)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text()
        with contextlib.suppress(psycopg.OperationalError):
            return self.query("SELECT 1") == [(1,)]
        return False

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows of a statement through the pooler."""
        with psycopg.connect(self.conninfo, autocommit=True, prepare_threshold=None) as own:
            return own.execute(statement).fetchall()

    def stop(self) -> None:
        """Kill it: all its connections are gone, on both sides."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def pooler() -> Iterator[PgBouncer]:
    """A pooler that a test starts; for a fixture."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pgbouncer-", ignore_cleanup_errors=True) as path:
        made = PgBouncer(Path(path))
        with alias("pooled", **through(made.port), USER=made.user) as made.alias:
            yield made
        made.stop()
