"""A TCP proxy that cuts a connection for real, at an exact byte of what the server has sent."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class CuttingProxy:
    """Passes one connection on to a port of this machine, until `mark` has come back."""

    def __init__(self, port: int, mark: bytes) -> None:
        self._mark = mark
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._server = socket.create_connection(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        upstream = threading.Thread(target=self._pass_upstream, args=[client], name="proxy", daemon=True)
        upstream.start()
        passed = b""
        cut = -1
        with contextlib.suppress(OSError):
            while cut < 0 and (data := self._server.recv(65536)):
                before = len(passed)
                passed += data
                place = passed.find(self._mark)
                cut = place + len(self._mark) if place >= 0 else -1
                client.sendall(passed[before : cut if cut >= 0 else None])
        for end in (client, self._server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        upstream.join()

    def _pass_upstream(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self._server.sendall(data)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(30)
