"""A primary with a streaming standby, and an address that moves when the standby takes over."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from benchmarks.shared.errors import BenchmarkError
from benchmarks.shared.node import Node
from benchmarks.shared.processes import PATIENCE_SECONDS
from benchmarks.shared.proxy import Proxy
from example_project.embedded.cluster import Cluster as EmbeddedCluster
from example_project.embedded.cluster import EmbeddedPostgresError
from example_project.embedded.postgres import SUPERUSER

SETTINGS = {
    # A standby that was away is back at once, and finds what it missed.
    "wal_retrieve_retry_interval": "100ms",
    "wal_keep_size": "256MB",
    # The least there is, so that it can be filled.
    "max_notify_queue_pages": "64",
}

_RETRY_SECONDS = 0.02


class Cluster:
    """Two servers of Postgres, one of which takes writes.

    Clients use `address`, by way of `proxy`; faults happen to `primary`, `standby` and `proxy`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        synchronous: bool,
        settings: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        self._directory = directory
        self._settings = SETTINGS | dict(settings)
        self._synchronous = synchronous
        self._environment = environment
        self._numbers = itertools.count(1)
        self.primary = self._new_node()
        self.primary.create()
        self.primary.start()
        self.proxy = Proxy(self.primary.socket)
        self.standby: Node | None = None
        self._dead: Node | None = None
        try:
            self.rebuild_standby()
        except BaseException:
            self.close()
            raise

    def _new_node(self) -> Node:
        directory = self._directory / str(next(self._numbers))
        directory.mkdir()
        return Node(directory, settings=self._settings, environment=self._environment)

    @property
    def address(self) -> str:
        """Where clients find the primary, whichever server that is: the superuser's, without a password."""
        return make_conninfo(host="127.0.0.1", port=self.proxy.port, user=SUPERUSER, dbname="postgres")

    def close(self) -> None:
        """Stop everything at once: nothing of it is kept."""
        self.proxy.close()
        for node in (self.standby, self.primary):
            if node is not None:
                node.stop("immediate")

    # Failing over ----------------------------------------------------------------------------------

    def fail_over(self) -> None:
        """Kill the primary, promote the standby, and have the address lead there.

        A synchronous standby first gets what it lacks, so that it has all that was acknowledged.
        """
        if self._synchronous:
            self.wait_until_in_sync()
        self.primary.kill()
        self.promote()

    def promote(self) -> None:
        """Make the standby the primary, whatever has become of the old one, and have the address lead there.

        There is no standby after it until `rebuild_standby`, and commits wait for none.
        """
        assert self.standby is not None
        self.standby.promote()
        self.proxy.move(self.standby.socket)
        self._dead, self.primary, self.standby = self.primary, self.standby, None
        self._dead.kill()

    def rebuild_standby(self) -> None:
        """Make a new standby from the primary, in the place of one that there may be, and wait for it."""
        if self.standby is not None:
            self._wait_for_standby(False)
            self._dead = self.standby
            self._dead.kill()
        if self._dead is not None:
            self._dead.remove()
            self._dead = None
        self.standby = self._new_node()
        self.standby.copy_from(self.primary)
        self.standby.start()
        self.set_synchronous(self._synchronous)

    def set_synchronous(self, synchronous: bool) -> None:
        """From now on acknowledge a commit when the standby has it on its disk too, or without asking it."""
        self._synchronous = synchronous
        self._wait_for_standby(synchronous)
        self.wait_until_in_sync()

    def _wait_for_standby(self, waits: bool) -> None:
        """Whether a commit on the primary waits for its standby. Copies of the primary begin without."""
        names = "'*'" if waits else "''"
        with psycopg.connect(self.primary.address, autocommit=True) as own:
            own.execute(f"ALTER SYSTEM SET synchronous_standby_names = {names}")
            own.execute("SELECT pg_reload_conf()")

    def wait_until_in_sync(self) -> None:
        """Wait until the standby has on its disk all that the primary has at this moment."""
        state = "sync" if self._synchronous else "async"
        with psycopg.connect(self.primary.address, autocommit=True) as own:
            streams = "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = %s)"
            self._wait(lambda: _value(own, streams, state))
            now = _value(own, "SELECT pg_current_wal_flush_lsn()::text")
            caught_up = "SELECT bool_or(flush_lsn >= %s::pg_lsn) FROM pg_stat_replication"
            self._wait(lambda: _value(own, caught_up, now))

    def _wait(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                log = self.standby.log if self.standby is not None else ""
                raise BenchmarkError(f"The standby does not follow:\n{log}")
            time.sleep(_RETRY_SECONDS)


def _value(own: psycopg.Connection[Any], query: Any, *values: Any) -> Any:
    [(value,)] = own.execute(query, values).fetchall()
    return value


@contextlib.contextmanager
def cluster(
    *,
    synchronous: bool,
    settings: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """A primary with a standby, stopped and removed at the end.

    Where it is synchronous, a commit is acknowledged when the standby has it on its disk too.
    """
    base = EmbeddedCluster.of_this_checkout().base
    with tempfile.TemporaryDirectory(prefix="bench-", dir=base, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o711)
        try:
            made = Cluster(
                directory, synchronous=synchronous, settings=settings or {}, environment=environment or {}
            )
        except EmbeddedPostgresError as error:
            raise BenchmarkError(str(error)) from error
        try:
            yield made
        finally:
            made.close()
