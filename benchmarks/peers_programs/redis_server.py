"""Debian's redis-server, on a free port of the loopback interface, with a directory of its own."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

from benchmarks.shared.errors import BenchmarkError
from example_project.embedded.cluster import Cluster

PATIENCE_SECONDS = 20.0
RETRY_SECONDS = 0.02


@contextlib.contextmanager
def redis_server(options: Sequence[str]) -> Iterator[str]:
    """Run it with its default configuration and these options; its address. Its files are removed."""
    # Beside Postgres's data: on the same disk.
    with tempfile.TemporaryDirectory(prefix="bench-redis-", dir=Cluster.of_this_checkout().base) as data:
        port = free_port()
        command = [program(), "--port", str(port), "--bind", "127.0.0.1", "--dir", data, *options]
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            wait_until_ready(server, port)
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.kill()  # nothing of it is kept
            server.wait()


def redis_version() -> str:
    """What redis-server says it is."""
    said = subprocess.run([program(), "--version"], check=True, capture_output=True, encoding="utf-8").stdout
    found = re.search(r"v=(\S+)", said)
    return found[1] if found else said.strip()


def program() -> str:
    """The path of redis-server. Raises `BenchmarkError` if there is none."""
    found = shutil.which("redis-server")
    if found is None:
        raise BenchmarkError("redis-server is missing: install it (apt-get install redis-server).")
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Return once it accepts connections. Raises `BenchmarkError` when it does not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError("redis-server did not start.")
        time.sleep(RETRY_SECONDS)
