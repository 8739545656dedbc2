"""Faults of NOTIFY: it fails, does nothing, or finds the queue full."""

from __future__ import annotations

from typing import Any, ClassVar, LiteralString

import psycopg

from benchmarks.chaos_context import Fault, World
from benchmarks.chaos_faults_seen import any_of, one_gone, reader_falls_behind


class _NoNotifications(Fault):
    """There is no `pg_notify`; `instead` may make another one in its place."""

    hold_seconds = 2.0
    instead: ClassVar[LiteralString] = ""

    def inject(self, world: World) -> None:
        with world.admin() as admin, admin.transaction():
            admin.execute("SET LOCAL allow_system_table_mods = on")
            admin.execute("ALTER FUNCTION pg_catalog.pg_notify(text, text) RENAME TO chaos_notify")
            admin.execute(self.instead)

    def heal(self, world: World) -> None:
        with world.admin() as admin, admin.transaction():
            [(is_there,)] = admin.execute("SELECT to_regproc('chaos_notify') IS NOT NULL").fetchall()
            if is_there:
                admin.execute("SET LOCAL allow_system_table_mods = on")
                admin.execute("DROP FUNCTION IF EXISTS pg_catalog.pg_notify(text, text)")
                admin.execute("ALTER FUNCTION pg_catalog.chaos_notify(text, text) RENAME TO pg_notify")


class NotificationsFail(_NoNotifications):
    """As for an account that may not execute `pg_notify`: each flush fails."""

    kind = "notifications fail"

    def inject(self, world: World) -> None:
        # A notifier gives its connection up when its flush has failed.
        self._seen = one_gone(world, world.sessions("pgstreams-notifier"))
        super().inject(world)


class NotificationsLost(_NoNotifications):
    """`pg_notify` does nothing, as behind a pooler that keeps no session: the poll finds the chunks."""

    kind = "notifications lost"
    instead = "CREATE FUNCTION pg_catalog.pg_notify(text, text) RETURNS void LANGUAGE sql AS ''"

    def inject(self, world: World) -> None:
        super().inject(world)
        self._seen = any_of([reader_falls_behind(world, reader) for reader in world.readers])


class QueueFull(Fault):
    """A stranger listens and stays in a transaction, so that the queue of notifications fills up.

    The servers' queue must be small: `max_notify_queue_pages`.
    """

    kind = "notification queue full"
    hold_seconds = 1.0
    _stranger: psycopg.Connection[Any] | None = None

    _FILL = "SELECT pg_notify('strangers', repeat('x', 7000) || n) FROM generate_series(1, 8) AS n"
    _MOST_FILLS = 1000

    def inject(self, world: World) -> None:
        self._stranger = world.admin()
        self._stranger.execute("LISTEN strangers")
        self._stranger.execute("BEGIN")
        self._stranger.execute("SELECT")
        self._seen = one_gone(world, world.sessions("pgstreams-notifier"))
        with world.admin() as admin:
            try:
                for _ in range(self._MOST_FILLS):
                    admin.execute(self._FILL)
            except psycopg.errors.ProgramLimitExceeded:
                return

    def observed(self, world: World) -> bool:
        with world.admin() as admin:
            [(usage,)] = admin.execute("SELECT pg_notification_queue_usage()").fetchall()
        return usage > 0.5 and super().observed(world)

    def heal(self, world: World) -> None:
        if self._stranger is not None:
            self._stranger.close()
