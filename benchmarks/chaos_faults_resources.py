"""Faults of what everybody shares: rows, and the disk."""

from __future__ import annotations

from typing import Any

import psycopg

from benchmarks.chaos_context import Fault, World


class RowsLocked(Fault):
    """Somebody holds the rows of some open streams in a transaction that takes its time."""

    kind = "rows locked"
    hold_seconds = 2.0
    _holder: psycopg.Connection[Any] | None = None

    _LOCK = """
        SELECT id FROM pgstreams_stream WHERE id IN (
            SELECT id FROM pgstreams_stream WHERE state = 'open' AND id %% 2 = %s
        ) FOR UPDATE
    """
    _WAITS_FOR_IT = """
        SELECT EXISTS (
            SELECT FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock'
              AND %s = ANY (pg_blocking_pids(pid))
        )
    """

    def inject(self, world: World) -> None:
        self._holder = world.admin()
        self._holder.execute("BEGIN")
        self._holder.execute("SET LOCAL lock_timeout = '5s'")
        self._holder.execute(self._LOCK, [world.random.randrange(2)])

    def observed(self, world: World) -> bool:
        assert self._holder is not None
        with world.admin() as admin:
            [(waits,)] = admin.execute(self._WAITS_FOR_IT, [self._holder.info.backend_pid]).fetchall()
        return bool(waits)

    def heal(self, world: World) -> None:
        if self._holder is not None:
            self._holder.close()


class DiskSlow(Fault):
    """Each flush to disk takes much longer, on the standby too."""

    kind = "disk slow"
    hold_seconds = 2.0

    MILLISECONDS = 300

    # Waiting for its own flush, for another's that includes it, or for the standby's.
    _FLUSHES_SLOWLY = """
        SELECT EXISTS (
            SELECT FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event IN ('WalSync', 'WALWrite', 'SyncRep')
              AND clock_timestamp() - query_start > %s * interval '1 ms'
        )
    """

    def inject(self, world: World) -> None:
        world.disk.slow_down(self.MILLISECONDS)

    def observed(self, world: World) -> bool:
        with world.admin() as admin:
            [(is_slow,)] = admin.execute(self._FLUSHES_SLOWLY, [self.MILLISECONDS * 0.8]).fetchall()
        return bool(is_slow)

    def heal(self, world: World) -> None:
        world.disk.slow_down(0)
