"""Debian's Postgres 15, one of a test's own: it speaks TLS, and logs all that it is asked."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from example_project.embedded.cluster import Cluster, run_as, server_account
from example_project.embedded.postgres import spawn
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

_BINARIES = Path("/usr/lib/postgresql/15/bin")
_PROJECT_ROOT = Path(__file__).resolve().parents[1]
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "ssl": "on",
    "fsync": "off",
    "log_connections": "on",
    "log_statement": "all",
    "log_line_prefix": "[%d %a] ",
}


class DebianPostgres:
    """A running server; its superuser needs no password."""

    def __init__(self, directory: Path) -> None:
        self._account = server_account()
        self._log = directory / "log"
        if self._account is not None:
            os.chown(directory, self._account.uid, self._account.gid)
        data = directory / "data"
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        run_as(self._account, [_BINARIES / "initdb", f"--pgdata={data}", *options])
        certificate = ["-subj", "/CN=localhost", "-keyout", data / "server.key", "-out", data / "server.crt"]
        run_as(self._account, ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *certificate])
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [_BINARIES / "postgres", "-D", data, "-p", str(self.port)]
        self._server = spawn(command, _SETTINGS, self._log, self._account)
        wait_until(self._is_ready, "Debian's Postgres takes connections")

    def _is_ready(self) -> bool:
        assert self._server.poll() is None, self.log
        with contextlib.suppress(psycopg.OperationalError):
            self.connect("postgres").close()
            return True
        return False

    @property
    def log(self) -> str:
        """What it has logged: each connection, statement and error, with database and application name."""
        return self._log.read_text(errors="replace")

    def url(self, database: str) -> str:
        """A database's address, which admits no connection without TLS."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}?sslmode=require"

    def connect(self, database: str) -> psycopg.Connection[Any]:
        """A connection of the test's own, in autocommit."""
        return psycopg.connect(self.url(database), autocommit=True)

    def new_database(self) -> str:
        """Make an empty database; its name."""
        name = f"own_{secrets.token_hex(4)}"
        with self.connect("postgres") as own:
            own.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return name

    def close(self) -> None:
        """Stop it at once: nothing of it is kept."""
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait()


def migrate(url: str) -> None:
    """Make the tables of the tests' project in a database."""
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "manage.py", "migrate", "--verbosity=0"]
    subprocess.run(command, cwd=_PROJECT_ROOT, env=environment, check=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def debian_postgres() -> Iterator[DebianPostgres]:
    """Debian's Postgres."""
    if not (_BINARIES / "postgres").is_file():
        pytest.skip("Debian's package postgresql-15 is not installed")
    base = Cluster.of_this_checkout().base
    with (
        tempfile.TemporaryDirectory(prefix="debian-", dir=base, ignore_cleanup_errors=True) as directory,
        contextlib.closing(DebianPostgres(Path(directory))) as server,
    ):
        yield server
