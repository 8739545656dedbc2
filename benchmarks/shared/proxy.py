"""A TCP proxy before Postgres: the stable address of a server that fails over, and a network that fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

_BLOCK_BYTES = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    """One client's connection, and the server's that belongs to it."""

    def __init__(self, client: _Ends, server: _Ends, passing: asyncio.Event) -> None:
        self._ends = (client, server)
        self._passing = passing
        self.is_stranded = False

    async def pass_on(self) -> None:
        """Pass on what either side sends until one of them ends; then end the other."""
        (client, to_client), (server, to_server) = self._ends
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pass_on(client, to_server))
            both.create_task(self._pass_on(server, to_client))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_BLOCK_BYTES):
                await self._passing.wait()
                if not self.is_stranded:
                    sink.write(data)
                    await sink.drain()
        # An end is news as well: it goes the same way.
        await self._passing.wait()
        if not self.is_stranded:
            self.close()

    def close(self) -> None:
        for _, writer in self._ends:
            writer.close()

    def reset(self) -> None:
        """End it without a closing handshake, as when a machine has lost its power and has it again."""
        for _, writer in self._ends:
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed already
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


class Proxy:
    """Listens on a port of this machine, from its making to `close`; the target is a server's Unix socket.

    Its methods may be called in any thread but its own, and have taken effect when they return.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._refusing = False
        self._connections: set[_Connection] = set()
        self.accepted = 0
        """How many connections there were."""
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._passing.set()
        self._listener = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._listener.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # What a test or a fault does -------------------------------------------------------------------

    def move(self, target: str) -> None:
        """Have new connections go to another server; those that there are stay."""
        self._call(lambda: setattr(self, "_target", target))

    def hold(self) -> None:
        """Be a black hole until `come_up`: connections are accepted and stay open, and nothing passes."""
        self._call(self._passing.clear)

    def strand(self) -> None:
        """Forget the connections that there are, as a gateway does: they stay open, and silent for good.

        New ones are passed on. Nobody is told, the server neither.
        """
        self._call(self._strand_all)

    def refuse(self) -> None:
        """Reset each new connection, until `come_up`; those that there are stay."""
        self._call(lambda: setattr(self, "_refusing", True))

    def reset(self) -> None:
        """Reset the connections that there are."""
        self._call(self._reset_all)

    def go_down(self) -> None:
        """Reset the connections that there are, and each new one until `come_up`."""
        self.refuse()
        self.reset()

    def come_up(self) -> None:
        """Be an ordinary proxy again. What was held goes through now."""
        self._call(self._be_ordinary)

    @property
    def connections(self) -> int:
        """How many connections there are, stranded ones too."""
        return len(self._connections)

    def close(self) -> None:
        """End for good."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # In its own thread -----------------------------------------------------------------------------

    def _call(self, change: Callable[[], object]) -> None:
        async def run() -> None:
            change()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _strand_all(self) -> None:
        for connection in self._connections:
            connection.is_stranded = True

    def _reset_all(self) -> None:
        for connection in self._connections:
            connection.reset()

    def _be_ordinary(self) -> None:
        self._refusing = False
        self._passing.set()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            if self._refusing:
                raise ConnectionRefusedError
            server = await asyncio.open_unix_connection(self._target)
        except OSError:
            _reset(to_client)
            return
        connection = _Connection((client, to_client), server, self._passing)
        self._connections.add(connection)
        try:
            # Cancelled by `close`; asyncio would log that as this callback's failure.
            with contextlib.suppress(asyncio.CancelledError):
                await connection.pass_on()
        finally:
            connection.reset()
            self._connections.discard(connection)

    async def _close(self) -> None:
        self._listener.close()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
