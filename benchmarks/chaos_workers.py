"""The processes of a run of `chaos`, which die, stand still, and are started again under their names."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.processes import PATIENCE_SECONDS, Program

LISTENING = {
    "daphne": r"Listening on TCP address 127\.0\.0\.1:(\d+)",
    "uvicorn": r"Uvicorn running on http://127\.0\.0\.1:(\d+)",
}
_lives = itertools.count(1)


class Process:
    """A `chaos_context.Worker`. `start` begins a life of it, and returns once it works."""

    def __init__(self, name: str, kind: str, start: Callable[[int], Program]) -> None:
        self.name = name
        self.kind = kind
        self._start = start
        self._program: Program | None = None
        self._said: list[str] = []

    @property
    def pid(self) -> int:
        """Of its present life."""
        return self._running.pid

    @property
    def _running(self) -> Program:
        assert self._program is not None
        return self._program

    @property
    def is_alive(self) -> bool:
        """Whether it runs; or is stopped."""
        return self._running.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Of the life that has ended."""
        return self._running.exit_code

    @property
    def memory_mib(self) -> float:
        """Its resident memory."""
        return float(psutil.Process(self.pid).memory_info().rss) / 2**20

    def start(self) -> None:
        """Begin its first life."""
        self._program = self._start(next(_lives))

    def restart(self) -> None:
        """Begin another life, if this one has ended."""
        if not self.is_alive:
            self.leave()
            self.start()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._signal(signal.SIGKILL)
        self._running.wait(PATIENCE_SECONDS)

    def stop(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    @property
    def errors(self) -> str:
        """What its present life said on standard error."""
        return self._running.errors

    def ask_to_end(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it still runs after that time."""
        return self._running.wait(seconds)

    def leave(self) -> None:
        """End it, however it is."""
        if self._program is not None:
            self._signal(signal.SIGKILL)
            self._program.__exit__()
            self._said.append(self._program.errors)

    def keep_log(self, directory: Path) -> None:
        """Write down what all its lives said on standard error."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{self.name}.log").write_text("".join(self._said), encoding="utf-8")

    def check(self) -> None:
        """Raises `BenchmarkError` if it has ended by itself."""
        if not self.is_alive:
            raise BenchmarkError(f"{self.name} has ended ({self.exit_code}):\n{self._running.errors[-4000:]}")


class Surroundings:
    """What all processes of a run are started with."""

    def __init__(self, database: str, directory: Path, seed: int, environment: Mapping[str, str]) -> None:
        self._database = database
        self._directory = directory
        self._seed = seed
        self._environment = dict(environment)

    def program(self, module: str, name: str, kind: str, options: Mapping[str, Any]) -> Process:
        """A writer or a reader, which says when it begins."""
        text = json.dumps({"kind": kind, **options})

        def start(life: int) -> Program:
            arguments = [module, name, os.fspath(self._directory), str(life), str(self._seed), text]
            program = Program(self._database, *arguments, environment=self._environment)
            program.hear()
            return program

        return Process(name, kind, start)

    def relay(self) -> Process:
        """`manage.py pgstreams relay`."""

        def start(life: int) -> Program:
            program = Program(self._database, "benchmarks.chaos_relay", environment=self._environment)
            program.wait_for_error_line("Relay|relay")
            return program

        return Process("relay", "relay", start)

    def server(self, kind: str) -> tuple[Process, str]:
        """A web server, and what its websockets' addresses begin with, in each of its lives."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        own = {
            "daphne": ["-b", "127.0.0.1", "-p", str(port), "--access-log", os.devnull],
            "uvicorn": ["--host", "127.0.0.1", "--port", str(port), "--no-access-log"],
        }

        def start(life: int) -> Program:
            arguments = [kind, *own[kind], "benchmarks.chaos_application:application"]
            program = Program(self._database, *arguments, environment=self._environment)
            program.wait_for_error_line(LISTENING[kind])
            return program

        return Process(kind, kind, start), f"ws://127.0.0.1:{port}"
