"""A TCP proxy that cuts a connection for real, at an exact byte of what the server has sent."""

from __future__ import annotations

from benchmarks.shared.proxy import Connection, Ends, Proxy


class CuttingProxy(Proxy):
    """Passes connections on to a port of this machine, each until `mark` has come back on it."""

    def __init__(self, port: int, mark: bytes) -> None:
        self._mark = mark
        super().__init__(("127.0.0.1", port))

    def connection(self, client: Ends, server: Ends | None) -> Connection:
        return _CutConnection(self._mark, client, server)


class _CutConnection(Connection):
    def __init__(self, mark: bytes, client: Ends, server: Ends | None) -> None:
        super().__init__(client, server)
        self._mark = mark
        self._passed = b""

    def from_server(self, data: bytes) -> bytes:
        before = len(self._passed)
        self._passed += data
        place = self._passed.find(self._mark)
        if place < 0:
            return data
        self.end_after_this()
        return self._passed[before : place + len(self._mark)]
