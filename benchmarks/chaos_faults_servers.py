"""Faults of Postgres: it restarts, crashes, fails over, or loses or stops a session's process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import ClassVar

from benchmarks.chaos_context import Fault, World
from benchmarks.chaos_faults_seen import gone, nothing_acknowledged

ROLES = (
    *("pgstreams-writer", "pgstreams-notifier", "pgstreams-listener", "pgstreams-reader", "pgstreams-relay"),
    *("chaos-django", "chaos-sql"),
)


class SessionsTerminated(Fault):
    """An administrator ends all sessions of one role."""

    kind = "sessions terminated"

    def inject(self, world: World) -> None:
        there = world.sessions()
        role = world.random.choice([role for role in ROLES if role in there.values()])
        victims = [pid for pid, name in there.items() if name == role]
        self._seen = gone(world, victims)
        with world.admin() as admin:
            admin.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", [victims])

    def observed(self, world: World) -> bool:
        return self._seen()

    def heal(self, world: World) -> None:
        """They are gone; whoever needs one opens another."""


class _Restarted(Fault):
    mode: ClassVar[str]

    def inject(self, world: World) -> None:
        self._seen = gone(world, world.sessions())
        world.cluster.primary.restart(self.mode)

    def observed(self, world: World) -> bool:
        return self._seen()

    def heal(self, world: World) -> None:
        if not world.cluster.primary.is_running:
            world.cluster.primary.start()
        world.cluster.wait_until_in_sync()


class RestartedFast(_Restarted):
    """Sessions are ended, everything is written down, and it starts again."""

    kind = "restart, fast"
    mode = "fast"


class RestartedImmediately(_Restarted):
    """It stops at once, and recovers from its log."""

    kind = "restart, immediate"
    mode = "immediate"


class SessionKilled(Fault):
    """The system kills the process of one session: Postgres ends all others, and recovers by itself."""

    kind = "session's process killed"

    def inject(self, world: World) -> None:
        there = world.sessions()
        self._seen = gone(world, there)
        os.kill(world.random.choice(list(there)), signal.SIGKILL)

    def observed(self, world: World) -> bool:
        return self._seen()

    def heal(self, world: World) -> None:
        world.cluster.wait_until_in_sync()


class FailedOver(Fault):
    """The primary's machine is lost, the synchronous standby takes over, and gets a standby of its own."""

    kind = "failover"

    def inject(self, world: World) -> None:
        self._timeline = self._present_timeline(world)
        self._seen = gone(world, world.sessions())
        world.cluster.fail_over()

    def observed(self, world: World) -> bool:
        return self._present_timeline(world) > self._timeline and self._seen()

    def _present_timeline(self, world: World) -> int:
        with world.admin() as admin:
            [(timeline,)] = admin.execute(
                "SELECT ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int"
            ).fetchall()
        return int(timeline)

    def heal(self, world: World) -> None:
        if world.cluster.standby is None:
            world.cluster.rebuild_standby()


class SessionFrozen(Fault):
    """A writer loses its connection in mid-batch, and the server's process goes on with it much later.

    What a writer sent and took for lost may then be stored yet, behind the back of whoever sent it again.
    """

    kind = "session frozen"
    hold_seconds = 1.0

    _LOOK_SECONDS = 3.0
    _FROZEN_AT_MOST_SECONDS = 3.0

    _ACTIVE = """
        SELECT pid FROM pg_stat_activity
        WHERE application_name = 'pgstreams-writer' AND state = 'active' AND wait_event IS NULL
          AND datname = current_database()
    """
    # It has taken offsets, and has not come to the writer's row.
    _IN_MID_BATCH = """
        SELECT 'pgstreams_stream' = ANY (locked) AND 'pgstreams_writer' <> ALL (locked)
        FROM (
            SELECT coalesce(array_agg(relation::regclass::text), '{}') FROM pg_locks
            WHERE pid = %s AND relation IS NOT NULL
        ) AS its (locked)
    """

    def inject(self, world: World) -> None:
        self._frozen: int | None = None
        self._before = world.sessions("pgstreams-writer").keys()
        deadline = time.monotonic() + self._LOOK_SECONDS
        with world.admin() as admin:
            while self._frozen is None and time.monotonic() < deadline:
                for (pid,) in admin.execute(self._ACTIVE).fetchmany(1):
                    self._freeze(pid)
                    [(is_in_mid_batch,)] = admin.execute(self._IN_MID_BATCH, [pid]).fetchall()
                    if not is_in_mid_batch:
                        self._go_on()
        world.proxy.reset()
        self._seen = nothing_acknowledged(world)

    def _freeze(self, pid: int) -> None:
        self._frozen = pid
        # It may hold a lock that whoever looks needs.
        self._in_any_case = threading.Timer(self._FROZEN_AT_MOST_SECONDS, os.kill, [pid, signal.SIGCONT])
        self._in_any_case.start()
        os.kill(pid, signal.SIGSTOP)

    def observed(self, world: World) -> bool:
        """It outlives its client, who has a new session; or it had a lock that everybody needs."""
        if self._frozen is None:
            return False
        if self._seen():
            return True
        there = world.sessions("pgstreams-writer").keys()
        return self._frozen in there and bool(there - self._before)

    def heal(self, world: World) -> None:
        self._go_on()

    def _go_on(self) -> None:
        if self._frozen is not None:
            self._in_any_case.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._frozen, signal.SIGCONT)
            self._frozen = None
