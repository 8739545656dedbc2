"""A Postgres for one benchmark, and new databases on it."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.node import Node
from benchmarks.shared.processes import PROJECT_ROOT, environment_for
from example_project.embedded.cluster import Cluster, EmbeddedPostgresError


@contextlib.contextmanager
def own_server(environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A new Postgres, stopped and removed at the end; its address. Its processes get this environment too."""
    base = Cluster.of_this_checkout().base
    with tempfile.TemporaryDirectory(prefix="bench-", dir=base, ignore_cleanup_errors=True) as directory:
        try:
            node = Node(Path(directory), environment=environment)
            node.create()
        except EmbeddedPostgresError as error:
            raise BenchmarkError(str(error)) from error
        try:
            node.start()
            yield node.address
        finally:
            # At once: nothing of it is kept.
            node.stop("immediate")


@contextlib.contextmanager
def fresh_database(server: str) -> Iterator[str]:
    """A new database on that server, with the example project's tables, dropped at the end; its address."""
    with empty_database(server) as database:
        migrate(database)
        yield database


@contextlib.contextmanager
def empty_database(server: str) -> Iterator[str]:
    """A new database on that server, dropped at the end; its address."""
    database = new_database(server)
    try:
        yield database
    finally:
        name = sql.Identifier(str(conninfo_to_dict(database)["dbname"]))
        with psycopg.connect(server, autocommit=True) as own:
            own.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def new_database(server: str) -> str:
    """The address of a new database, for a server that is removed as a whole."""
    name = f"pgstreams_benchmark_{secrets.token_hex(4)}"
    with psycopg.connect(server, autocommit=True) as own:
        own.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return make_conninfo(**conninfo_to_dict(server) | {"dbname": name})


def migrate(database: str) -> None:
    """Make the example project's tables."""
    done = subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity=0", "--no-input"],
        cwd=PROJECT_ROOT,
        env=environment_for(database),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise BenchmarkError(f"migrate failed:\n{done.stderr}")


def describe(server: str) -> dict[str, Any]:
    """The server's version, and each setting that is not Postgres's own default; no paths."""
    query = """
        SELECT name, current_setting(name) FROM pg_settings
        WHERE setting IS DISTINCT FROM boot_val
          AND source NOT IN ('default', 'override', 'client', 'session')
          AND setting NOT LIKE '/%'
        ORDER BY name
    """
    with psycopg.connect(server) as own:
        [version] = own.execute("SHOW server_version").fetchall()
        return {"version": version[0], "settings": dict(own.execute(query).fetchall())}
