"""Faults of NOTIFY: it fails, does nothing, or finds the queue full."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from benchmarks.chaos_context import Fault, World
from benchmarks.chaos_faults_seen import Observation, any_of, one_gone, reader_falls_behind


class NotificationsFail(Fault):
    """There is no `pg_notify`, as for an account that may not execute it: each flush fails."""

    kind = "notifications fail"
    hold_seconds = 2.0

    def inject(self, world: World) -> None:
        self._seen = one_gone(world, world.sessions("pgstreams-notifier"))
        self._rename(world, "pg_notify", "pg_notify_elsewhere")

    def _rename(self, world: World, old: str, new: str) -> None:
        rename = sql.SQL("ALTER FUNCTION pg_catalog.{}(text, text) RENAME TO {}")
        with world.admin() as admin:
            admin.execute("SET allow_system_table_mods = on")
            admin.execute(rename.format(sql.Identifier(old), sql.Identifier(new)))

    def observed(self, world: World) -> bool:
        # A notifier gives its connection up when its flush has failed.
        return self._seen()

    def heal(self, world: World) -> None:
        self._rename(world, "pg_notify_elsewhere", "pg_notify")


class NotificationsLost(Fault):
    """`pg_notify` does nothing, as behind a pooler that keeps no session: the poll finds the chunks."""

    kind = "notifications lost"
    hold_seconds = 2.0
    _definition: str | None = None

    def inject(self, world: World) -> None:
        with world.admin() as admin:
            [(self._definition,)] = admin.execute(
                "SELECT pg_get_functiondef('pg_catalog.pg_notify(text, text)'::regprocedure)"
            ).fetchall()
            self._replace(
                admin,
                "CREATE OR REPLACE FUNCTION pg_catalog.pg_notify(text, text) RETURNS void LANGUAGE sql AS ''",
            )
        self._seen = any_of([reader_falls_behind(world, reader) for reader in world.readers])

    def _replace(self, admin: psycopg.Connection[Any], definition: str) -> None:
        admin.execute("SET allow_system_table_mods = on")
        admin.execute(sql.SQL(definition))  # type: ignore[arg-type]

    def observed(self, world: World) -> bool:
        return self._seen()

    def heal(self, world: World) -> None:
        if self._definition is not None:
            with world.admin() as admin:
                self._replace(admin, self._definition)


class QueueFull(Fault):
    """A stranger listens and stays in a transaction, so that the queue of notifications fills up.

    The servers' queue must be small: `max_notify_queue_pages`.
    """

    kind = "notification queue full"
    hold_seconds = 1.0
    _stranger: psycopg.Connection[Any] | None = None
    _seen: Observation

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
        return usage > 0.5 and self._seen()

    def heal(self, world: World) -> None:
        if self._stranger is not None:
            self._stranger.close()
