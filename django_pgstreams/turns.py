"""Turns of the thread for Django's database work, shared by all who wait for it at the same moment.

Each `database_sync_to_async` is a turn of its own, and with `CONN_MAX_AGE = 0` opens a connection of its own,
which is too slow for a crowd that comes back at once. Here many calls share a turn, and so a connection.
Invariants: a call is made on its own, in its caller's context, and its error, of whatever kind, is its
caller's alone; a broken connection does not serve the next call; an answer is given to those who asked before
its query began, and kept for nobody; and a turn ends soon, so that other users of the thread get theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from asgiref.sync import AsyncToSync, SyncToAsync, sync_to_async
from channels.db import aclose_old_connections, database_sync_to_async
from django.db import close_old_connections, connections

from .database import mark_retrieved

T = TypeVar("T")

_TURN_SECONDS = 0.05
_MAX_KEYS = 500


class _Call(NamedTuple):
    function: Callable[[], Any]
    context: contextvars.Context
    answer: asyncio.Future[Any]


class _Turns:
    """The calls of one event loop that wait for the thread."""

    def __init__(self) -> None:
        self._waiting: deque[_Call] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, function: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.append(_Call(function, contextvars.copy_context(), answer))
        self.start()
        return answer

    def start(self) -> None:
        """Have a turn end after now."""
        if self._task is None:
            loop = asyncio.get_running_loop()
            # In a context of its own: the thread is everybody's, not that of whoever came first.
            self._task = loop.create_task(
                self._serve(loop), name="pgstreams-turns", context=contextvars.Context()
            )

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take a turn, and others as long as somebody waits."""
        try:
            await sync_to_async(close_old_connections)()
            await sync_to_async(self._take_turn)(loop)
            while self._waiting:
                await sync_to_async(self._take_turn)(loop)
        except Exception as error:  # noqa: BLE001 - those who wait have it
            while self._waiting:
                _settle(self._waiting.popleft().answer, error=error)
        finally:
            self._task = None
            while self._waiting:  # the event loop ends
                self._waiting.popleft().answer.cancel()

    def _take_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the calls that wait, in the thread, one after the other, for a short time."""
        end = time.monotonic() + _TURN_SECONDS
        while self._waiting and time.monotonic() < end:
            call = self._waiting.popleft()
            if call.answer.cancelled():
                continue
            try:
                given = {"value": call.context.run(call.function)}
            except BaseException as error:  # noqa: BLE001 - its caller has it, and would wait for ever
                given = {"error": _bearable(error)}
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(partial(_settle, call.answer, **given))
            _close_broken()
        if not self._waiting:  # else the next turn needs them
            close_old_connections()


def _settle(answer: asyncio.Future[Any], value: Any = None, error: Exception | None = None) -> None:
    if answer.done():
        return  # whoever asked has left
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)


def _bearable(error: BaseException) -> Exception:
    """An error as its caller can take it.

    No future takes a `StopIteration`; a `CancelledError` would look as if somebody had cancelled the caller;
    and a `SystemExit`, which ends no process from a thread, would end the event loop, with all who use it.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    bearable = RuntimeError(f"a call raised {type(error).__name__}")
    bearable.__cause__ = error
    return bearable


def _close_broken() -> None:
    """Close what a call has left unusable, as Django does between requests, but keep what works."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and (
            connection.errors_occurred
            or connection.get_autocommit() != connection.settings_dict["AUTOCOMMIT"]
        ):
            connection.close_if_unusable_or_obsolete()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


async def run(function: Callable[..., T], *args: Any) -> T:
    """What a sync function returns, called in the thread for database work, in a turn shared with others."""
    if _is_bound():
        return await database_sync_to_async(function)(*args)
    return await _of_loop().add(partial(function, *args))


async def give_back() -> None:
    """Have the connections closed that async queries of Django's, made in this task, have kept.

    The last turn does it at its end, so nobody waits for that.
    """
    if _is_bound():
        await aclose_old_connections()
    else:
        _of_loop().start()


def _of_loop() -> _Turns:
    return _turns.setdefault(asyncio.get_running_loop(), _Turns())


def _is_bound() -> bool:
    """Whether asgiref binds the caller's database work to a thread that is not everybody's.

    So it is in Django's async views, and under `async_to_sync`, where a test's transaction may be open.
    """
    executor = getattr(AsyncToSync.executors, "current", None)
    return executor is not None or SyncToAsync.thread_sensitive_context.get(None) is not None


class _Query(Generic[T]):
    """What is asked in one go; its answer comes once `keys` is not added to any more."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.answer: asyncio.Future[Mapping[str, T]]


class LookUp(Generic[T]):
    """Finds for one event loop what is asked for by key, in one query for all who wait at the same moment.

    `find` is called in the thread with keys, and returns what exists of them.
    """

    def __init__(self, find: Callable[[Collection[str]], Mapping[str, T]]) -> None:
        self._find = find
        self._next: _Query[T] | None = None  # that has not begun
        self._lock = threading.Lock()

    async def get(self, key: str) -> T | None:
        """What there is under a key now, or None. Those who ask at the same moment are given the same."""
        if _is_bound():
            return (await run(self._find, [key])).get(key)
        with self._lock:
            query, is_new = self._next, self._next is None
            if query is None:
                query = self._next = _Query()
            query.keys.add(key)
            if len(query.keys) >= _MAX_KEYS:
                self._next = None
        if is_new:
            query.answer = asyncio.ensure_future(run(self._ask, query))
            query.answer.add_done_callback(mark_retrieved)
            # Also if it never began: nobody may wait for it after its end.
            query.answer.add_done_callback(lambda _: self._close(query))
        # Whoever leaves does not take the answer away from the others.
        return (await asyncio.shield(query.answer)).get(key)

    def _ask(self, query: _Query[T]) -> Mapping[str, T]:
        self._close(query)
        return self._find(query.keys)

    def _close(self, query: _Query[T]) -> None:
        """Have whoever asks from now on not be given this query's answer."""
        with self._lock:
            if self._next is query:
                self._next = None
