"""The way in: `ensure_running()` returns once the embedded Postgres takes connections.

Postgres runs while a process uses it, and stops with the last one, however processes end.
The invariant: **whoever holds a shared lease may count on a keeper, and a keeper stops Postgres
only while it holds the lease alone.** Three lock files (flock: released by the kernel with the
last descriptor, inherited by forked children) carry it:

    lease     shared by every client from its first connection to its end
    keeper    held by the one keeper; handed to it, already locked, by the client that starts it
    postgres  held by every process of Postgres, which inherit it, initdb included

A client takes its lease, then asks, again and again until Postgres is ready: is the keeper lock
free? Then it starts a keeper. The keeper takes the postgres lock and starts Postgres, or finds it
running well and adopts it. Then it waits for two things: for the lease to be its alone (it stops
Postgres) and for the postgres lock to be free (it ends, and releases keeper before lease).

- Two first clients: one gets the keeper lock and starts a keeper, the other waits for readiness.
  If the first dies before its keeper runs, the lock is free again and the other starts one.
- The keeper is killed: its lock is free, the next connection of any client starts another, which
  adopts Postgres. (If there is no such connection, Postgres outlives its clients until there is.)
- Postgres is killed: its socket refuses, the keeper ends as soon as the last orphaned process of
  Postgres has, and the client that waits for readiness starts a new one.
- A client arrives while Postgres stops: its lease waits for the keeper's end; then it is a first
  client. If the keeper is killed while it stops, the client's own keeper waits for the postgres
  lock, and starts Postgres afresh.
- A client forks: the child shares its lease, and both must end. A child that starts another
  program does not: the descriptor is closed on exec.
- Postgres's own lock files are left behind: with the postgres lock in hand they can only be a dead
  server's, and are removed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from example_project.embedded.cluster import PROJECT_ROOT, Cluster, EmbeddedPostgresError
from example_project.embedded.keeper import READY_REPORT
from example_project.embedded.locks import RETRY_SECONDS, try_exclusive, wait_shared
from example_project.embedded.postgres import START_SECONDS, failure, is_ready

KEEPER_MODULE = "example_project.embedded.keeper"

KEEPER_ATTEMPTS = 3

# The keeper may have to stop one server and start another.
PATIENCE_SECONDS = 2 * START_SECONDS

_leases: dict[Cluster, int] = {}
_leases_guard = threading.Lock()


def ensure_running(cluster: Cluster) -> None:
    """Return once Postgres takes connections; this process then counts as one that uses it.

    Cheap when it runs already. Raises EmbeddedPostgresError when it cannot be started.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    take_lease(cluster, deadline)
    reports: list[str] = []
    while True:
        keeper_lock = try_exclusive(cluster.keeper)
        if keeper_lock is not None:
            reports.append(start_keeper(cluster, keeper_lock))
            check_reports(cluster, reports)
        if is_ready(cluster):
            return
        if time.monotonic() > deadline:
            raise failure(cluster, f"Postgres was not ready in {PATIENCE_SECONDS:.0f} s.")
        time.sleep(RETRY_SECONDS)


def take_lease(cluster: Cluster, deadline: float) -> None:
    """Take this process's lease, once; it is never given back."""
    with _leases_guard:
        if cluster in _leases:
            return
        cluster.prepare()
        try:
            _leases[cluster] = wait_shared(cluster.lease, deadline)
        except TimeoutError as error:
            raise failure(cluster, "Postgres is being stopped, and that does not end.") from error


def start_keeper(cluster: Cluster, keeper_lock: int) -> str:
    """Start a keeper that owns `keeper_lock`, and return its report when it has made one.

    The report is READY_REPORT, an error, or nothing at all if the keeper was killed.
    """
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-m", KEEPER_MODULE, cluster.base, str(keeper_lock)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=PROJECT_ROOT,
            start_new_session=True,
            pass_fds=[keeper_lock],
        )
    finally:
        os.close(keeper_lock)
    with keeper:  # the program splits in two: one half ends at once, the other reports
        return keeper.stdout.read().decode(errors="replace")


def check_reports(cluster: Cluster, reports: list[str]) -> None:
    """Raise if the last keeper reported an error, or if this client's keepers keep being killed."""
    if reports[-1] not in (READY_REPORT, ""):
        raise EmbeddedPostgresError(reports[-1])
    if reports.count("") >= KEEPER_ATTEMPTS:
        raise failure(cluster, "The process that starts Postgres was killed each time.")
