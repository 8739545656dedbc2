"""Faults of processes: they are killed, or stand still."""

from __future__ import annotations

from abc import abstractmethod

from benchmarks.chaos_context import Fault, Worker, World
from benchmarks.chaos_faults_seen import one_gone, reader_falls_behind, writer_stands_still


class WriterKilled(Fault):
    """A writer is gone in mid-append, and starts again."""

    kind = "writer killed"

    def inject(self, world: World) -> None:
        # The keeper appends too seldom for its silence to be seen.
        self._writer = world.random.choice([one for one in world.writers if one.kind != "keeper"])
        self._writer.kill()
        self._seen = writer_stands_still(world, self._writer)

    def heal(self, world: World) -> None:
        self._writer.restart()


class _Killed(Fault):
    """A process that listens or announces is gone, and starts again."""

    sessions: str
    """The application name of the session that goes with it."""

    @abstractmethod
    def choose(self, world: World) -> Worker:
        """The process."""

    def inject(self, world: World) -> None:
        self._victim = self.choose(world)
        self._seen = one_gone(world, world.sessions(self.sessions))
        self._victim.kill()

    def heal(self, world: World) -> None:
        self._victim.restart()


class ServerKilled(_Killed):
    """A web server is gone, and all its clients' sockets with it."""

    kind = "server killed"
    sessions = "pgstreams-listener"

    def choose(self, world: World) -> Worker:
        return world.random.choice(world.servers)


class RelayKilled(_Killed):
    """Nobody announces what plain SQL appends."""

    kind = "relay killed"
    sessions = "pgstreams-relay"

    def choose(self, world: World) -> Worker:
        return world.relay


class ReaderStopped(Fault):
    """A reader stands still, its connections open, and goes on."""

    kind = "reader stopped"
    hold_seconds = 2.0

    def inject(self, world: World) -> None:
        self._reader = world.random.choice(world.readers)
        self._reader.stop()
        self._seen = reader_falls_behind(world, self._reader)

    def heal(self, world: World) -> None:
        self._reader.go_on()


class ReaderKilled(Fault):
    """A reader is gone, and goes on where its ledger ends."""

    kind = "reader killed"

    def inject(self, world: World) -> None:
        self._reader = world.random.choice(world.readers)
        self._seen = reader_falls_behind(world, self._reader)
        self._reader.kill()

    def heal(self, world: World) -> None:
        self._reader.restart()
