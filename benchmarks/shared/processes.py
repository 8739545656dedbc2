"""Programs in processes of their own that talk JSON lines, and the web servers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks.shared.errors import BenchmarkError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0
ANSWER_SECONDS = 300.0
APPLICATION = "example_project.asgi:application"


def environment_for(database: str) -> dict[str, str]:
    """The environment of a program with the example project's settings and this database."""
    # Django's DEBUG would keep every query in memory.
    own = {"DATABASE_URL": database, "DJANGO_SETTINGS_MODULE": "example_project.settings", "DEBUG": "0"}
    return os.environ | own


class Program:
    """A Python module that runs in a process of its own with the example project's settings.

    What it prints on standard error is kept for the error that its failure raises. Leaving the block ends it.
    """

    def __init__(self, database: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = arguments[0]
        self._errors: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=PROJECT_ROOT,
            env=environment_for(database) | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            # Ctrl-C is for us, who then end it.
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read_lines, self._read_errors)
        ]
        for thread in self._threads:
            thread.start()

    def _read_lines(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

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
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that killed it."""
        return self._process.poll()

    @property
    def errors(self) -> str:
        """What it has printed on standard error."""
        return "".join(self._errors)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, once it has ended; None if it has not after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code

    def tell(self, message: Any) -> None:
        """Send a JSON line. Raises `BenchmarkError` when it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def hear(self, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        """The next JSON line that it prints. Raises `BenchmarkError` when it ends or stays silent."""
        try:
            line = self._lines.get(timeout=timeout_seconds)
        except queue.Empty:
            raise self._failure(f"said nothing for {timeout_seconds:g} s") from None
        if line is None:
            self._process.wait(PATIENCE_SECONDS)
            raise self._failure(f"failed ({self._process.returncode})")
        return json.loads(line)

    def wait_for_error_line(self, pattern: str) -> re.Match[str]:
        """Wait for a line on standard error that a pattern matches."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self._errors)), None)

        with self._changed:
            reads_errors = self._threads[1].is_alive
            if not self._changed.wait_for(lambda: found() or not reads_errors(), PATIENCE_SECONDS):
                raise self._failure("does not get ready")
            if (match := found()) is None:
                raise self._failure("failed")
            return match

    def _failure(self, what: str) -> BenchmarkError:
        if self._process.poll() is not None:
            self._threads[1].join(PATIENCE_SECONDS)
        return BenchmarkError(f"{self.name} {what}:\n{''.join(self._errors)}")


class WebServer(Program):
    """A server in a process of its own; `url` is what its websockets' addresses begin with."""

    url = ""


@contextlib.contextmanager
def daphne(
    database: str, application: str = APPLICATION, *, environment: Mapping[str, str] | None = None
) -> Iterator[WebServer]:
    """Daphne with an ASGI application, the example project's by default."""
    arguments = ["daphne", "-b", "127.0.0.1", "-p", "0", "--access-log", os.devnull, application]
    with WebServer(database, *arguments, environment=environment) as server:
        port = server.wait_for_error_line(r"Listening on TCP address 127\.0\.0\.1:(\d+)")[1]
        server.url = f"ws://127.0.0.1:{port}"
        yield server


@contextlib.contextmanager
def uvicorn(
    database: str, application: str = APPLICATION, *, environment: Mapping[str, str] | None = None
) -> Iterator[WebServer]:
    """uvicorn with an ASGI application, the example project's by default; one process."""
    arguments = ["uvicorn", "--host", "127.0.0.1", "--port", "0", "--no-access-log", application]
    with WebServer(database, *arguments, environment=environment) as server:
        port = server.wait_for_error_line(r"Uvicorn running on http://127\.0\.0\.1:(\d+)")[1]
        server.url = f"ws://127.0.0.1:{port}"
        yield server
