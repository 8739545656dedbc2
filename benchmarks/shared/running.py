"""One measurement's surroundings: how long, on which Postgres, and the progress bar."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.postgres import describe, fresh_database, own_server

_STEP_SECONDS = 0.2


class Run:
    """What a benchmark's `measure` gets."""

    def __init__(self, name: str, options: argparse.Namespace, database_url: str | None) -> None:
        self.name = name
        self.options = options
        self.seconds: float = options.seconds
        self._database_url = database_url
        self.postgres: dict[str, Any] | None = None
        """The version and the settings of the first server that was used."""

    @property
    def has_own_server(self) -> bool:
        """Whether Postgres is ours to start; else it is one that the user named."""
        return self._database_url is None

    @contextlib.contextmanager
    def server(self, environment: Mapping[str, str] | None = None) -> Iterator[str]:
        """The address of a new Postgres, started with this environment; else of the user's."""
        if self._database_url is None:
            with own_server(environment) as server:
                self.describe(server)
                yield server
        elif environment:
            raise BenchmarkError("This part starts its own Postgres: run it without a database's URL.")
        else:
            self.describe(self._database_url)
            yield self._database_url

    def describe(self, server: str) -> None:
        """Note this server's version and settings for the report, if none has been noted."""
        if self.postgres is None:
            self.postgres = describe(server)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The address of a new, migrated database on a server of its own, or on the user's."""
        with self.server() as server, fresh_database(server) as database:
            yield database

    @contextlib.contextmanager
    def progress(self, what: str, seconds: float) -> Iterator[None]:
        """A bar on standard error, where that is a terminal, that fills in so many seconds."""
        left = threading.Event()
        with tqdm(total=round(seconds, 1), desc=f"{self.name}: {what}", unit="s", disable=None) as bar:

            def tick() -> None:
                while not left.wait(_STEP_SECONDS):
                    bar.update(max(0.0, min(_STEP_SECONDS, bar.total - bar.n)))

            ticking = threading.Thread(target=tick, name="progress", daemon=True)
            if sys.stderr.isatty():
                ticking.start()
            try:
                yield
            finally:
                left.set()
                if ticking.ident:
                    ticking.join()
