"""The listener: one connection per process and database that runs `LISTEN` and its health check, no more.

Invariant: whoever is attached hears of every wake-up sent after a `LISTEN` has committed, and is told to look
at everything right after each such commit, since nothing is queued for an absent listener. So the order is:
connect, `LISTEN` committed, "everything". Interleavings that matter: a wake-up between attach and `LISTEN` is
covered by the "everything"; one lost with a broken connection is covered by the next connection's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from psycopg.sql import SQL, Identifier

from . import background, conf, database, wire
from .buffer import Batch

logger = logging.getLogger(__name__)

_ROLE = "listener"
_EVERYTHING = Batch((), everything=True)
_HEALTH_CHECK_TIMEOUT_SECONDS = 5.0
_CONNECT_TIMEOUT_SECONDS = 15.0
_MAX_BACKOFF_SECONDS = 10.0

Callback = Callable[[Batch], None]


class Listener:
    """Listens on one database while somebody is attached, and for `idle_seconds` after."""

    def __init__(self, using: str, *, channel: str, health_check_seconds: float, idle_seconds: float) -> None:
        self._using = using
        self._channel = channel
        self._health_check_seconds = health_check_seconds
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._callbacks: tuple[Callback, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self.connects = 0
        self.wake_ups = 0

    def attach(self, callback: Callback) -> None:
        """Have `callback` called, in the background thread, with each batch of wake-ups; it may not block."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)
        background.loop().call_soon_threadsafe(self._start)

    def detach(self, callback: Callback) -> None:
        """Stop calling `callback`."""
        with self._lock:
            self._callbacks = tuple(known for known in self._callbacks if known != callback)
            idle = not self._callbacks
        if idle and background.is_running():
            loop = background.loop()
            loop.call_soon_threadsafe(loop.call_later, self._idle_seconds, self._stop_if_idle)

    @property
    def attached(self) -> int:
        """How many callbacks are attached."""
        return len(self._callbacks)

    # In the background loop ------------------------------------------------------------------------

    def _start(self) -> None:
        if self._task is None and self._callbacks:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pgstreams-listener")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The listener of %r failed", self._using, exc_info=error)
        self._start()  # somebody attached while this task was being stopped

    def _stop_if_idle(self) -> None:
        if not self._callbacks and self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop listening and disconnect."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is the cure
                self._failures += 1
                if self._failures == 1:
                    because = str(error) or type(error).__name__
                    logger.warning("Not listening on %r: %s; trying again", self._using, because)
            await asyncio.sleep(database.backoff_seconds(self._failures, _MAX_BACKOFF_SECONDS))

    async def _listen(self) -> None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            connection = await database.aconnect(self._using, _ROLE)
        try:
            listen = SQL("LISTEN {}").format(Identifier(self._channel))
            await database.within(_CONNECT_TIMEOUT_SECONDS, connection, connection.execute(listen))
            self.connects += 1
            self._failures = 0
            logger.info("Listening on %r", self._using)
            self._dispatch(_EVERYTHING)
            while True:
                await self._hear(connection)
                await database.within(
                    _HEALTH_CHECK_TIMEOUT_SECONDS, connection, connection.execute("SELECT 1")
                )
        finally:
            await connection.close()

    async def _hear(self, connection: database.AsyncConnection) -> None:
        async for notification in connection.notifies(timeout=self._health_check_seconds):
            self.wake_ups += 1
            self._dispatch(wire.unpack(notification.payload))

    def _dispatch(self, batch: Batch) -> None:
        for callback in self._callbacks:
            try:
                callback(batch)
            except Exception:
                logger.exception("A subscriber of %r could not be woken", self._using)


# The process's listeners ---------------------------------------------------------------------------

_lock = threading.Lock()
_listeners: dict[str, Listener] = {}


def get(using: str) -> Listener:
    """The process's listener for a database alias."""
    with _lock:
        if using not in _listeners:
            settings = conf.get()
            _listeners[using] = Listener(
                using,
                channel=settings.CHANNEL,
                health_check_seconds=settings.HEALTH_CHECK_SECONDS,
                idle_seconds=settings.IDLE_SECONDS,
            )
        return _listeners[using]


def close_all(timeout_seconds: float = 5.0) -> None:
    """Disconnect every listener of the process. One that somebody is attached to connects again later."""
    with _lock:
        closing = list(_listeners.items())
        for using, listener in closing:
            if not listener.attached:
                del _listeners[using]  # the next one takes the settings as they are then
    if background.is_running():
        for using, listener in closing:
            try:
                background.submit(listener.close()).result(timeout_seconds)
            except TimeoutError:
                logger.warning("The listener of %r did not stop in %.1f s", using, timeout_seconds)


def _forget() -> None:
    global _lock, _listeners
    _lock = threading.Lock()
    _listeners = {}


background.after_fork(_forget)
