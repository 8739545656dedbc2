"""A slower network: a TCP proxy before Postgres that hands each block on a given time after it came.

Arguments: the database and the delay each way in milliseconds. It says on which port it listens and, once
asked, how long it kept blocks in fact (`spread`, milliseconds).
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from collections import deque
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from benchmarks.shared.checking import spread
from benchmarks.shared.talking import hear, say

kept_ms: list[float] = []


class End(asyncio.Protocol):
    """One side of a connection; what it receives the other side sends, later."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds
        self._blocks: deque[tuple[float, bytes]] = deque()
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._blocks.append((time.monotonic(), data))
        asyncio.get_running_loop().call_later(self._delay_seconds, self._hand_on)

    def _hand_on(self) -> None:
        # From the queue: it keeps the order, which timers of the same moment need not.
        came_at, data = self._blocks.popleft()
        kept_ms.append((time.monotonic() - came_at) * 1000)
        assert self.other is not None
        assert self.other.transport is not None
        self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class ClientEnd(End):
    """The client's side, which opens the server's."""

    def __init__(self, server: dict[str, str], delay_seconds: float) -> None:
        super().__init__(delay_seconds)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        # Nothing is read before there is somebody to hand it to.
        transport.pause_reading()
        self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self._server.get("host", "127.0.0.1"), self._server.get("port", "5432")
        if host.startswith("/"):
            path = str(Path(host) / f".s.PGSQL.{port}")
            _, self.other = await loop.create_unix_connection(lambda: End(self._delay_seconds), path)
        else:
            _, self.other = await loop.create_connection(lambda: End(self._delay_seconds), host, int(port))
        self.other.other = self
        assert self.transport is not None
        self.transport.resume_reading()


async def main(database: str, delay_ms: float) -> None:
    """Serve until nobody is there to ask any more."""
    server = {name: str(value) for name, value in conninfo_to_dict(database).items()}
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: ClientEnd(server, delay_ms / 1000), "127.0.0.1", 0)
    say({"port": listener.sockets[0].getsockname()[1]})
    while True:
        await asyncio.to_thread(hear)
        say(spread(kept_ms))
        kept_ms.clear()


if __name__ == "__main__":
    # select() counts in microseconds; epoll would round each wait up to the next millisecond.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(main(sys.argv[1], float(sys.argv[2])))
