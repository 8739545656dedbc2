"""A TCP proxy before Postgres, whose connections a test can cut, refuse, or leave open without an answer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

_BLOCK_BYTES = 65536


class PostgresProxy:
    """Passes connections on to a server; `host` may be the directory of its Unix socket."""

    def __init__(self, host: str, port: str) -> None:
        self._target = (host, port)
        self._flows = threading.Event()
        self._flows.set()
        self._open: list[socket.socket] = []
        self._refusing = False
        self._dead: set[socket.socket] = set()
        self._kills_new = False
        self.accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.alias = f"proxied_{self.port}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def hold(self) -> None:
        """Be a black hole: connections are accepted and stay open, and nothing goes through either way."""
        self._flows.clear()

    def strand(self, *, new_ones: bool = False) -> None:
        """Drop, from now on and for good, what the connections that there are send, their ends included.

        As a gateway that has forgotten them: nobody is told. With `new_ones`, until `come_up`, also what
        those send that are accepted meanwhile.
        """
        self._kills_new = new_ones
        self._dead.update(self._open)

    def refuse(self) -> None:
        """Cut each new connection at once; those that there are stay."""
        self._refusing = True

    def go_down(self) -> None:
        """Cut every connection, and each new one at once."""
        self.refuse()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def come_up(self) -> None:
        """Be an ordinary proxy again."""
        self._refusing = self._kills_new = False
        self._flows.set()

    def close(self) -> None:
        """End for good."""
        self.go_down()
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._open):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                if self._refusing:
                    client.close()
                    continue
                if self._kills_new:
                    self._open.append(client)
                    continue
                server = self._connect()
                self._open += [client, server]
                self._pass_both_ways(client, server)

    def _connect(self) -> socket.socket:
        host, port = self._target
        if host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(os.path.join(host, f".s.PGSQL.{port}"))  # noqa: PTH118
            return server
        return socket.create_connection((host, int(port)))

    def _pass_both_ways(self, client: socket.socket, server: socket.socket) -> None:
        self._start(self._pass_on, client, server)
        self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_BLOCK_BYTES):
                self._flows.wait()
                if source not in self._dead:
                    sink.sendall(data)
        if source in self._dead:
            return
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def through(proxy: PostgresProxy, database: dict[str, Any]) -> dict[str, Any]:
    """Settings of a Django alias for the same database, by way of the proxy."""
    return {
        **database,
        "ENGINE": "django.db.backends.postgresql",
        "HOST": "127.0.0.1",
        "PORT": str(proxy.port),
    }
