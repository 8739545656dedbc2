"""The viewers of `fanout`: many websockets in one process, so cheap that they are not what is measured.

They speak just enough of RFC 6455, over plain sockets and one epoll, and note what comes; what it holds is
checked when a phase is over. JSON lines say what to do, `{"do": "connect" | "watch" | "record" | "leave"}`;
each is answered with one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.fanout_load import Schedule, frame_of, key_of

_HEAD = re.compile(rb'\{"type":"chunks","stream":"[^"]*","offset":(\d+),"next":(\d+),')
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10
_ACK_NS = 1_000_000_000  # a viewer acknowledges as often as this, as long as something comes
_CONNECT_AT_A_TIME = 40  # servers have room for so many in their queue
_READ_BYTES = 256 * 1024
_PATIENCE_SECONDS = 60.0


class WrongFrameError(Exception):
    """A viewer was sent what it must not be sent, or was not sent what it has to be."""


# One viewer ----------------------------------------------------------------------------------------


class Viewer:
    """One websocket, and its way through a stream: every chunk once, in order."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.position = 0
        self.is_live = False
        self.received: list[tuple[int, int, int, bytes]] = []  # arrival, offset, position after, frame
        self._buffer = b""
        self._acked_at = 0

    def open(self, address: tuple[str, int], path: str, headers: dict[str, str]) -> None:
        """Connect, and ask for the websocket."""
        self.socket = socket.create_connection(address, timeout=_PATIENCE_SECONDS)
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: {address[0]}:{address[1]}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def finish_opening(self) -> None:
        """Wait for the server's answer. Raises `WrongFrameError` unless it accepts."""
        answer = b""
        while b"\r\n\r\n" not in answer:
            data = self.socket.recv(_READ_BYTES)
            if not data:
                raise WrongFrameError(f"The server hung up: {answer!r}")
            answer += data
        head, _, rest = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101"):
            raise WrongFrameError(f"The server refuses: {head[:200]!r}")
        self.take(rest, time.monotonic_ns())

    def read(self) -> None:
        """Take what has come. Raises `WrongFrameError`."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise WrongFrameError("The server hung up.")
        self.take(data, time.monotonic_ns())

    def take(self, data: bytes, at: int) -> None:
        """Take bytes that came at a time, and the frames that they complete. Raises `WrongFrameError`."""
        buffer = self._buffer + data if self._buffer else data
        end = 0
        for opcode, payload, end in frames(buffer):  # noqa: B007 - the last end is used
            if opcode == _TEXT:
                self._take_text(payload, at)
            elif opcode == _PING:
                self._send(_PONG, payload)
            elif opcode == _CLOSE:
                raise WrongFrameError(f"The server closes: {payload!r}")
        self._buffer = buffer[end:]

    def _take_text(self, text: bytes, at: int) -> None:
        if match := _HEAD.match(text):
            offset, position = int(match[1]), int(match[2])
            if offset != self.position:
                raise WrongFrameError(
                    f"{key_of(self.stream)} goes on at {self.position}, not: {text[:200]!r}"
                )
            self.position = position
            self.received.append((at, offset, position, text))
            if at - self._acked_at > _ACK_NS:
                self._acked_at = at
                ack = {"type": "ack", "stream": key_of(self.stream), "offset": position}
                self._send(_TEXT, json.dumps(ack).encode())
            return
        frame = json.loads(text)
        match frame["type"]:
            case "subscribed":
                self.position = frame["offset"]
            case "live":
                self.is_live = True
            case "ping":
                pass
            case _:
                raise WrongFrameError(f"A viewer of {key_of(self.stream)} was sent {text[:200]!r}")

    def _send(self, opcode: int, payload: bytes) -> None:
        mask = b"\0\0\0\0"  # a client has to mask; this mask changes nothing
        self.socket.sendall(struct.pack("!BB", 0x80 | opcode, 0x80 | len(payload)) + mask + payload)

    def check(self) -> None:
        """Check what each frame of this phase holds. Raises `WrongFrameError`."""
        for _, offset, position, text in self.received:
            if text != frame_of(self.stream, offset, position):
                raise WrongFrameError(f"Offset {offset} of {key_of(self.stream)} cannot be {text[:400]!r}")

    def close(self) -> None:
        """Leave."""
        with contextlib.suppress(OSError):
            self._send(_CLOSE, struct.pack("!H", 1000))
        self.socket.close()


class ReplayViewer(Viewer):
    """A viewer of the bare app, which plays a recording over and over; its positions count frames."""

    def __init__(self, stream: int, recording: list[bytes]) -> None:
        super().__init__(stream)
        self.is_live = True
        self._recording = recording

    def _take_text(self, text: bytes, at: int) -> None:
        self.received.append((at, self.position, self.position + 1, text))
        self.position += 1

    def check(self) -> None:
        """Check that the recording was played, frame by frame. Raises `WrongFrameError`."""
        for _, place, _, text in self.received:
            if text != self._recording[place % len(self._recording)]:
                raise WrongFrameError(f"Frame {place} of {key_of(self.stream)} cannot be {text[:400]!r}")


def frames(buffer: bytes) -> Iterator[tuple[int, bytes, int]]:
    """The whole websocket frames at the start of a buffer: opcode, payload, and where the next one begins."""
    at = 0
    while len(buffer) >= at + 2:
        opcode, size, begin = buffer[at] & 15, buffer[at + 1], at + 2
        if size >= 126:
            begin += 2 if size == 126 else 8
            size = int.from_bytes(buffer[at + 2 : begin], "big")
        at = begin + size
        if len(buffer) < at:
            return
        yield opcode, buffer[begin:at], at


# All of them ---------------------------------------------------------------------------------------


class Crowd:
    """The viewers of this process."""

    def __init__(self) -> None:
        self._viewers: list[Viewer] = []
        self._seen: list[list[bytes]] = []  # what each viewer was sent in the last phase
        self._recordings: list[list[bytes]] = []

    def connect(
        self,
        host: str,
        port: int,
        paths: list[str],
        streams: list[int],
        headers: dict[str, str],
        replay: bool,
    ) -> dict[str, Any]:
        """Open the sockets, and wait until every viewer is live."""
        self._viewers = (
            [ReplayViewer(*viewer) for viewer in zip(streams, self._recordings, strict=True)]
            if replay
            else [Viewer(stream) for stream in streams]
        )
        began = time.monotonic()
        for at in range(0, len(paths), _CONNECT_AT_A_TIME):
            group = self._viewers[at : at + _CONNECT_AT_A_TIME]
            for viewer, path in zip(group, paths[at:], strict=False):
                viewer.open((host, port), path, headers)
            for viewer in group:
                viewer.finish_opening()
        self._read_until(lambda viewer: viewer.is_live, _PATIENCE_SECONDS)
        return {"seconds": time.monotonic() - began}

    def watch(self, schedule: list[int], patience_seconds: float) -> dict[str, Any]:
        """Receive a phase's chunks to the last, check them, and say how late they were."""
        plan = Schedule(*schedule)
        before = {viewer: viewer.position for viewer in self._viewers}
        began = time.process_time()
        self._read_until(
            lambda viewer: viewer.position >= before[viewer] + plan.count, plan.seconds + patience_seconds
        )
        busy_seconds = time.process_time() - began
        late = sorted(
            at - plan.due(viewer.stream, nth - first)
            for viewer, first in before.items()
            for at, offset, position, _ in viewer.received
            for nth in range(offset, position)
        )
        last = max(viewer.received[-1][0] for viewer in self._viewers)
        for viewer in self._viewers:
            viewer.check()
        self._seen = [[text for *_, text in viewer.received] for viewer in self._viewers]
        for viewer in self._viewers:
            viewer.received = []
        seconds = (last - plan.start) / 1e9
        return {
            "frames": sum(map(len, self._seen)),
            "chunks": len(late),
            "seconds": seconds,
            "cores": busy_seconds / seconds,
            "latency_ms": {
                "p50": late[len(late) // 2] / 1e6,
                "p99": late[len(late) * 99 // 100] / 1e6,
                "max": late[-1] / 1e6,
            },
        }

    def record(self, file: str) -> dict[str, Any]:
        """Keep the frames of the last phase, and write them for the bare app: a line for each viewer."""
        self._recordings = self._seen
        with Path(file).open("w") as lines:
            for recording in self._recordings:
                lines.write(json.dumps([text.decode() for text in recording]) + "\n")
        return {"frames": sum(map(len, self._recordings))}

    def leave(self) -> dict[str, Any]:
        """Close all sockets."""
        for viewer in self._viewers:
            viewer.close()
        self._viewers = []
        return {}

    def _read_until(self, is_done: Callable[[Viewer], bool], patience_seconds: float) -> None:
        """Read until it is so for every viewer. Raises `WrongFrameError` when that takes too long."""
        by_number = {viewer.socket.fileno(): viewer for viewer in self._viewers}
        missing = {viewer for viewer in self._viewers if not is_done(viewer)}
        deadline = time.monotonic() + patience_seconds
        with select.epoll() as epoll:
            for number in by_number:
                epoll.register(number, select.EPOLLIN)
            while missing:
                if time.monotonic() > deadline:
                    raise WrongFrameError(f"{len(missing)} viewers of {len(by_number)} wait still.")
                for number, _ in epoll.poll(1):
                    viewer = by_number[number]
                    viewer.read()
                    if is_done(viewer):
                        missing.discard(viewer)


def main() -> None:
    """Do what the lines on standard input say."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd()
    commands = {
        "connect": crowd.connect,
        "watch": crowd.watch,
        "record": crowd.record,
        "leave": crowd.leave,
    }
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(commands[asked.pop("do")](**asked)), flush=True)


if __name__ == "__main__":
    main()
