"""The process's background event loop: one daemon thread that runs listeners and the blocking readers' hub.

Invariant: a forked child never uses what its parent's threads own. `after_fork` hooks run in the child before
anything else of the app can, and put fresh, empty objects in their place.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def loop() -> asyncio.AbstractEventLoop:
    """The background event loop, started on first use.

    Raises `RuntimeError` when the interpreter is shutting down and no thread can start.
    """
    global _loop
    with _lock:
        if _loop is None:
            started = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(started,), name="pgstreams-background", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                started.close()
                raise
            _loop = started
        return _loop


def is_running() -> bool:
    """Whether the background event loop has been started in this process."""
    return _loop is not None


def _run(started: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(started)
    started.run_forever()


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Run a coroutine on the background loop."""
    return asyncio.run_coroutine_threadsafe(work, loop())


def after_fork(reset: Callable[[], None]) -> None:
    """Have `reset` run in every forked child, before anything else there uses the app."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)


def _forget() -> None:
    global _lock, _loop
    _lock = threading.Lock()
    _loop = None


after_fork(_forget)
