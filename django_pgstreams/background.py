"""The process's background event loop: one daemon thread that runs listeners and the blocking readers' hub.

Invariant: a forked child never uses what its parent's threads own. `after_fork` hooks run in the child before
anything else of the app can, and put fresh, empty objects in their place. Where Python is not told of a fork
(uWSGI), the process's id tells: whoever looks up what a process owns calls `check_process` first.
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
    check_process()
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
    check_process()
    return _loop is not None


def _run(started: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(started)
    started.run_forever()


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Run a coroutine on the background loop."""
    return asyncio.run_coroutine_threadsafe(work, loop())


# Forks ---------------------------------------------------------------------------------------------

_process = os.getpid()
_resets: list[Callable[[], None]] = []
_locks: dict[int, threading.Lock] = {}


def after_fork(reset: Callable[[], None]) -> None:
    """Have `reset` run in every forked child, before anything else there uses the app."""
    _resets.append(reset)


def check_process() -> None:
    """Start anew if this process is another one than before."""
    if os.getpid() != _process:
        _start_anew()


def _start_anew() -> None:
    global _process
    # A lock of this process's own: an inherited one may be held by a thread that is not here.
    with _locks.setdefault(os.getpid(), threading.Lock()):
        if os.getpid() != _process:
            for reset in _resets:
                reset()
            _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def _forget() -> None:
    global _lock, _loop
    _lock = threading.Lock()
    _loop = None


after_fork(_forget)
