"""The process that starts Postgres, waits until nobody uses it, and stops it.

Started by `server.ensure_running`, which hands over the keeper lock as an open descriptor.
`server` says how the locks work together.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from example_project.embedded.cluster import Cluster, EmbeddedPostgresError, server_account
from example_project.embedded.locks import wait_exclusive
from example_project.embedded.postgres import request_stop, start_or_adopt

if TYPE_CHECKING:
    from example_project.embedded.cluster import Account

READY_REPORT = "ready"
STOP_SECONDS = 30.0


def main(cluster: Cluster, keeper_lock: int) -> None:
    """Keep Postgres running while it is used. Reports `ready`, or an error, on standard output."""
    if os.fork() > 0:
        os._exit(0)  # the client reaps this half; the other is nobody's child
    # The terminal's Ctrl-C does not reach this session; a hang-up or a stray signal may.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.truncate(keeper_lock, 0)
    os.write(keeper_lock, f"{os.getpid()}\n".encode())  # for people; the lock is what counts
    try:
        account = server_account()
        binaries = start_or_adopt(cluster, account)
    except (EmbeddedPostgresError, OSError) as error:
        os.close(keeper_lock)  # before the report: who reads it may try again at once
        report(str(error))
        return
    os.chdir("/")
    report(READY_REPORT, cluster.log)
    threading.Thread(
        target=stop_when_unused,
        args=(cluster, account, binaries),
        name="pgstreams-keeper-stop",
        daemon=True,
    ).start()
    wait_exclusive(cluster.postgres)
    # Postgres is gone, stopped or killed. The keeper lock goes first: whoever then gets a lease
    # must not take this process for a keeper.
    os.close(keeper_lock)


def report(text: str, log: Path = Path(os.devnull)) -> None:
    """Write the report and close the pipe, whose end tells the client that it is whole."""
    os.write(sys.stdout.fileno(), text.encode())
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())


def stop_when_unused(cluster: Cluster, account: Account | None, binaries: Path) -> None:
    """Wait until no lease is held, then stop Postgres, which ends `main`.

    The lease stays locked until the process ends, so that no client comes in between.
    """
    wait_exclusive(cluster.lease)
    for mode in ("fast", "immediate"):
        request_stop(cluster, account, binaries, mode)
        time.sleep(STOP_SECONDS)


if __name__ == "__main__":
    main(Cluster(Path(sys.argv[1])), int(sys.argv[2]))
