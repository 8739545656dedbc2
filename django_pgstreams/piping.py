"""What `StreamWriter.pipe` keeps between an iterator and the writer: text to join, and appends under way.

Invariant: what the iterator yielded is sent in its order, all of it, and no more than a bounded number of
appends is under way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from .exceptions import PGStreamsError

_MAX_UNDER_WAY = 256
_JOIN_BYTES = 64 * 1024
"""Text that is joined for a time is sent with this size at the latest."""
_ESCAPED_BYTES = 6
"""What a byte of text takes in JSON at the most (as `\\u0001`)."""


class Reply(Protocol):
    """A future of an append, of threads or of an event loop."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None: ...


class Timer(Protocol):
    """What can be called off."""

    def cancel(self) -> None: ...


class Failed(Exception):
    """An append of a pipe failed, for the reason that `error` is."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Joiner:
    """Joins consecutive strings, or bytes, up to a size; anything else is left as it is."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` of 0: nothing is joined."""
        self._max_bytes = max_bytes
        self._held: list[Any] = []
        self._size = 0

    def add(self, piece: Any) -> list[Any]:
        """Take a piece; returns what is to be appended now."""
        if not self._max_bytes or not isinstance(piece, str | bytes):
            return [*self.take(), piece]
        try:
            size = len(piece.encode() if isinstance(piece, str) else piece)
        except UnicodeEncodeError:
            return [*self.take(), piece]  # it cannot be stored: it fails alone
        full = self._held and (type(piece) is not type(self._held[0]) or self._size + size > self._max_bytes)
        ready = self.take() if full else []
        self._held.append(piece)
        self._size += size
        return ready + (self.take() if self._size >= self._max_bytes else [])

    def take(self) -> list[Any]:
        """What is held, joined; at most one value."""
        held, self._held, self._size = self._held, [], 0
        return [held[0][:0].join(held)] if held else []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self._held


class Flow:
    """Sends pieces in order, text joined for a while; its timer may run in another thread."""

    def __init__(
        self,
        send: Callable[[Any], Reply],
        start_timer: Callable[[float, Callable[[], None]], Timer],
        *,
        join_seconds: float | None,
        join_bytes: int | None,
        max_chunk_bytes: int,
    ) -> None:
        joins = bool(join_seconds or join_bytes)
        # What is joined is not refused for its size.
        largest = max(0, max_chunk_bytes - len('""')) // _ESCAPED_BYTES
        self._joiner = Joiner(min(join_bytes or _JOIN_BYTES, largest) if joins else 0)
        self._join_seconds = join_seconds
        self._send = send
        self._start_timer = start_timer
        self._timer: Timer | None = None
        self._lock = threading.Lock()
        self._under_way: deque[Reply] = deque()
        self._failure: Exception | None = None

    def push(self, piece: Any) -> None:
        """Take what the iterator yielded. Raises `Failed` if an earlier append has failed."""
        with self._lock:
            self._send_all(self._joiner.add(piece))
            if self._joiner.is_empty:
                self._stop_timer()
            elif self._timer is None and self._join_seconds:
                self._timer = self._start_timer(self._join_seconds, self.flush)
            while self._under_way and self._under_way[0].done():
                self._settle(self._under_way.popleft())
            self._raise_failure()

    def flush(self) -> None:
        """Send the text that is held."""
        with self._lock:
            self._stop_timer()
            self._send_all(self._joiner.take())

    def wait_for(self, *, all_of_them: bool = False) -> Reply | None:
        """The oldest append under way, if it must be waited for: all must be, or too many are under way."""
        with self._lock:
            too_many = len(self._under_way) > (0 if all_of_them else _MAX_UNDER_WAY)
            return self._under_way[0] if too_many else None

    def settle(self) -> None:
        """Take the result of the append that was waited for. Raises `Failed`."""
        with self._lock:
            self._settle(self._under_way.popleft())
            self._raise_failure()

    def stop(self) -> None:
        """Send nothing more; what is under way is stored, and nobody asks how it went."""
        with self._lock:
            self._stop_timer()
            self._joiner.take()
            for reply in self._under_way:
                reply.add_done_callback(_mark_retrieved)
            self._under_way.clear()

    def _send_all(self, values: list[Any]) -> None:
        for value in values:
            if self._failure is None:
                try:
                    self._under_way.append(self._send(value))
                except PGStreamsError as error:
                    self._failure = error

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _settle(self, reply: Reply) -> None:
        try:
            reply.result()
        except PGStreamsError as error:
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise Failed(self._failure)


def _mark_retrieved(reply: Any) -> None:
    reply.exception()
