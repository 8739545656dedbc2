"""A TCP proxy before Postgres that loses certain statements: the request, the connection, or the reply."""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections.abc import Callable, Iterator

from django.db import connections

from django_pgstreams import receivers
from tests.postgres_proxy import PostgresProxy, through

_READY_FOR_QUERY = b"Z\0\0\0\x05"


class Lose(enum.Enum):
    """What becomes of a statement; the connection is cut each time."""

    REQUEST = "it never arrives"
    CONNECTION = "it arrives, and its client is gone while the server is at it"
    REPLY = "the server has done it, and nobody is told"


class LosingProxy(PostgresProxy):
    """Asks `fate` about each statement that holds one of the `marks`: what to lose of it, if anything."""

    def __init__(self, host: str, port: str) -> None:
        self.marks: tuple[bytes, ...] = ()
        self.fate: Callable[[bytes], Lose | None] = lambda mark: None
        self.lost: list[Lose] = []
        super().__init__(host, port)

    def lose(self, mark: bytes, *what: Lose) -> None:
        """Have the next statements with this mark meet these fates, one each."""
        waiting = list(what)
        lock = threading.Lock()

        def fate(_: bytes) -> Lose | None:
            with lock:
                return waiting.pop(0) if waiting else None

        self.marks, self.fate = (mark,), fate

    def _pass_both_ways(self, client: socket.socket, server: socket.socket) -> None:
        loses_reply = threading.Event()
        self._start(self._pass_statements, client, server, loses_reply)
        self._start(self._pass_replies, client, server, loses_reply)

    def _pass_statements(
        self, client: socket.socket, server: socket.socket, loses_reply: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self._flows.wait()
                # A client sends a statement when it has the reply to the last, so each begins some data.
                mark = next((mark for mark in self.marks if mark in data), None)
                fate = None if mark is None else self.fate(mark)
                if fate is not None:
                    self.lost.append(fate)
                if fate is Lose.REPLY:
                    loses_reply.set()
                if fate is not Lose.REQUEST:
                    server.sendall(data)
                if fate is Lose.CONNECTION or fate is Lose.REQUEST:
                    break
        _cut(client, server)

    def _pass_replies(
        self, client: socket.socket, server: socket.socket, loses_reply: threading.Event
    ) -> None:
        swallowed = b""
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                self._flows.wait()
                if not loses_reply.is_set():
                    client.sendall(data)
                    continue
                swallowed += data
                if _READY_FOR_QUERY in swallowed:
                    break
        _cut(client, server)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def losing(**options: str) -> Iterator[LosingProxy]:
    """For a fixture: a proxy before the test database; the Django alias `proxy.alias` goes through it."""
    default = connections.settings["default"]
    given = connections["default"].get_connection_params()
    made = LosingProxy(given.get("host", "localhost"), str(given.get("port", 5432)))
    # Statements are found in what is sent, so it is not encrypted.
    own = {**default.get("OPTIONS", {}), "sslmode": "disable", "gssencmode": "disable", **options}
    connections.settings[made.alias] = {**through(made, default), "OPTIONS": own}
    yield made
    made.come_up()
    receivers.release()
    connections[made.alias].close()
    del connections[made.alias]
    del connections.settings[made.alias]
    made.close()
