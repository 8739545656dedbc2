"""Faults of the network between everything and Postgres."""

from __future__ import annotations

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

    def observed(self, world: World) -> bool:
        return self._seen()

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

    def observed(self, world: World) -> bool:
        return self._seen()

    def heal(self, world: World) -> None:
        world.proxy.come_up()
