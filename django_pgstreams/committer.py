"""The committer: one thread per process and database that stores what every `StreamWriter` appends.

While one batch commits the next one gathers, so batching needs no timer. Invariant: each append is answered
once: with its offset after its commit, or with an error. Interleavings that matter:

- the row of a stream is locked elsewhere: its lane is parked; a second thread, with a connection of its
  own, waits for one such row at a time, and everybody else goes on;
- the connection is lost at a commit: `settling` finds out what became of the batch before the next is sent;
- a caller is cancelled, or its event loop is closed: its append is stored all the same, and nobody is told;
- the process forks: the child starts with no committer, and the parent stores what the parent appended;
- the process ends: what waits is stored first, bounded in time, and the rest is refused.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import threading
import time
from collections.abc import Callable

import psycopg
import psycopg.errors

from . import answers, background, conf, hub, notifier
from .buffer import Batch, WakeUp
from .exceptions import AppendUnknown, StreamBusy, WriterFull
from .pending import Append, Pending, Segment
from .settling import Away, Session

logger = logging.getLogger(__name__)

_BATCH_CHUNKS = 2000
_BATCH_BYTES = 4 * 1024 * 1024
_LOCK_TURN_SECONDS = 0.5
"""All parked streams together are tried in about this time, unless there are many."""
_SHORTEST_LOCK_WAIT_SECONDS = 0.02
_STRAY_ATTEMPTS = 3
_CLOSE_SECONDS = 5.0
_CLOSED = Away("the writer was closed before it could be stored")


class Committer:
    """Stores appends of one database. Its thread starts with the first one."""

    def __init__(
        self,
        using: str,
        *,
        timeout_seconds: float,
        idle_seconds: float,
        lock_timeout_seconds: float,
        outage_seconds: float,
        exit_seconds: float,
        max_pending_bytes: int,
    ) -> None:
        self._using = using
        self._timeout_seconds = timeout_seconds
        self._idle_seconds = idle_seconds
        self._lock_timeout_seconds = lock_timeout_seconds
        self._outage_seconds = outage_seconds
        self._exit_seconds = exit_seconds
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)
        self._wanted_parked = threading.Condition(self._lock)
        self._pending = Pending(max_pending_bytes)
        self._thread: threading.Thread | None = None
        self._parked_thread: threading.Thread | None = None
        self._sleeps = False
        self._stop_at: float | None = None
        self.batches = 0

    def add(self, append: Append, waits: bool) -> bool:
        """Take an append to store; False if this committer has been closed.

        Where there is no room it stands outside until there is; unless it `waits`: then `WriterFull`.
        """
        with self._lock:
            if self._stop_at is not None:
                return False
            if not waits and self._pending.is_full:
                raise WriterFull(
                    f"{self._pending.size_bytes:,} bytes wait to be stored already; "
                    "wait for earlier appends, or use append(), which waits."
                )
            self._pending.add(append)
            if self._sleeps:
                self._sleeps = False
                self._wanted.notify()
            if self._thread is None:
                self._thread = self._start(self._run, "pgstreams-writer")
        if self._thread is None:
            self._drain(time.monotonic() + self._exit_seconds)
        return True

    @property
    def pending_bytes(self) -> int:
        """What is not stored yet, its payloads and its own weight; without the lock, as `is_full`."""
        return self._pending.pending_bytes

    @property
    def is_full(self) -> bool:
        """Whether an append would stand outside; without the lock, so a moment old perhaps."""
        return self._pending.is_full

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread | None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            if not _process_ends:
                thread.start()
                return thread
        except RuntimeError:
            logger.debug("No thread can start any more: the interpreter is shutting down")
        return None

    def close(self, timeout_seconds: float) -> None:
        """Store what waits, disconnect, and refuse what could not be stored in time."""
        with self._lock:
            self._stop_at = deadline = time.monotonic() + timeout_seconds
            self._wanted.notify()
            self._wanted_parked.notify()
            threads = [self._thread, self._parked_thread]
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    logger.warning("%s of %r did not stop in time", thread.name, self._using)
        self._drain(deadline)

    # The threads -----------------------------------------------------------------------------------

    def _session(self, *, has_worked: bool = False) -> Session:
        return Session(
            self._using,
            timeout_seconds=self._timeout_seconds,
            keeps_trying=self._keeps_trying,
            has_worked=has_worked,
        )

    def _keeps_trying(self, failing_seconds: float) -> bool:
        return not self._is_over() and failing_seconds < self._outage_seconds

    def _is_over(self) -> bool:
        """Whether the time for storing what is left has passed."""
        return self._stop_at is not None and time.monotonic() >= self._stop_at

    def _run(self) -> None:
        _this_thread.stores = True
        session = self._session()
        while (batch := self._next_batch(session.is_connected)) is not None:
            if batch:
                self._store(session, batch)
            else:
                session.disconnect()
        session.close()
        if self._is_over():
            self._refuse_all()

    def _next_batch(self, is_connected: bool) -> list[Segment] | None:
        """What waits, once something does; an empty batch after a time of idleness; None to end."""
        with self._lock:
            while not self._pending.is_ready:
                if self._stop_at is not None:
                    return None
                self._sleeps = True
                timeout = self._idle_seconds if is_connected else None
                if not self._wanted.wait(timeout) and self._stop_at is None and self._sleeps:
                    return []
            self._sleeps = False
            if self._is_over():
                return None
            return self._pending.take_batch(_BATCH_CHUNKS, _BATCH_BYTES)

    def _run_parked(self) -> None:
        _this_thread.stores = True
        session = self._session(has_worked=True)
        while (segment := self._next_parked()) is not None:
            self._store_parked(session, segment)
        session.close()
        if self._is_over():
            self._refuse_all()

    def _next_parked(self) -> Segment | None:
        """The parked lane whose turn it is, once there is one; None, and the thread ends, when idle."""
        with self._lock:
            while self._stop_at is None and not self._pending.parked:
                if not self._wanted_parked.wait(self._idle_seconds):
                    break
            if not self._pending.parked or self._is_over():
                self._parked_thread = None
                return None
            return self._pending.take_parked(_BATCH_CHUNKS, _BATCH_BYTES)

    def _drain(self, deadline: float) -> None:
        """Store what the threads have left in the calling thread; refuse the rest after the deadline."""
        session = Session(
            self._using,
            timeout_seconds=min(self._timeout_seconds, max(0.0, deadline - time.monotonic())),
            keeps_trying=lambda _: time.monotonic() < deadline,
            has_worked=True,
        )
        while time.monotonic() < deadline:
            with self._lock:
                batch = self._pending.take_batch(_BATCH_CHUNKS, _BATCH_BYTES)
                parked = None if batch else self._pending.take_parked(_BATCH_CHUNKS, _BATCH_BYTES)
            if batch:
                self._store(session, batch)
            elif parked is not None:
                self._store_parked(session, parked)
            else:
                break
        session.close()
        if time.monotonic() >= deadline:
            self._refuse_all()

    # Storing ---------------------------------------------------------------------------------------

    def _store(self, session: Session, batch: list[Segment]) -> None:
        self.batches += 1
        results = self._attempt(session, [segment for segment in batch if not segment.is_empty])
        self._conclude(batch, results)
        lost = next((result for result in results if isinstance(result, Away)), None)
        if lost is not None:
            self._refuse_rest(lost)

    def _store_parked(self, session: Session, segment: Segment) -> None:
        """Wait for a parked stream's row for a while, and store its appends if it is free in time."""
        left = (segment.lane.parked_at or 0) + self._lock_timeout_seconds - time.monotonic()
        longest = min(_LOCK_TURN_SECONDS, self._timeout_seconds / 2)
        turn = min(longest / (1 + self._pending.parked), max(left, 0))
        wait = max(turn, _SHORTEST_LOCK_WAIT_SECONDS)
        if segment.is_empty:
            results: list[answers.Result] = []
        else:
            results = self._attempt(session, [segment], wait)
            if results == [answers.LOCKED] and left <= wait:
                results = [
                    StreamBusy(
                        f"Another transaction has held stream {segment.lane.key!r} for "
                        f"{self._lock_timeout_seconds:g} s; nothing was stored."
                    )
                ]
        self._conclude([segment], results)

    def _attempt(
        self,
        session: Session,
        segments: list[Segment],
        lock_timeout_seconds: float | None = None,
        stray_attempts: int = _STRAY_ATTEMPTS,
    ) -> list[answers.Result]:
        """Store segments; where the database refuses them, find out which one it refuses.

        Chunks that something else stored in the way of a stream's appends are stepped over.
        """
        if not segments:
            return []
        try:
            return list(session.store(segments, lock_timeout_seconds))
        except psycopg.errors.LockNotAvailable:
            return [answers.LOCKED] * len(segments)
        except (Away, AppendUnknown) as error:
            return [error] * len(segments)
        except psycopg.Error as error:
            if len(segments) == 1:
                if not stray_attempts or not isinstance(error, psycopg.errors.UniqueViolation):
                    return [error]
                if not session.step_over(segments[0].lane.stream_id):
                    return [answers.LOCKED]
                return self._attempt(session, segments, lock_timeout_seconds, stray_attempts - 1)
        except Exception as error:  # the thread must go on
            logger.exception("A batch of the writer of %r failed", self._using)
            session.disconnect()
            return [error] * len(segments)
        middle = len(segments) // 2
        return [
            *self._attempt(session, segments[:middle], lock_timeout_seconds),
            *self._attempt(session, segments[middle:], lock_timeout_seconds),
        ]

    def _conclude(self, batch: list[Segment], results: list[answers.Result]) -> None:
        """Announce what is stored, answer, and only then give the lanes back.

        So nobody learns that a later append of a stream is stored before all earlier ones are answered.
        """
        replies: list[answers.Answer] = []
        wake_ups: list[WakeUp] = []
        concluded: list[tuple[Segment, answers.Result, int]] = []
        remaining = iter(results)
        for segment in batch:
            result = answers.NOTHING if segment.is_empty else next(remaining)
            if isinstance(result, StreamBusy):
                with self._lock:
                    segment.take_lane()
            answered = answers.of_segment(segment, result, replies, wake_ups)
            concluded.append((segment, result, answered))
        if wake_ups:
            self._announce(wake_ups)
        answers.send(replies)
        with self._lock:
            self._take_back(concluded)

    def _take_back(self, concluded: list[tuple[Segment, answers.Result, int]]) -> None:
        """Give lanes back to where they belong, and wake who is to work on them."""
        now = time.monotonic()
        for segment, result, answered in concluded:
            if result == answers.LOCKED:
                self._pending.park(segment, now)
            else:
                self._pending.finish(segment, answered)
        if self._pending.parked:
            self._wanted_parked.notify()
            if self._parked_thread is None and self._stop_at is None:
                self._parked_thread = self._start(self._run_parked, "pgstreams-writer-parked")
        if self._pending.is_ready and self._sleeps:
            self._wanted.notify()

    def _refuse_all(self) -> None:
        """Refuse what could not be stored in time, also what stood outside."""
        while self._refuse_rest(_CLOSED):
            pass

    def _refuse_rest(self, reason: Away) -> bool:
        """Refuse all that is neither in a batch nor outside; False if there is nothing."""
        with self._lock:
            rest = self._pending.take_all()
        replies: list[answers.Answer] = []
        counts = [answers.of_segment(segment, reason, replies, []) for segment in rest]
        answers.send(replies)
        with self._lock:
            for segment, count in zip(rest, counts, strict=True):
                self._pending.finish(segment, count)
            if self._pending.is_ready and self._sleeps:
                self._wanted.notify()
        return bool(rest)

    def _announce(self, wake_ups: list[WakeUp]) -> None:
        try:
            hub.wake(self._using, Batch(tuple(wake_ups), everything=False))
            notifier.announce(self._using, wake_ups)
        except Exception:  # what is stored is stored: the poll finds it
            logger.exception("Chunks of %r were not announced", self._using)


# The process's committers --------------------------------------------------------------------------

_lock = threading.Lock()
_committers: dict[str, Committer] = {}
_at_exit = False
_process_ends = False
_this_thread = threading.local()


def known(using: str) -> Committer | None:
    """The process's committer for a database alias, if there is one yet."""
    background.check_process()
    return _committers.get(using)


def get(using: str) -> Committer:
    """The process's committer for a database alias."""
    global _at_exit
    background.check_process()
    committer = _committers.get(using)
    if committer is not None:
        return committer
    notifier.get(using)  # so that at exit this comes first, and what it stores is announced yet
    with _lock:
        if using not in _committers:
            settings = conf.get()
            _committers[using] = Committer(
                using,
                timeout_seconds=settings.QUERY_TIMEOUT_SECONDS,
                idle_seconds=settings.IDLE_SECONDS,
                lock_timeout_seconds=settings.WRITER_LOCK_TIMEOUT_SECONDS,
                outage_seconds=settings.WRITER_OUTAGE_SECONDS,
                exit_seconds=settings.EXIT_FLUSH_SECONDS,
                max_pending_bytes=settings.WRITER_MAX_PENDING_BYTES,
            )
            if not _at_exit:
                atexit.register(_close_at_exit)
                # A child that multiprocessing forked runs these; whether others depends on the Python.
                multiprocessing.util.Finalize(None, _close_at_exit, exitpriority=10)
                _at_exit = True
        return _committers[using]


def add(using: str, append: Append, waits: bool = True) -> None:
    """Have the process's committer store an append. Raises `WriterFull` unless it `waits`."""
    while not get(using).add(append, waits):
        pass  # closed between the look-up and the call: the next look-up makes a new one


def refuse_in_own_thread() -> None:
    """Raise `RuntimeError` in a thread of a committer, which would wait for itself."""
    if getattr(_this_thread, "stores", False):
        raise RuntimeError(
            "The callback of a future runs in the thread that stores: it must not wait for an append. "
            "Use append_nowait()."
        )


def is_full(using: str) -> bool:
    """Whether an append would have to wait for room."""
    return get(using).is_full


def close_all(timeout_seconds: float = _CLOSE_SECONDS) -> None:
    """Store what waits and disconnect, in every committer of the process; the next append starts anew."""
    background.check_process()
    with _lock:
        closing = list(_committers.values())
        _committers.clear()
    for committer in closing:
        committer.close(timeout_seconds)


def _close_at_exit() -> None:
    global _process_ends
    _process_ends = True  # what is appended yet is stored in the caller's thread: nobody closes again
    close_all(conf.get().EXIT_FLUSH_SECONDS)


atexit.register(_close_at_exit)  # also for a first append by a hook, when no other can be registered


def _forget() -> None:
    global _lock, _committers, _at_exit, _process_ends
    _lock = threading.Lock()
    _committers = {}
    _at_exit = _process_ends = False


background.after_fork(_forget)
