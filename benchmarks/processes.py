"""What benchmarks run on: a database of their own, Daphne, and Python programs that talk JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from example_project.embedded.cluster import PORT, Cluster
from example_project.embedded.postgres import SUPERUSER
from example_project.embedded.server import ensure_running

PROJECT_ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 60.0


class BenchmarkError(Exception):
    """The benchmark could not be run, or what it ran on did wrong."""


@contextlib.contextmanager
def own_database(url: str | None) -> Iterator[str]:
    """A new database on the server of a URL, else on the embedded one, dropped at the end; its address."""
    server = conninfo_to_dict(url) if url else _embedded_server()
    name = f"pgstreams_benchmark_{secrets.token_hex(4)}"
    with psycopg.connect(make_conninfo(**server), autocommit=True) as own:
        own.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield make_conninfo(**server | {"dbname": name})
        finally:
            own.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _embedded_server() -> dict[str, Any]:
    cluster = Cluster.of_this_checkout()
    ensure_running(cluster)
    return {"host": os.fspath(cluster.data), "port": PORT, "user": SUPERUSER, "dbname": "postgres"}


class Program:
    """A Python module that runs in a process of its own with the example project's settings.

    What it prints on standard error is kept for the error that its failure raises.
    """

    def __init__(self, database: str, *arguments: str) -> None:
        self._name = " ".join(arguments[:1])
        self._errors: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=PROJECT_ROOT,
            # Django's DEBUG would keep every query in memory.
            env=os.environ
            | {"DATABASE_URL": database, "DJANGO_SETTINGS_MODULE": "example_project.settings", "DEBUG": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        for line in self._process.stderr or ():
            with self._changed:
                self._errors.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def tell(self, message: Any) -> None:
        """Send a JSON line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next JSON line that it prints. Raises `BenchmarkError` when it ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(PATIENCE_SECONDS)
            self._reader.join()
            raise BenchmarkError(f"{self._name} failed:\n{''.join(self._errors)}")
        return json.loads(line)

    def wait_for_error_line(self, pattern: str) -> re.Match[str]:
        """Wait for a line on standard error that a pattern matches."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self._errors)), None)

        with self._changed:
            if not self._changed.wait_for(lambda: found() or not self._reader.is_alive(), PATIENCE_SECONDS):
                raise BenchmarkError(f"{self._name} does not get ready:\n{''.join(self._errors)}")
            if (match := found()) is None:
                raise BenchmarkError(f"{self._name} failed:\n{''.join(self._errors)}")
            return match


@contextlib.contextmanager
def daphne(database: str) -> Iterator[str]:
    """Daphne with the example project; yields the address that its URLs begin with."""
    arguments = ["daphne", "-b", "127.0.0.1", "-p", "0", "--access-log", os.devnull]
    with Program(database, *arguments, "example_project.asgi:application") as server:
        port = server.wait_for_error_line(r"Listening on TCP address 127\.0\.0\.1:(\d+)")[1]
        yield f"ws://127.0.0.1:{port}"
