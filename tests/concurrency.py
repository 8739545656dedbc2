"""Threads with database connections of their own, and waiting with a deadline."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from asgiref.sync import async_to_sync
from django.db import connections

DEADLINE_SECONDS = 30.0


def start(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run a function in a thread of its own, whose connections are closed at its end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)
        finally:
            connections.close_all()

    threading.Thread(target=run, daemon=True).start()
    return future


def run_all(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time, each in its thread; their results, or the first one's error."""
    gate = threading.Barrier(len(functions))

    def at_once(function: Callable[[], Any]) -> Any:
        gate.wait(DEADLINE_SECONDS)
        return function()

    futures = [start(at_once, function) for function in functions]
    return [future.result(4 * DEADLINE_SECONDS) for future in futures]


def in_this_thread(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run an async test in an event loop whose database work is done by the test's own thread."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        return async_to_sync(test)(*args, **kwargs)

    return run
