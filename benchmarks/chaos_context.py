"""What `chaos` gives to its faults, and what it asks of them.

`chaos` runs one fault after another, in a seeded order, while everything writes and reads:

    fault = FaultClass()                  # one object for one occurrence; it may keep what it needs
    fault.inject(world)
    observed = fault.observed(world)      # asked over and over, for `patience_seconds`, until it is true
    …                                     # until `hold_seconds` have passed since `inject` returned
    fault.heal(world)                     # the fault's end: from here on recovery is measured

A fault that was not observed is healed as well, and does not count. `heal` is called exactly once, also when
`inject` or `observed` raised (which fails the run), so it copes with a fault that was half made. It leaves
what others rely on: every process running (`Worker.restart`), a primary with a synchronous standby that has
caught up. A fault never waits without a limit.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import psycopg

Observation = Callable[[], bool]
"""A look at the world: whether something has shown."""

ADMIN = "chaos-admin"
"""The application name of connections that look and interfere; everything else is of the product."""


class Worker(Protocol):
    """A writer, a reader, a server or the relay: a process that survives faults, and can be made to fail."""

    name: str
    """Unique: `orm-0`, `daphne`."""
    kind: str
    """Of writers `orm`, `many`, `threads`, `tasks`, `sql`, `keeper`; of readers `blocking`, `async`,
    `websocket`; `daphne`, `uvicorn`; `relay`."""

    @property
    def pid(self) -> int:
        """Of the process as it runs now."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs (a stopped one does)."""

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""

    def stop(self) -> None:
        """SIGSTOP."""

    def go_on(self) -> None:
        """SIGCONT."""

    def restart(self) -> None:
        """Start it again, if it does not run, under its name: a reader goes on where its ledger ends."""


@dataclass(frozen=True)
class World:
    """Everything that a fault may look at or touch."""

    random: random.Random
    """The only source of chance."""
    cluster: Any
    """The primary, its synchronous standby, and their stable address: `shared.cluster`."""
    disk: Any
    """What both servers flush to, and can be slow: `chaos_disk`, whose environment they are started with."""
    proxy: Any
    """What all but admin connections reach Postgres through: the cluster's own."""
    writers: Sequence[Worker]
    readers: Sequence[Worker]
    servers: Sequence[Worker]
    """Daphne and uvicorn."""
    relay: Worker
    admin: Callable[[], psycopg.Connection[Any]]
    """A new autocommit connection to the present primary past any proxy, named `ADMIN`; use it by `with`."""
    errors: Callable[[str | None], int]
    """Errors that a writer (by name; None: all) has met so far: appends that failed or are unknown."""
    acknowledged: Callable[[str | None], int]
    """Chunks acknowledged to a writer (by name; None: all of them) so far."""
    lag: Callable[[str | None], int]
    """Chunks that were acknowledged and that a reader (by name; None: the worst one) has not yet recorded."""

    def sessions(self, application_name: str = "%") -> dict[int, str]:
        """The product's sessions: process id → application name, by a LIKE pattern.

        `pgstreams-writer`, `pgstreams-notifier`, `pgstreams-listener`, `pgstreams-reader`, `pgstreams-relay`;
        `chaos-sql` of the SQL writers; Django's own are `chaos-django`.
        """
        query = """
            SELECT pid, application_name FROM pg_stat_activity
            WHERE backend_type = 'client backend' AND datname = current_database()
              AND application_name <> %s AND application_name LIKE %s
        """
        with self.admin() as admin:
            return dict(admin.execute(query, (ADMIN, application_name)).fetchall())


class Fault(ABC):
    """One occurrence of a fault."""

    kind: ClassVar[str]
    """For people, and the report's key: `restart, fast`."""
    hold_seconds: ClassVar[float] = 0.0
    """It lasts at least so long."""
    patience_seconds: ClassVar[float] = 15.0
    """Its effect shows within this time, or it does not count."""
    _seen: Observation

    @abstractmethod
    def inject(self, world: World) -> None:
        """Make it happen."""

    def observed(self, world: World) -> bool:
        """Whether its effect was seen: a session is gone, a writer met an error, a reader lags.

        As `inject` has left in `_seen`, unless the fault knows better. Called every 20 ms or so; an exception
        of psycopg or OSError counts as not yet.
        """
        return self._seen()

    @abstractmethod
    def heal(self, world: World) -> None:
        """End it, and wait until what it took away is there again."""
