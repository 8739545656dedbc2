"""One Postgres of our own: its processes, and its data in a directory that goes with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import psycopg
from psycopg.conninfo import make_conninfo

from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.processes import PATIENCE_SECONDS
from example_project.embedded.cluster import PORT, Cluster, run_as, server_account
from example_project.embedded.locks import try_exclusive
from example_project.embedded.postgres import (
    SUPERUSER,
    create_data,
    is_ready,
    open_to,
    spawn,
    usable_binaries,
)

SETTINGS = {"max_connections": "300", "listen_addresses": "", "unix_socket_permissions": "0700"}
"""All else is Postgres's default."""

STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

_RETRY_SECONDS = 0.02


class Node:
    """A Postgres from the embedded package's binaries, or a standby of one."""

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Its files are made inside an existing directory; its processes get this environment too."""
        self._settings = SETTINGS | dict(settings or {})
        self._environment = dict(environment or {})
        self._account = server_account()
        self._process: subprocess.Popen[bytes] | None = None
        # The server's account passes through it.
        directory.chmod(0o711)
        self._cluster = Cluster(directory)
        self._cluster.prepare()
        open_to(self._cluster, self._account)
        self._binaries = usable_binaries(self._cluster, self._account)

    @property
    def address(self) -> str:
        """The superuser's way to the database `postgres`, by the server's Unix socket."""
        return make_conninfo(host=os.fspath(self._cluster.data), port=PORT, user=SUPERUSER, dbname="postgres")

    @property
    def socket(self) -> str:
        """The path of its Unix socket."""
        return os.fspath(self._cluster.socket)

    @property
    def is_running(self) -> bool:
        """Whether its first process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._cluster.log.read_text(errors="replace") if self._cluster.log.exists() else ""

    # Its data --------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make an empty cluster of databases."""
        lock = try_exclusive(self._cluster.postgres)
        assert lock is not None
        try:
            create_data(self._cluster, self._account, self._binaries, lock)
        finally:
            os.close(lock)

    def copy_from(self, primary: Node) -> None:
        """Make it a standby of a server that runs, with all that server's data."""
        data = self._cluster.data
        data.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(data, self._account.uid, self._account.gid)
        options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        command = [self._binaries / "pg_basebackup", f"--pgdata={data}", f"--dbname={primary.address}"]
        try:
            run_as(self._account, [*command, *options])
        except subprocess.CalledProcessError as error:
            raise BenchmarkError(f"pg_basebackup failed:\n{error.stdout}") from error

    def remove(self) -> None:
        """Remove the data of a server that does not run."""
        shutil.rmtree(self._cluster.base)

    # Its processes ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until it takes connections. Raises `BenchmarkError` when it does not."""
        # None of its processes lives, so these files are a killed server's.
        for left_behind in (self._cluster.pid_file, self._cluster.socket_lock_file):
            left_behind.unlink(missing_ok=True)
        command = [self._binaries / "postgres", "-D", self._cluster.data, "-k", self._cluster.data]
        self._process = spawn(
            command, self._settings, self._cluster.log, self._account, environment=self._environment
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_ready(self._cluster):
            if not self.is_running or time.monotonic() > deadline:
                raise BenchmarkError(f"Postgres did not start:\n{self.log}")
            time.sleep(_RETRY_SECONDS)

    def stop(self, mode: str = "fast") -> None:
        """Stop it if it runs: "fast" ends sessions and writes everything down, "immediate" does neither."""
        if self.is_running:
            assert self._process is not None
            self._process.send_signal(STOP_SIGNALS[mode])
            self._process.wait()

    def kill(self) -> None:
        """Kill all its processes, as the end of its machine would."""
        if self._process is None or self._process.poll() is not None:
            return
        # Each of them leads a session of its own. The first one stands still, or it would start more.
        first = psutil.Process(self._process.pid)
        first.suspend()
        others = first.children(recursive=True)
        for process in (*others, first):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(map(_is_alive, others)):
            if time.monotonic() > deadline:
                raise BenchmarkError("Processes of Postgres survive being killed.")
            time.sleep(_RETRY_SECONDS)

    def restart(self, mode: str = "fast") -> None:
        """Stop it and start it again."""
        self.stop(mode)
        self.start()

    def promote(self) -> None:
        """Make a standby a server of its own; it then takes writes."""
        with psycopg.connect(self.address, autocommit=True) as own:
            [(promoted,)] = own.execute("SELECT pg_promote(true, %s)", [int(PATIENCE_SECONDS)]).fetchall()
        if not promoted:
            raise BenchmarkError(f"The standby was not promoted:\n{self.log}")


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process holds anything yet: a dead one need not have been reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
