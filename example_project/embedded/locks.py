"""Advisory file locks (flock), which the kernel releases however their holders die.

A flock belongs to the open file, not to the process: whoever inherits the descriptor holds the
lock too, and it is released when the last copy is closed. Descriptors here are closed on exec
unless they are passed on purpose.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

RETRY_SECONDS = 0.01


def open_lock(path: Path) -> int:
    """Open the lock file, made if needed, and return its descriptor; nothing is locked yet."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def try_exclusive(path: Path) -> int | None:
    """Return the descriptor that holds the lock alone, or None while somebody else holds it."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def wait_exclusive(path: Path) -> int:
    """Return the descriptor that holds the lock alone, however long that takes."""
    descriptor = open_lock(path)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def wait_shared(path: Path, deadline: float) -> int:
    """Return a descriptor that shares the lock; TimeoutError past `deadline` (monotonic)."""
    descriptor = open_lock(path)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise TimeoutError(f"{path} stayed locked") from None
            time.sleep(RETRY_SECONDS)
        else:
            return descriptor
