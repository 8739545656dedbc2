"""Faults of Postgres: it restarts, crashes, fails over, or loses or stops a session's process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import ClassVar

from benchmarks.chaos_context import Fault, World
from benchmarks.chaos_faults_seen import gone

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

    def heal(self, world: World) -> None:
        """They are gone; whoever needs one opens another."""


class _Restarted(Fault):
    mode: ClassVar[str]

    def inject(self, world: World) -> None:
        self._seen = gone(world, world.sessions())
        world.cluster.primary.restart(self.mode)

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
        return self._present_timeline(world) > self._timeline and super().observed(world)

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
    patience_seconds = 5.0
    _frozen: int | None = None

    _LOOK_SECONDS = 5.0
    _LOCK_SECONDS = 5
    # A batch that has taken offsets and comes to the writer's row waits there, and holds nothing in memory.
    _LOCK = "LOCK TABLE pgstreams_writer IN EXCLUSIVE MODE"
    _IN_MID_BATCH = """
        SELECT pid FROM pg_stat_activity
        WHERE application_name = 'pgstreams-writer' AND query LIKE '%%pgstreams_store%%'
          AND %s = ANY (pg_blocking_pids(pid))
    """

    def inject(self, world: World) -> None:
        self._before = world.sessions("pgstreams-writer").keys()
        with world.admin() as holder, world.admin() as admin, holder.transaction():
            holder.execute(f"SET LOCAL lock_timeout = '{self._LOCK_SECONDS}s'")
            holder.execute(self._LOCK)
            deadline = time.monotonic() + self._LOOK_SECONDS
            while self._frozen is None and time.monotonic() < deadline:
                for (pid,) in admin.execute(self._IN_MID_BATCH, [holder.info.backend_pid]).fetchmany(1):
                    self._frozen = pid
                    os.kill(pid, signal.SIGSTOP)
            world.proxy.reset()

    def observed(self, world: World) -> bool:
        """It outlives its client, who has a new session."""
        there = world.sessions("pgstreams-writer").keys()
        return self._frozen in there and bool(there - self._before)

    def heal(self, world: World) -> None:
        if self._frozen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._frozen, signal.SIGCONT)
