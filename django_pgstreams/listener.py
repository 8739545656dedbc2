"""The listener: one connection per process and database that runs `LISTEN` and its health check, no more.

Invariant: whoever is attached hears of every wake-up sent after a `LISTEN` has committed, and is told to look
at everything right after each such commit, since nothing is queued for an absent listener. So the order is:
connect, `LISTEN` committed, "everything". Interleavings that matter: a wake-up between attach and `LISTEN` is
covered by the "everything"; one lost with a broken connection is covered by the next connection's.

A `LISTEN` that has committed may still hear nothing: a pooler in between gives its session away. So each
connection is proved by a notification from another one; where it is not heard, this process is deaf, says so
once, and tries again now and then. Notifications come in the order of their commits, so while others come the
probe may be queued behind them in a process that is busy: that is no deafness.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

import psycopg
from django.db import router
from psycopg.sql import SQL, Identifier

from . import background, conf, database, sql, wire
from .buffer import Batch
from .models import Stream

logger = logging.getLogger(__name__)

_ROLE = "listener"
_PROBE_ROLE = "probe"
_EVERYTHING = Batch((), everything=True)
_CONNECT_TIMEOUT_SECONDS = 15.0
_MAX_BACKOFF_SECONDS = 10.0
_PROBE_SECONDS = 2.0
"""A notification that is not heard for so long, after its commit or the last one heard, will not be."""
_QUEUED_PROBE_SECONDS = 30.0
"""Nor one that is not heard for so long after its commit while others are."""
_PROBE_SLICE_SECONDS = 0.1
_MAX_DEAF_BACKOFF_SECONDS = 60.0
_PATIENCE_SECONDS = 5.0
"""A connection that is lost is mostly there again within this time: nobody polls faster for it."""

Callback = Callable[[Batch], None]
State = Literal["yes", "no", "deaf"]


class Deaf(Exception):
    """`LISTEN` has committed, and yet what another connection sends is not heard."""


class Listener:
    """Listens on one database while somebody is attached, and for `idle_seconds` after.

    It connects by the alias `by`, and proves itself by what is sent through the alias `using`.
    """

    def __init__(
        self, using: str, *, by: str = "", channel: str, health_check_seconds: float, idle_seconds: float
    ) -> None:
        self._using = using
        self._by = by or using
        self._channel = channel
        self._health_check_seconds = health_check_seconds
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._callbacks: tuple[Callback, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._awaited_probe = ""
        self._not_listening_since = math.inf  # monotonic; infinite while it listens or nobody wants it to
        self.listening: State = "no"
        self.is_proved = False
        self.connected_since: datetime.datetime | None = None
        self.last_wake_up: datetime.datetime | None = None
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

    @property
    def hears(self) -> bool:
        """Whether wake-ups arrive, but for a short interruption; otherwise polls must make up for them."""
        lost_for = time.monotonic() - self._not_listening_since
        return self.listening != "deaf" and lost_for < _PATIENCE_SECONDS

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
        try:
            while True:
                self._not_listening_since = min(self._not_listening_since, time.monotonic())
                try:
                    await self._listen()
                except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is the cure
                    self._lost(error)
                await asyncio.sleep(database.backoff_seconds(self._failures, self._longest_backoff_seconds))
        finally:
            self.listening, self.connected_since = "no", None
            self._not_listening_since = math.inf

    @property
    def _longest_backoff_seconds(self) -> float:
        return _MAX_DEAF_BACKOFF_SECONDS if self.listening == "deaf" else _MAX_BACKOFF_SECONDS

    def _lost(self, error: Exception) -> None:
        """Take note of a connection that ended, and of one that could not be made; log a change of state."""
        before = self.listening
        self._failures += 1
        self.connected_since = None
        if isinstance(error, Deaf):
            self.listening = "deaf"
            if before != "deaf":
                logger.error("%s", error)
                self._dispatch(_EVERYTHING)
            return
        if before != "deaf":
            self.listening = "no"
        if before == "yes" or self._failures == 1:
            because = str(error) or type(error).__name__
            logger.warning("Not listening on %r: %s; trying again", self._using, because)

    async def _listen(self) -> None:
        """Listen until the connection ends; raises whatever ended it, `Deaf` when nothing is heard on it."""
        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            connection = await database.aconnect(self._by, _ROLE)
        try:
            listen = SQL("LISTEN {}").format(Identifier(self._channel))
            await database.within(_CONNECT_TIMEOUT_SECONDS, connection, connection.execute(listen))
            self._begin()
            while True:
                if not self.is_proved:
                    self.is_proved = await self._prove(connection)
                # Of each period, half to hear, a quarter for the answer, and the rest to give up without one.
                await self._hear(connection, self._health_check_seconds / 2)
                await database.within(
                    self._health_check_seconds / 4, connection, connection.execute("SELECT 1")
                )
        finally:
            self.is_proved = False
            await connection.close()

    def _begin(self) -> None:
        """`LISTEN` has committed."""
        self.connects += 1
        self.connected_since = datetime.datetime.now(datetime.UTC)
        self._not_listening_since = math.inf
        if self.listening == "no":
            self.listening = "yes"
            logger.info("Listening on %r", self._using)
        self._dispatch(_EVERYTHING)

    async def _prove(self, connection: database.AsyncConnection) -> bool:
        """Whether the connection hears what another one sends; False if that could not be found out.

        Raises `Deaf` if it does not, after `UNLISTEN`.
        """
        self._awaited_probe = wire.probe()
        sending = asyncio.create_task(self._send(self._awaited_probe), name="pgstreams-probe")
        sending.add_done_callback(database.mark_retrieved)
        try:
            ends_at = latest_at = math.inf
            while self._awaited_probe:
                now = time.monotonic()  # before it hears: a loop that was held up shall hear first
                if await self._hear(connection, _PROBE_SLICE_SECONDS, stop_after=1):
                    # The probe may be queued behind these.
                    ends_at = max(ends_at, time.monotonic() + _PROBE_SECONDS)
                if now > min(ends_at, latest_at) and self._awaited_probe:
                    await self._unlisten(connection)
                    raise Deaf(self._why_deaf())
                if sending.done() and latest_at == math.inf:
                    if (error := sending.exception()) is not None:
                        logger.info("Not known yet whether %r hears: %s", self._using, error)
                        return False
                    sent_at = time.monotonic()
                    ends_at, latest_at = sent_at + _PROBE_SECONDS, sent_at + _QUEUED_PROBE_SECONDS
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        self._failures = 0
        if self.listening == "deaf":
            self.listening = "yes"
            logger.info("Listening on %r", self._using)
        return True

    async def _send(self, payload: str) -> None:
        """Notify through the streams' own alias, on a connection that is there for this only."""
        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            connection = await database.aconnect(self._using, _PROBE_ROLE)
        try:
            notify = connection.execute(sql.PROBE, {"channel": self._channel, "payload": payload})
            await database.within(_CONNECT_TIMEOUT_SECONDS, connection, notify)
        finally:
            await connection.close()

    async def _unlisten(self, connection: database.AsyncConnection) -> None:
        """A pooler keeps the session, and would go on handing its notifications to others."""
        with contextlib.suppress(psycopg.Error, TimeoutError):
            await database.within(_PROBE_SECONDS, connection, connection.execute("UNLISTEN *"))

    def _why_deaf(self) -> str:
        if self._by == self._using:
            return (
                f"LISTEN through the database alias {self._using!r} hears nothing, as behind a pooler in "
                'transaction mode: set PGSTREAMS["LISTEN_DATABASE"] to an alias that connects directly. '
                "Until then streams are polled at the fast rate."
            )
        return (
            f'LISTEN through PGSTREAMS["LISTEN_DATABASE"], {self._by!r}, does not hear what is sent through '
            f"{self._using!r}: it must lead to the same database, and not through a pooler in transaction "
            "mode. Until then streams are polled at the fast rate."
        )

    async def _hear(
        self, connection: database.AsyncConnection, seconds: float, *, stop_after: int | None = None
    ) -> bool:
        """Take what comes in a time; whether anything did."""
        has_heard = False
        async for notification in connection.notifies(timeout=seconds, stop_after=stop_after):
            has_heard = True
            if wire.is_probe(notification.payload):
                if notification.payload == self._awaited_probe:
                    self._awaited_probe = ""
                continue
            self.wake_ups += 1
            self.last_wake_up = datetime.datetime.now(datetime.UTC)
            self._dispatch(wire.unpack(notification.payload))
        return has_heard

    def _dispatch(self, batch: Batch) -> None:
        for callback in self._callbacks:
            try:
                callback(batch)
            except Exception:
                logger.exception("A subscriber of %r could not be woken", self._using)


# The process's listeners ---------------------------------------------------------------------------

_lock = threading.Lock()
_listeners: dict[str, Listener] = {}


def alias_of(using: str) -> str:
    """The alias that the listener of `using` connects by.

    `PGSTREAMS["LISTEN_DATABASE"]` stands for the alias that streams are written to; others listen themselves.
    """
    other = conf.get().LISTEN_DATABASE
    return other if other and using == router.db_for_write(Stream) else using


def known(using: str) -> Listener | None:
    """The process's listener for a database alias, if there is one yet."""
    background.check_process()
    return _listeners.get(using)


def get(using: str) -> Listener:
    """The process's listener for a database alias."""
    background.check_process()
    with _lock:
        if using not in _listeners:
            settings = conf.get()
            _listeners[using] = Listener(
                using,
                by=alias_of(using),
                channel=settings.CHANNEL,
                health_check_seconds=settings.HEALTH_CHECK_SECONDS,
                idle_seconds=settings.IDLE_SECONDS,
            )
        return _listeners[using]


def close_all(timeout_seconds: float = 5.0) -> None:
    """Disconnect every listener of the process. One that somebody is attached to connects again later."""
    background.check_process()
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
