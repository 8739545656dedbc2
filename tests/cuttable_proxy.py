"""A TCP proxy between a browser and a server, whose websockets a test can cut or hold for real."""

from __future__ import annotations

import re

from benchmarks.shared.proxy import Connection, Ends, Proxy

_NEXT = re.compile(rb'"next": ?(\d+)')


class _Visit(Connection):
    """One connection of a browser."""

    is_websocket = False
    next_offset = 0

    def from_client(self, data: bytes) -> bytes:
        self.is_websocket = self.is_websocket or b"upgrade: websocket" in data.lower()
        return data

    def from_server(self, data: bytes) -> bytes:
        if found := _NEXT.findall(data):
            self.next_offset = int(found[-1])
        return data


class CuttableProxy(Proxy):
    """Passes everything on to a port of this machine."""

    def __init__(self, port: int) -> None:
        self._visits: list[_Visit] = []
        super().__init__(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.port}"

    def connection(self, client: Ends, server: Ends | None) -> Connection:
        self._visits.append(_Visit(client, server))
        return self._visits[-1]

    def hold_websockets(self) -> int:
        """Hold what the open websockets still bring; returns the position that the browser will reach."""
        return self.call(lambda: max(_held(visit) for visit in self._visits if visit.is_websocket))

    def cut_websockets(self) -> None:
        """Cut the open websockets."""
        self.call(lambda: [visit.reset() for visit in self._visits if visit.is_websocket])


def _held(visit: _Visit) -> int:
    visit.hold()
    return visit.next_offset
