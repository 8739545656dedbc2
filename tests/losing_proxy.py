"""A proxy before Postgres that loses certain statements: the request, the connection, or the reply."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from django.db import connections

from benchmarks.shared.proxy import Connection, Ends
from tests.postgres_proxy import PostgresProxy, proxied

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_READY_FOR_QUERY = b"Z\0\0\0\x05"


class Lose(enum.Enum):
    """What becomes of a statement; the connection is cut each time."""

    REQUEST = "it never arrives"
    CONNECTION = "it arrives, and its client is gone while the server is at it"
    REPLY = "the server has done it, and nobody is told"


class LosingProxy(PostgresProxy):
    """Asks `fate` about each statement that holds one of the `marks`: what to lose of it, if anything."""

    def __init__(self) -> None:
        self.marks: tuple[bytes, ...] = ()
        self.fate: Callable[[bytes], Lose | None] = lambda mark: None
        self.lost: list[Lose] = []
        super().__init__()

    def lose(self, mark: bytes, *what: Lose) -> None:
        """Have the next statements with this mark meet these fates, one each."""
        waiting = list(what)
        self.marks, self.fate = (mark,), lambda _: waiting.pop(0) if waiting else None

    def connection(self, client: Ends, server: Ends | None) -> Connection:
        return _LosingConnection(self, client, server)

    def fate_of(self, data: bytes) -> Lose | None:
        """What to lose of a statement in what a client has sent."""
        # A client sends a statement when it has the reply to the last, so each begins some data.
        mark = next((mark for mark in self.marks if mark in data), None)
        fate = None if mark is None else self.fate(mark)
        if fate is not None:
            self.lost.append(fate)
        return fate


class _LosingConnection(Connection):
    def __init__(self, proxy: LosingProxy, client: Ends, server: Ends | None) -> None:
        super().__init__(client, server)
        self._proxy = proxy
        self._swallowed: bytes | None = None

    def from_client(self, data: bytes) -> bytes:
        match self._proxy.fate_of(data):
            case Lose.REQUEST:
                self.end_after_this()
                return b""
            case Lose.CONNECTION:
                self.end_after_this()
            case Lose.REPLY:
                self._swallowed = b""
        return data

    def from_server(self, data: bytes) -> bytes:
        if self._swallowed is None:
            return data
        self._swallowed += data
        if _READY_FOR_QUERY in self._swallowed:
            self.end_after_this()
        return b""


def losing(**options: str) -> AbstractContextManager[LosingProxy]:
    """Such a proxy before the test database, whose alias has these options more."""
    # Statements are found in what is sent, so it is not encrypted.
    own = {"sslmode": "disable", "gssencmode": "disable"}
    return proxied(LosingProxy(), OPTIONS=connections["default"].settings_dict["OPTIONS"] | own | options)
