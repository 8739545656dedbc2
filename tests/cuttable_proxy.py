"""A TCP proxy between a browser and a server, whose connections a test can cut or hold for real."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_NEXT = re.compile(rb'"next": ?(\d+)')


class _Connection:
    """One connection through the proxy: a thread for each direction."""

    def __init__(self, browser: socket.socket, server: socket.socket) -> None:
        self._sockets = (browser, server)
        self._flow = threading.Condition()
        self._is_held = False
        self.is_websocket = False
        self.next_offset = 0
        for work in (self._upstream, self._downstream):
            threading.Thread(target=work, name="proxy", daemon=True).start()

    def _upstream(self) -> None:
        browser, server = self._sockets
        with contextlib.suppress(OSError):
            while data := browser.recv(65536):
                self.is_websocket = self.is_websocket or b"upgrade: websocket" in data.lower()
                server.sendall(data)
        self.close()

    def _downstream(self) -> None:
        browser, server = self._sockets
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                with self._flow:
                    self._flow.wait_for(lambda: not self._is_held)
                    browser.sendall(data)
                    if found := _NEXT.findall(data):
                        self.next_offset = int(found[-1])
        self.close()

    def hold(self) -> int:
        """Let nothing more through to the browser; returns the position after what went through."""
        with self._flow:
            self._is_held = True
            return self.next_offset

    def close(self) -> None:
        """Reset both sides: no closing handshake, as when a cable is pulled."""
        with self._flow:
            self._is_held = False
            self._flow.notify_all()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class CuttableProxy:
    """Listens on a loopback port and passes everything on to another one."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._connections: list[_Connection] = []
        self._refusing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="proxy-accept", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                browser, _ = self._listener.accept()
                if self._refusing:
                    browser.close()
                else:
                    server = socket.create_connection(self._target)
                    self._connections.append(_Connection(browser, server))

    def hold_websockets(self) -> int:
        """Hold what the open websockets still bring; returns the position that the browser will reach."""
        return max(c.hold() for c in self._connections if c.is_websocket)

    def cut_websockets(self) -> None:
        """Cut the open websockets."""
        for connection in self._connections:
            if connection.is_websocket:
                connection.close()

    def go_down(self) -> None:
        """Cut everything, and everything that comes, until `come_up`."""
        self._refusing = True
        for connection in self._connections:
            connection.close()

    def come_up(self) -> None:
        self._refusing = False

    def close(self) -> None:
        self.go_down()
        # Closing alone does not wake a thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
