"""A Postgres of the tests' own, which they may stop, and fill, and whose settings they choose."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from benchmarks.shared.node import Node
from benchmarks.shared.postgres import fresh_database
from django_pgstreams import receivers
from example_project.embedded.cluster import Cluster
from tests.aliases import alias, settings_of

_SETTINGS = {
    "max_notify_queue_pages": "64",  # as few as there may be
    "fsync": "off",
}


class PrivatePostgres(Node):
    """A server with one database, which the Django alias `alias` leads to."""

    alias = ""
    conninfo = ""

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a statement on a connection of its own."""
        with self.connect() as own:
            cursor = own.execute(statement, values)
            return cursor.fetchall() if cursor.description else []

    def connect(self, **more: Any) -> psycopg.Connection[Any]:
        """A connection of the test's own, in autocommit."""
        return psycopg.connect(self.conninfo, autocommit=True, **more)

    def sessions(self, role: str) -> list[int]:
        """The server processes of its sessions in a role (`listener`, …)."""
        rows = self.query("SELECT pid FROM pg_stat_activity WHERE application_name = %s", f"pgstreams-{role}")
        return [pid for (pid,) in rows]


@pytest.fixture(scope="session")
def private_server() -> Iterator[PrivatePostgres]:
    """The server, once for all tests."""
    base = Cluster.of_this_checkout().base
    with tempfile.TemporaryDirectory(prefix="own-", dir=base, ignore_cleanup_errors=True) as directory:
        server = PrivatePostgres(Path(directory), settings=_SETTINGS)
        server.create()
        server.start()
        try:
            with fresh_database(server.address) as database:
                server.conninfo = database
                yield server
        finally:
            server.stop("immediate")


@pytest.fixture
def private(private_server: PrivatePostgres, live: None) -> Iterator[PrivatePostgres]:
    """The server, with its Django alias."""
    with alias("private", **settings_of(private_server.conninfo)) as private_server.alias:
        yield private_server
        receivers.release()
        if not private_server.is_running:
            private_server.start()
    private_server.query("DELETE FROM pgstreams_chunk")
    private_server.query("DELETE FROM pgstreams_stream")
