"""A client of websockets that does with its connection just what a test says, and nothing by itself."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from tests.servers import DEADLINE_SECONDS

if TYPE_CHECKING:
    from websockets.frames import Close

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class RawClient:
    """Asks for a websocket, and reads nothing until it is told to.

    `buffer_bytes` is how much the kernel may take for it meanwhile.
    """

    def __init__(self, url: str, headers: dict[str, str], *, buffer_bytes: int | None = None) -> None:
        uri = parse_uri(url)
        self._protocol = ClientProtocol(uri)
        self._socket = socket.socket()
        self._socket.settimeout(DEADLINE_SECONDS)
        if buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self._socket.connect((uri.host, uri.port))
        own_port = self._socket.getsockname()[1]
        self._established = f" 0100007F:{uri.port:04X} 0100007F:{own_port:04X} 01 "
        request = self._protocol.connect()
        request.headers.update(headers)
        self._protocol.send_request(request)
        self._socket.sendall(b"".join(self._protocol.data_to_send()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def is_connected(self) -> bool:
        """Whether the server still holds the connection, as the kernel's table says; see proc(5)."""
        return self._established in Path("/proc/net/tcp").read_text()

    def send(self, kind: str, stream: str) -> None:
        """Send a frame, after the handshake."""
        frame = Frame(Opcode.TEXT, json.dumps({"type": kind, "stream": stream}).encode())
        self._socket.sendall(frame.serialize(mask=True))

    def read(self, count_bytes: int) -> None:
        """Read so many bytes, whatever they are."""
        left = count_bytes
        while left > 0:
            data = self._socket.recv(min(left, 65_536))
            assert data, "The server has closed the connection."
            left -= len(data)

    def read_all(self) -> tuple[list[dict[str, Any]], Close | None]:
        """Read what there is, to the end: the frames, and the close if it came."""
        with contextlib.suppress(ConnectionError):
            while data := self._socket.recv(65_536):
                self._protocol.receive_data(data)
        events = self._protocol.events_received()
        texts = [event.data for event in events if isinstance(event, Frame) and event.opcode is Opcode.TEXT]
        return [json.loads(text) for text in texts], self._protocol.close_rcvd

    def close(self) -> None:
        """Close the connection in the order of TCP, without a word of the websocket's."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()

    def reset(self) -> None:
        """Reset the connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._socket.close()
