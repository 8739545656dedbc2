"""A TCP proxy before a server: the stable address of one that fails over, and a network that fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self, TypeVar

_BLOCK_BYTES = 65536
_BACKLOG = 1000
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

T = TypeVar("T")
Target = str | tuple[str, int]
"""A server's Unix socket, or its host and port."""
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Connection:
    """One client's connection, and the server's that belongs to it; without one, it is stranded at once.

    A kind of proxy may override `from_client` and `from_server`, which run in the proxy's thread.
    """

    def __init__(self, client: Ends, server: Ends | None) -> None:
        self._client = client
        self._server = server
        for _, writer in self._all_ends:
            writer.transport.set_write_buffer_limits(0)  # what `drain` has waited for is on its way
        self._passing = asyncio.Event()
        self._passing.set()
        self._is_stranded = server is None
        self._is_over = False

    @property
    def _all_ends(self) -> tuple[Ends, ...]:
        return (self._client,) if self._server is None else (self._client, self._server)

    def from_client(self, data: bytes) -> bytes:
        """What to pass on of what the client has sent."""
        return data

    def from_server(self, data: bytes) -> bytes:
        """What to pass on of what the server has sent."""
        return data

    async def run(self) -> None:
        """Pass on what either side sends until one of them ends; then end the other."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pass_on(self._client, self._server, self.from_client))
            if self._server is not None:
                both.create_task(self._pass_on(self._server, self._client, self.from_server))

    async def _pass_on(self, source: Ends, sink: Ends | None, changed: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while not self._is_over and (data := await source[0].read(_BLOCK_BYTES)):
                await self._passing.wait()
                if sink is not None and not self._is_stranded and not self._is_over:
                    sink[1].write(changed(data))
                    await sink[1].drain()
        # An end is news as well: it goes the same way.
        await self._passing.wait()
        if self._is_over:
            self.reset()
        elif not self._is_stranded:
            for _, writer in self._all_ends:
                writer.close()

    def hold(self) -> None:
        """Let nothing through, until `let_go`."""
        self._passing.clear()

    def let_go(self) -> None:
        """Let through what was held, and what comes."""
        self._passing.set()

    def strand(self) -> None:
        """Let nothing through any more, the news of an end neither."""
        self._is_stranded = True

    def end_after_this(self) -> None:
        """To be called by what changes data: reset the connection once the rest is on its way."""
        self._is_over = True

    def reset(self) -> None:
        """End it without a closing handshake, as when a machine has lost its power and has it again."""
        self._is_over = True
        self._passing.set()
        for _, writer in self._all_ends:
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed already
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


class Proxy:
    """Listens on a port of this machine, from its making to `close`.

    Its methods may be called in any thread but its own, and have taken effect when they return.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._refuses = False
        self._holds = False
        self._strands = False
        self._connections: set[Connection] = set()
        self.accepted = 0
        """How many connections there were."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=_BACKLOG)
        self._listener = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.port: int = self._listener.sockets[0].getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def connection(self, client: Ends, server: Ends | None) -> Connection:
        """For a new connection; a kind of proxy may override it."""
        return Connection(client, server)

    # What a test or a fault does -------------------------------------------------------------------

    def move(self, target: Target) -> None:
        """Have new connections go to another server; those that there are stay."""
        self.call(lambda: setattr(self, "_target", target))

    def hold(self) -> None:
        """Be a black hole until `come_up`: connections are accepted and stay open, and nothing passes."""
        self.call(self._hold)

    def strand(self, *, new_ones: bool = False) -> None:
        """Forget the connections that there are, as a gateway does: they stay open, and silent for good.

        Nobody is told, the server neither. Later ones are passed on; unless `new_ones`: then those that are
        accepted before `come_up` are as silent, and the server never hears of them.
        """
        self.call(lambda: self._strand(new_ones))

    def refuse(self) -> None:
        """Reset each new connection, until `come_up`; those that there are stay."""
        self.call(lambda: setattr(self, "_refuses", True))

    def reset(self) -> None:
        """Reset the connections that there are."""
        self.call(self._reset)

    def go_down(self) -> None:
        """Reset the connections that there are, and each new one until `come_up`."""
        self.refuse()
        self.reset()

    def come_up(self) -> None:
        """Be an ordinary proxy again. What was held goes through now."""
        self.call(self._come_up)

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

    def call(self, work: Callable[[], T]) -> T:
        """What `work` returns in the proxy's thread."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _hold(self) -> None:
        self._holds = True
        for connection in self._connections:
            connection.hold()

    def _strand(self, new_ones: bool) -> None:
        self._strands = new_ones
        for connection in self._connections:
            connection.strand()

    def _reset(self) -> None:
        for connection in self._connections:
            connection.reset()

    def _come_up(self) -> None:
        self._refuses = self._holds = self._strands = False
        for connection in self._connections:
            connection.let_go()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            server = await self._reach()
        except OSError:
            _reset(to_client)
            return
        connection = self.connection((client, to_client), server)
        if self._holds:
            connection.hold()
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            connection.reset()
            self._connections.discard(connection)

    async def _reach(self) -> Ends | None:
        """The server's ends of a new connection; None if it shall never hear of it."""
        if not self._refuses and not self._strands:
            if isinstance(self._target, str):
                server = await asyncio.open_unix_connection(self._target)
            else:
                server = await asyncio.open_connection(*self._target)
            if not self._refuses:
                return server
            _reset(server[1])
        if self._refuses:
            raise ConnectionRefusedError
        return None

    async def _close(self) -> None:
        # A server that is closed, or a task that is cancelled, leaves what it has just accepted open.
        for listening in self._listener.sockets:
            self._loop.remove_reader(listening.fileno())
        self._refuses = True
        self._reset()
        while working := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(working)
        self._listener.close()
