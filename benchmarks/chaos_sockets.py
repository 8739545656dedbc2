"""A reader of `chaos` at websockets, which speaks `pgstreams.v1` and comes back as the README's page does.

Half of its streams have a socket each; the others share one. The option `url` is the server's. It keeps for
each stream its position and epoch, acknowledges what it has recorded, and comes back with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from abc import ABC, abstractmethod
from typing import Any
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

from benchmarks.chaos_book import LOOK_SECONDS, Book
from benchmarks.chaos_ledger import key_of, stream_of
from benchmarks.chaos_program import Program

SILENCE_SECONDS = 60.0
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 5.0
AWAY = (OSError, TimeoutError, ConnectionClosed, InvalidHandshake)
NEVER = (4400, 4403, 4422)
"""Close codes that no socket here may get."""
MAY_BE = ("unavailable", "internal", "stalled")
"""Codes of errors that a fault may lead to."""


class Backoff:
    """The page's pauses."""

    def __init__(self) -> None:
        self.failures = 0

    async def pause(self) -> None:
        """Wait after one more failure."""
        longest = min(SHORTEST_PAUSE_SECONDS * 2**self.failures, LONGEST_PAUSE_SECONDS)
        self.failures = min(self.failures + 1, 10)
        await asyncio.sleep(longest * (0.5 + random.random() / 2))


class Client(ABC):
    """A socket that comes back until all that it is for has ended."""

    def __init__(self, book: Book, url: str) -> None:
        self.book = book
        self._url = url
        self._backoff = Backoff()

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether there is nothing more to read."""

    @abstractmethod
    def path(self) -> str:
        """The address, below the one that all sockets have in common."""

    @abstractmethod
    async def begin(self, socket: ClientConnection) -> None:
        """What to do with a new connection."""

    @abstractmethod
    async def error(self, socket: ClientConnection, frame: dict[str, Any]) -> None:
        """What to do about an error that the server will not close the socket for."""

    async def run(self) -> None:
        """Read to the end."""
        while not self.is_done:
            try:
                async with self._connect() as socket:
                    await self.begin(socket)
                    while not self.is_done:
                        async with asyncio.timeout(SILENCE_SECONDS):
                            text = await socket.recv()
                        await self._take(socket, json.loads(text))
            except AWAY as error:
                if isinstance(error, ConnectionClosed) and error.rcvd and error.rcvd.code in NEVER:
                    raise
                await self._backoff.pause()

    def _connect(self) -> connect:
        return connect(
            f"{self._url}/ws/streams/{self.path()}",
            additional_headers={"Origin": "http://127.0.0.1"},
            subprotocols=[Subprotocol("pgstreams.v1")],
            compression=None,
            max_size=None,
            ping_interval=None,
            close_timeout=1,
            proxy=None,
        )

    async def _take(self, socket: ClientConnection, frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "ping":
                return
            case "error":
                if frame["code"] not in MAY_BE:
                    raise RuntimeError(f"An error that must not be: {frame}")
                await self.error(socket, frame)
                return
        stream = stream_of(frame["stream"])
        match frame["type"]:
            case "subscribed":
                self.book.epoch(stream, frame["epoch"])
            case "chunks":
                self._backoff = Backoff()
                self.book.read(stream, enumerate(frame["data"], frame["offset"]))
                position = {"stream": frame["stream"], "offset": frame["next"]}
                await socket.send(json.dumps({"type": "ack", **position}))
            case "live":
                self._backoff = Backoff()
            case "closed":
                self.book.ended(stream, frame["offset"])
            case "reset":
                self.book.reset(stream)
            case "gap":
                self.book.gap(stream)


class OneStream(Client):
    """A socket for one stream."""

    def __init__(self, book: Book, url: str, stream: int) -> None:
        super().__init__(book, url)
        self._stream = stream

    @property
    def is_done(self) -> bool:
        return not self.book.is_open(self._stream)

    def path(self) -> str:
        offset, epoch = self.book.start(self._stream)
        return f"{key_of(self._stream)}/?{urlencode({'offset': offset, 'epoch': epoch or ''})}"

    async def begin(self, socket: ClientConnection) -> None:
        """The address says it all."""

    async def error(self, socket: ClientConnection, frame: dict[str, Any]) -> None:
        """The server closes the socket."""


class ManyStreams(Client):
    """A socket for many streams, which may be added at any time."""

    def __init__(self, book: Book, url: str) -> None:
        super().__init__(book, url)
        self._wanted: set[int] = set()
        self._socket: ClientConnection | None = None
        self._waiting: set[asyncio.Task[None]] = set()

    @property
    def is_done(self) -> bool:
        return self.book.is_done

    def path(self) -> str:
        return ""

    async def add(self, stream: int) -> None:
        """Follow this one too."""
        self._wanted.add(stream)
        if self._socket is not None:
            with contextlib.suppress(ConnectionClosed):  # the next connection begins with it
                await self._subscribe(self._socket, stream)

    async def begin(self, socket: ClientConnection) -> None:
        self._socket = socket
        for stream in sorted(self._wanted):
            await self._subscribe(socket, stream)

    async def _subscribe(self, socket: ClientConnection, stream: int) -> None:
        if self.book.is_open(stream):
            offset, epoch = self.book.start(stream)
            known = {"epoch": epoch} if epoch else {}
            frame = {"type": "subscribe", "stream": key_of(stream), "offset": offset, **known}
            await socket.send(json.dumps(frame))

    async def error(self, socket: ClientConnection, frame: dict[str, Any]) -> None:
        if frame["code"] == "stalled":
            return  # the socket will be closed
        self._waiting = {task for task in self._waiting if not task.done()}
        self._waiting.add(asyncio.create_task(self._try_again(socket, stream_of(frame["stream"]))))

    async def _try_again(self, socket: ClientConnection, stream: int) -> None:
        await self._backoff.pause()
        with contextlib.suppress(ConnectionClosed):
            await self._subscribe(socket, stream)


async def main(program: Program) -> None:
    """Read until all streams have ended."""
    book, url = Book(program), program.options["url"]
    program.begin()
    shared = ManyStreams(book, url)
    async with asyncio.TaskGroup() as group:
        follows_many = group.create_task(shared.run())
        while not book.is_done:
            for stream in book.new():
                if stream // program.options["parts"] % 2:
                    await shared.add(stream)
                else:
                    group.create_task(OneStream(book, url, stream).run())
            await asyncio.sleep(LOOK_SECONDS)
        follows_many.cancel()


if __name__ == "__main__":
    asyncio.run(main(Program.of_this_process()))
