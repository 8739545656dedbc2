"""A storm of websockets in this process, so cheap that the server is what is measured.

Plain sockets and one epoll; every viewer checks that it is sent each chunk from its position on, once and in
order, and notes when it became live and when each chunk came.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import resource
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple, Self

from benchmarks.fanout_viewers import frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CHUNKS = re.compile(rb'\{"type":"chunks","stream":"[^"]*","offset":(\d+),"next":(\d+),')
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10
_READ_BYTES = 256 * 1024
_AGAIN_SECONDS = 0.5


class WrongFrameError(Exception):
    """A viewer was sent what it must not be sent, or waits in vain."""


class RefusedError(Exception):
    """The server did not take a viewer, or let it go."""


class Visit(NamedTuple):
    """Where a viewer goes: a path of the server, with the headers of its user, from a position on."""

    path: str
    headers: dict[str, str]
    position: int


class Viewer:
    """One websocket that follows one stream."""

    def __init__(self, visit: Visit) -> None:
        self.position = visit.position
        self.live_at: float | None = None
        self.received: list[tuple[float, int, bytes]] = []  # when, the position after, the frame
        self._visit = visit

    def begin(self, port: int) -> None:
        """Start to connect."""
        self._port = port
        self._buffer = b""
        self._is_open = False
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if self.socket.connect_ex(("127.0.0.1", port)) not in (0, errno.EINPROGRESS):
            raise RefusedError("The server cannot be reached.")

    def ask(self) -> None:
        """Once connected: ask for the websocket."""
        headers = {
            "Host": f"127.0.0.1:{self._port}",
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
            **self._visit.headers,
        }
        lines = [
            f"GET {self._visit.path}?offset={self.position} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def read(self) -> None:
        """Take what has come. Raises `WrongFrameError`."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise RefusedError(f"The server hung up at {self._visit.path}.")
        now = time.monotonic()
        self._buffer += data
        if not self._is_open:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 101"):
                raise RefusedError(f"The server refuses: {head[:200]!r}")
            self._is_open, self._buffer = True, rest
        end = 0
        for opcode, payload, end in frames(self._buffer):  # noqa: B007 - the last end is used
            if opcode == _TEXT:
                self._take(payload, now)
            elif opcode == _PING:
                # A client has to mask; this mask changes nothing.
                head = struct.pack("!BB", 0x80 | _PONG, 0x80 | len(payload))
                self.socket.sendall(head + b"\0\0\0\0" + payload)
            elif opcode == _CLOSE:
                raise WrongFrameError(f"The server closes: {payload!r}")
        self._buffer = self._buffer[end:]

    def _take(self, text: bytes, now: float) -> None:
        if match := _CHUNKS.match(text):
            if int(match[1]) != self.position:
                raise WrongFrameError(f"At {self.position} came {text[:200]!r}")
            self.position = int(match[2])
            self.received.append((now, self.position, text))
            return
        match json.loads(text)["type"]:
            case "live":
                self.live_at = now
            case "subscribed" | "ping":
                pass
            case _:
                raise WrongFrameError(f"{self._visit.path} was sent {text[:200]!r}")

    def vanish(self) -> None:
        """Reset the connection, as a server or a network that fails does."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Storm:
    """All viewers of this process, on one server. As a page does, they try again until they are live."""

    def __init__(self, port: int) -> None:
        self.viewers: list[Viewer] = []
        self.refusals: list[str] = []
        """Why viewers had to try again."""
        self._port = port
        self._by_number: dict[int, Viewer] = {}
        self._connecting: set[int] = set()
        self._again: list[tuple[float, Viewer]] = []
        self._epoll = select.epoll()
        raise_descriptor_limit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._again.clear()
        for viewer in self.viewers:
            self._drop(viewer)
        self._epoll.close()

    def come(self, visits: Iterable[Visit], within_seconds: float = 0) -> list[Viewer]:
        """Begin to connect viewers, spread evenly over a time; reads meanwhile, and returns them."""
        came = [Viewer(visit) for visit in visits]
        self.viewers += came
        began = time.monotonic()
        for place, viewer in enumerate(came):
            due = began + within_seconds * place / len(came)
            self.read_while(lambda due=due: time.monotonic() < due)
            self._begin(viewer)
        return came

    def _begin(self, viewer: Viewer) -> None:
        viewer.begin(self._port)
        number = viewer.socket.fileno()
        self._by_number[number] = viewer
        self._connecting.add(number)
        self._epoll.register(number, select.EPOLLOUT)

    def read_while(self, unfinished: Callable[[], bool], deadline_seconds: float = 180) -> None:
        """Take what comes while the condition holds, within a deadline. Raises `WrongFrameError`."""
        deadline = time.monotonic() + deadline_seconds
        while unfinished():
            if time.monotonic() > deadline:
                missing = sum(viewer.live_at is None for viewer in self.viewers)
                raise WrongFrameError(f"Waited in vain; {missing} of {len(self.viewers)} are not live.")
            while self._again and self._again[0][0] <= time.monotonic():
                self._begin(self._again.pop(0)[1])
            for number, _ in self._epoll.poll(0.01):
                self._attend(number)

    def _attend(self, number: int) -> None:
        viewer = self._by_number[number]
        try:
            if number in self._connecting:
                self._connecting.discard(number)
                viewer.ask()
                self._epoll.modify(number, select.EPOLLIN)
            else:
                viewer.read()
        except (OSError, RefusedError) as error:
            if viewer.live_at is not None:
                raise
            self.refusals.append(str(error))
            self._drop(viewer)
            self._again.append((time.monotonic() + _AGAIN_SECONDS, viewer))

    def _drop(self, viewer: Viewer) -> None:
        number = viewer.socket.fileno()
        if number >= 0:
            self._by_number.pop(number, None)
            self._epoll.unregister(number)
            viewer.vanish()


def raise_descriptor_limit() -> None:
    """Let this process have as many sockets as the machine allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
