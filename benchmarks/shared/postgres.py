"""A Postgres for one benchmark, and new databases on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.processes import PATIENCE_SECONDS, PROJECT_ROOT, environment_for
from example_project.embedded.cluster import PORT, Cluster, EmbeddedPostgresError, become, server_account
from example_project.embedded.locks import try_exclusive
from example_project.embedded.postgres import SUPERUSER, create_data, is_ready, open_to, usable_binaries

SETTINGS = {"max_connections": "300", "listen_addresses": "", "unix_socket_permissions": "0700"}
"""All else is Postgres's default."""

RETRY_SECONDS = 0.02


@contextlib.contextmanager
def own_server(environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A new Postgres, stopped and removed at the end; its address. Its processes get this environment too."""
    base = Cluster.of_this_checkout().base
    with tempfile.TemporaryDirectory(prefix="bench-", dir=base, ignore_cleanup_errors=True) as directory:
        # The server's account passes through it.
        Path(directory).chmod(0o711)
        cluster = Cluster(Path(directory))
        try:
            server = _start(cluster, environment or {})
        except EmbeddedPostgresError as error:
            raise BenchmarkError(str(error)) from error
        try:
            _wait_until_ready(cluster, server)
            yield make_conninfo(host=os.fspath(cluster.data), port=PORT, user=SUPERUSER, dbname="postgres")
        finally:
            # At once: nothing of it is kept.
            server.send_signal(signal.SIGQUIT)
            server.wait()


def _start(cluster: Cluster, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    account = server_account()
    cluster.prepare()
    open_to(cluster, account)
    binaries = usable_binaries(cluster, account)
    lock = try_exclusive(cluster.postgres)
    assert lock is not None
    try:
        create_data(cluster, account, binaries, lock)
    finally:
        os.close(lock)
    command: list[Any] = [binaries / "postgres", "-D", cluster.data, "-k", cluster.data]
    for name, value in SETTINGS.items():
        command += ["-c", f"{name}={value}"]
    options: dict[str, Any] = become(account)
    options["env"] |= environment
    with cluster.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            # Ctrl-C is for us, who then stop it.
            start_new_session=True,
            **options,
        )


def _wait_until_ready(cluster: Cluster, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_ready(cluster):
        if server.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"Postgres did not start:\n{cluster.log.read_text(errors='replace')}")
        time.sleep(RETRY_SECONDS)


@contextlib.contextmanager
def fresh_database(server: str) -> Iterator[str]:
    """A new database on that server, with the example project's tables, dropped at the end; its address."""
    with empty_database(server) as database:
        _migrate(database)
        yield database


@contextlib.contextmanager
def empty_database(server: str) -> Iterator[str]:
    """A new database on that server, dropped at the end; its address."""
    name = f"pgstreams_benchmark_{secrets.token_hex(4)}"
    with psycopg.connect(server, autocommit=True) as own:
        own.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield make_conninfo(**conninfo_to_dict(server) | {"dbname": name})
        finally:
            own.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _migrate(database: str) -> None:
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
