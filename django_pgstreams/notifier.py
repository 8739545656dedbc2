"""The notifier: one buffer and one flushing thread per process and database.

Invariant: a wake-up that was announced stays in the buffer until a flush that carries it has committed, so a
failing flush costs time only, and never fails an append. Interleavings that matter:

- announced while a flush is under way: its batch was taken before, so the new wake-up waits for the next;
- a flush fails: its batch goes back and is merged with what came meanwhile, highest tail wins;
- the process forks: the child starts with no notifier; the parent's thread flushes what the parent announced;
- the process ends: the thread is asked to stop, and what is left is flushed in the calling thread, since no
  other can be started then;
- the server does not answer: the flush has a deadline, and counts as failed after it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import multiprocessing.util
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable

import psycopg

from . import background, conf, database, sql, wire
from .buffer import Batch, Buffer, WakeUp

logger = logging.getLogger(__name__)

_ROLE = "notifier"
_SECONDS_PER_NOTIFIER = 0.001
"""Of all notifiers of a cluster together, at most one flush in this time: each takes a cluster-wide lock."""
_REST_PER_FLUSH = 4
_MAX_REST_SECONDS = 0.25
_COUNT_AGAIN_SECONDS = 0.05
"""Notifiers that start together do not see each other at once: each counts again after this time, then after
twice that, and so on."""
_MAX_COUNT_SECONDS = 1.0
_COUNT_SECONDS_PER_NOTIFIER = 0.1
"""Or in this time, all notifiers of a cluster together, where there are many: a count costs about 0.2 ms."""
_JOIN_SECONDS = 5.0


class Notifier:
    """Announces wake-ups of one database. Its thread starts with the first one."""

    def __init__(
        self,
        using: str,
        *,
        channel: str,
        flush_interval_seconds: float,
        timeout_seconds: float,
        idle_seconds: float,
    ) -> None:
        self._using = using
        self._channel = channel
        self._flush_interval_seconds = flush_interval_seconds
        self._timeout_seconds = timeout_seconds
        self._idle_seconds = idle_seconds
        self._condition = threading.Condition()
        self._buffer = Buffer()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._connection: database.Connection | None = None
        self._durations: deque[float] = deque(maxlen=32)
        self._sessions = 1
        self._count_at = -math.inf
        self._count_interval_seconds = 0.0
        self.flushes = 0
        self.failed_flushes = 0

    @property
    def pending(self) -> int:
        """How many streams have a wake-up that waits."""
        return len(self._buffer)

    def announce(self, wake_ups: Iterable[WakeUp]) -> bool:
        """Put wake-ups into the buffer and return at once; False if this notifier has been closed."""
        with self._condition:
            if self._stopping:
                return False
            thread_waits = not self._buffer
            self._buffer.add(wake_ups)
            if self._thread is None or not self._thread.is_alive():
                self._start()
            if thread_waits:
                self._condition.notify()
            return True

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="pgstreams-notifier", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The interpreter is shutting down: `close` flushes in its own thread.
            logger.debug("No notifier thread can start any more; the last flush comes at exit")
            return
        self._thread = thread

    def close(self, timeout_seconds: float) -> None:
        """Stop the thread, flush what is left in the calling thread, and disconnect; bounded in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._condition:
            self._stopping = True
            thread = self._thread
            self._condition.notify()
        if thread is not None:
            thread.join(timeout_seconds)
            if thread.is_alive():
                logger.warning("The notifier of %r did not stop in %.1f s", self._using, timeout_seconds)
                return
        remaining = deadline - time.monotonic()
        if self._buffer and remaining > 0:
            try:
                self._flush(self._buffer.take(), remaining)
            except Exception as error:  # noqa: BLE001 - the poll delivers; a traceback at exit helps nobody
                logger.warning("The last wake-ups of %r were not sent: %s", self._using, error)
        self._disconnect()

    # The thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while (batch := self._next_batch()) is not None:
            if not batch.wake_ups and not batch.everything:
                self._disconnect()
                continue
            try:
                self._flush(batch, self._timeout_seconds)
            except Exception as error:  # noqa: BLE001 - whatever it was, the wake-ups come back
                failures += 1
                self._keep(batch, failures, error)
                self._rest(database.backoff_seconds(failures))
                continue
            if failures:
                logger.info("Wake-ups of %r are sent again", self._using)
                failures = 0
            self._rest(self._pace())

    def _keep(self, batch: Batch, failures: int, error: Exception) -> None:
        """Take a batch back whose flush failed, and give its connection up."""
        self.failed_flushes += 1
        with self._condition:
            self._buffer.restore(batch)
        self._disconnect()
        if failures == 1:
            logger.warning("Wake-ups of %r wait: the flush failed: %s", self._using, error)

    def _next_batch(self) -> Batch | None:
        """What waits, once something does; an empty batch after a time of idleness; None to end."""
        with self._condition:
            if not self._condition.wait_for(
                lambda: self._buffer or self._stopping,
                timeout=self._idle_seconds if self._connection else None,
            ):
                return Batch((), False)
            return None if self._stopping else self._buffer.take()

    def _rest(self, seconds: float) -> None:
        """Let wake-ups gather, unless the notifier is to stop."""
        if seconds > 0:
            with self._condition:
                self._condition.wait_for(lambda: self._stopping, timeout=seconds)

    def _pace(self) -> float:
        """Seconds to rest after a flush."""
        spread = _SECONDS_PER_NOTIFIER * self._sessions
        own_share = min(_REST_PER_FLUSH * statistics.median(self._durations), _MAX_REST_SECONDS)
        return max(self._flush_interval_seconds, spread, own_share)

    def _flush(self, batch: Batch, timeout_seconds: float) -> None:
        """Send a batch. Raises whatever goes wrong, `TimeoutError` if nothing comes back."""
        if self._connection is None:
            self._connection = database.connect(self._using, _ROLE, timeout_seconds=timeout_seconds)
            self._count_at = -math.inf
            self._count_interval_seconds = _COUNT_AGAIN_SECONDS
        # An array of Postgres; the payloads hold digits and punctuation only.
        payloads = "{" + ",".join(f'"{payload}"' for payload in wire.pack(batch)) + "}"
        started = time.monotonic()
        database.notify(self._connection, self._channel, payloads, timeout_seconds=timeout_seconds)
        self._durations.append(time.monotonic() - started)
        self.flushes += 1
        if started >= self._count_at:
            self._sessions = self._count(self._connection, timeout_seconds)
            self._set_next_count(started)

    def _count(self, connection: database.Connection, timeout_seconds: float) -> int:
        """How many notifiers the cluster has."""
        name = database.application_name(_ROLE)
        rows = database.execute(connection, sql.COUNT_SESSIONS, [name], timeout_seconds=timeout_seconds)
        return int(rows[0][0] or 1)

    def _set_next_count(self, now: float) -> None:
        wait = self._count_interval_seconds
        longest = max(_MAX_COUNT_SECONDS, _COUNT_SECONDS_PER_NOTIFIER * self._sessions)
        self._count_interval_seconds = min(2 * wait, longest)
        self._count_at = now + wait

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()


# The process's notifiers ---------------------------------------------------------------------------

_lock = threading.Lock()
_notifiers: dict[str, Notifier] = {}
_at_exit = False


def get(using: str) -> Notifier:
    """The process's notifier for a database alias."""
    global _at_exit
    background.check_process()
    with _lock:
        if using not in _notifiers:
            settings = conf.get()
            _notifiers[using] = Notifier(
                using,
                channel=settings.CHANNEL,
                flush_interval_seconds=settings.FLUSH_INTERVAL_SECONDS,
                timeout_seconds=settings.QUERY_TIMEOUT_SECONDS,
                idle_seconds=settings.IDLE_SECONDS,
            )
            if not _at_exit:
                atexit.register(_flush_at_exit)
                # A child that multiprocessing forked runs these; whether others depends on the Python.
                multiprocessing.util.Finalize(None, _flush_at_exit, exitpriority=0)
                _at_exit = True
        return _notifiers[using]


def known(using: str) -> Notifier | None:
    """The process's notifier for a database alias, if there is one yet."""
    background.check_process()
    return _notifiers.get(using)


def announce(using: str, wake_ups: Iterable[WakeUp]) -> None:
    """Have the process's notifier send wake-ups; never waits and never raises for the database's sake.

    Nothing is sent where the relay does that (`PGSTREAMS["NOTIFIER"]`).
    """
    if conf.get().NOTIFIER == "relay":
        return
    wake_ups = tuple(wake_ups)
    while not get(using).announce(wake_ups):
        pass  # closed between the look-up and the call: the next look-up makes a new one


def close_all(timeout_seconds: float = _JOIN_SECONDS) -> None:
    """Flush and disconnect every notifier of the process; the next announcement starts anew."""
    background.check_process()
    with _lock:
        closing = list(_notifiers.values())
        _notifiers.clear()
    for notifier in closing:
        notifier.close(timeout_seconds)


def _flush_at_exit() -> None:
    close_all(conf.get().EXIT_FLUSH_SECONDS)


def _forget() -> None:
    global _lock, _notifiers, _at_exit
    _lock = threading.Lock()
    _notifiers = {}
    _at_exit = False


background.after_fork(_forget)
