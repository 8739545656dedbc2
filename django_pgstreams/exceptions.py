"""The error tree of the app: everything that it raises on purpose is a `PGStreamsError`.

PGStreamsError
 ├─ StreamClosed        append or close on a stream that has ended
 ├─ StreamMissing       no such stream (it is also `Stream.DoesNotExist`)
 ├─ StreamBusy          another transaction holds the stream's row
 ├─ OffsetConflict      the tail is not where `expected_offset` says
 ├─ AppendFailed        a writer could not store an append: nothing of it is stored
 ├─ AppendUnknown       a writer cannot find out whether an append was stored
 ├─ WriterFull          a writer holds as much as it may
 ├─ InvalidKey          a key breaks the rule (also a `ValidationError`)
 ├─ InvalidPayload      a value cannot be stored (also a `ValidationError`)
 ├─ ChunkImmutable      a stored chunk would change or go
 ├─ ManagedField        a counter or state would be written from outside
 ├─ StreamGap           a reader's position was trimmed away
 └─ StreamReset         a reader's position belongs to another life of the stream
"""

from __future__ import annotations

import copyreg
from typing import Any, Self

from django.core.exceptions import ObjectDoesNotExist, ValidationError


class PGStreamsError(Exception):
    """Base of every error that this app raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By their attributes: task queues and parallel tests pickle errors, whatever their arguments.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class StreamClosed(PGStreamsError):
    """The stream has ended: nothing more can be appended, and its end cannot change.

    `state` and `reason` tell how it ended.
    """

    def __init__(self, message: str, *, state: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.state = state
        self.reason = reason

    @classmethod
    def as_it_ended(cls, key: str, *, state: str, reason: str) -> Self:
        """The error for a stream that ended so."""
        because = f" ({reason})" if reason else ""
        message = f"Stream {key!r} is {state}{because}: nothing can be appended, and its end cannot change."
        return cls(message, state=state, reason=reason)


class StreamMissing(PGStreamsError, ObjectDoesNotExist):
    """The stream was never created, or was deleted, or its creation is not committed yet.

    `Stream.DoesNotExist` is this class.
    """


class StreamBusy(PGStreamsError):
    """Another transaction held the stream's row for longer than the lock timeout. Try again."""


class OffsetConflict(PGStreamsError):
    """The stream's tail differs from the `expected_offset` of an append; nothing was stored.

    `expected` and `actual` are the two tails.
    """

    def __init__(self, message: str, *, expected: int, actual: int) -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual

    @classmethod
    def at(cls, key: str, *, expected: int, actual: int) -> Self:
        """The error for a stream with this tail."""
        message = f"Stream {key!r} is at offset {actual}, not at the expected {expected}; nothing was stored."
        return cls(message, expected=expected, actual=actual)


class AppendFailed(PGStreamsError):
    """A `StreamWriter` could not store an append, for the reason that its cause tells: it is not stored."""


class AppendUnknown(PGStreamsError):
    """The connection was lost while an append was being committed, and its fate could not be found out.

    Read the stream's end before trying again, or the append may be stored twice.
    """


class WriterFull(PGStreamsError):
    """`append_nowait` was called while `WRITER_MAX_PENDING_BYTES` wait to be stored; nothing was taken."""


class _Invalid(PGStreamsError, ValidationError):
    """What the two `ValidationError`s share: one plain message, shown as it is."""

    error_code: str

    def __init__(self, message: str) -> None:
        ValidationError.__init__(self, message, code=self.error_code)

    def __str__(self) -> str:
        return str(self.message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"


class InvalidKey(_Invalid):
    """A stream key breaks the rule that `keys.check_key` states."""

    error_code = "invalid_key"


class InvalidPayload(_Invalid):
    """A value cannot be stored in the stream; the message names the place inside the value."""

    error_code = "invalid_payload"


class ChunkImmutable(PGStreamsError):
    """A stored chunk cannot be saved again, updated or deleted on its own."""


class ManagedField(PGStreamsError):
    """A field that only the app's own statements write was given a value from outside."""


class StreamGap(PGStreamsError):
    """Chunks between `requested` and `first` are no longer stored.

    Read on from `first` to accept the loss.
    """

    def __init__(self, message: str, *, requested: int, first: int) -> None:
        super().__init__(message)
        self.requested = requested
        self.first = first


class StreamReset(PGStreamsError):
    """The position belongs to another life of the stream, lies beyond its tail, or follows lost chunks.

    Read again from the beginning; `epoch` is the present one.
    """

    def __init__(self, message: str, *, epoch: str) -> None:
        super().__init__(message)
        self.epoch = epoch
