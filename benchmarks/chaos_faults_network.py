"""Faults of the network between everything and Postgres."""

from __future__ import annotations

import time

from benchmarks.chaos_context import Fault, World
from benchmarks.chaos_faults_seen import gone, nothing_acknowledged


class BlackHole(Fault):
    """Nothing comes through, and nobody is told.

    Either all of it is late; or the connections were forgotten, which their ends hear when it is over, and
    new ones work.
    """

    kind = "black hole"
    hold_seconds = 2.0

    def inject(self, world: World) -> None:
        self._forgets = world.random.random() < 0.5
        if self._forgets:
            world.proxy.strand()
        else:
            world.proxy.hold()
        self._seen = nothing_acknowledged(world)

    def heal(self, world: World) -> None:
        if self._forgets:
            world.proxy.reset()
        else:
            world.proxy.come_up()


class ConnectionsReset(Fault):
    """Every connection is reset; in half of the cases new ones are too, for some time."""

    kind = "connections reset"

    def inject(self, world: World) -> None:
        self._seen = gone(world, world.sessions())
        if world.random.random() < 0.5:
            world.proxy.go_down()
        else:
            world.proxy.reset()

    def heal(self, world: World) -> None:
        world.proxy.come_up()


class LostAtCommit(Fault):
    """Every connection is reset while a writer's batch is being flushed: it is stored, and nobody is told."""

    kind = "lost at commit"

    _MILLISECONDS = 300
    _LOOK_SECONDS = 3.0
    _COMMITS = """
        SELECT EXISTS (
            SELECT FROM pg_stat_activity
            WHERE application_name = 'pgstreams-writer' AND datname = current_database()
              AND wait_event IN ('WalSync', 'WALWrite', 'SyncRep')
        )
    """

    def inject(self, world: World) -> None:
        self._was_committing = False
        deadline = time.monotonic() + self._LOOK_SECONDS
        world.disk.slow_down(self._MILLISECONDS)
        with world.admin() as admin:
            while not self._was_committing and time.monotonic() < deadline:
                [(self._was_committing,)] = admin.execute(self._COMMITS).fetchall()
        self._seen = gone(world, world.sessions())
        world.proxy.reset()

    def observed(self, world: World) -> bool:
        return self._was_committing and super().observed(world)

    def heal(self, world: World) -> None:
        world.disk.slow_down(0)
