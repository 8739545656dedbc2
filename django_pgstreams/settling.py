"""A writer's session: stores batches, each exactly once, also when the connection is lost at the commit.

Invariant: the outcome of a batch is read, never guessed. Each batch notes its number, its streams and their
first offsets in the writer's own row, in the statement that stores it, and only if the row is at the number
before. A lost connection leaves a batch of which nobody knows; the next connection first counts that row up:

- the batch had committed: the row has its number, and says where everything is;
- a backend is still at it: counting up waits for its lock on the row, and then sees what it left;
- a backend has not come to the row yet (it waits for a stream's lock, say): it finds another number than it
  needs, and its whole statement fails;
- the batch never arrived: the row has an older number, and the batch is sent again.

Counting up is a commit of its own, behind the batch's: a synchronous standby has both by the time that the
batch is called stored, also when the first wait for it was broken off.
Where the row itself is gone, or the database stays away, nothing can be told: `AppendUnknown`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psycopg
import psycopg.errors

from . import arrays, database, sql
from .exceptions import AppendUnknown
from .pending import Segment

logger = logging.getLogger(__name__)

_ROLE = "writer"


class Outcome(NamedTuple):
    """What became of a segment.

    `kind` is `"stored"` (`base` is its first offset, `ended_at` when the stream ended with it), `"closed"`
    (`state`, `reason`), `"elsewhere"` (the tail, `base`, is not the expected one), `"locked"`, `"missing"`,
    or `"again"`: it was left out, nobody knows why.
    """

    kind: str
    base: int = 0
    ended_at: datetime.datetime | None = None
    state: str = ""
    reason: str = ""


class Away(Exception):
    """The database could not be reached for as long as the writer may wait; nothing was stored."""


class Session:
    """One connection of a writer, and the writer's row that goes with it. One thread uses it."""

    def __init__(
        self,
        using: str,
        *,
        timeout_seconds: float,
        keeps_trying: Callable[[float], bool],
        has_worked: bool = False,
    ) -> None:
        """`keeps_trying` is asked after failures: whether to go on, after so many seconds without success.

        A database that has never been reached is not waited for, unless it `has_worked` for others.
        """
        self._using = using
        self._timeout_seconds = timeout_seconds
        self._keeps_trying = keeps_trying
        self._connection: database.Connection | None = None
        self._needs_transaction = False
        self._has_worked = has_worked
        self._failing_since: float | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._id = str(uuid.uuid4())
        self._seq = 0
        self._is_registered = False

    @property
    def is_connected(self) -> bool:
        """Whether it holds a connection."""
        return self._connection is not None

    # Storing ---------------------------------------------------------------------------------------

    def store(self, segments: Sequence[Segment], lock_timeout_seconds: float | None = None) -> list[Outcome]:
        """Store a batch in one transaction; what became of each segment.

        With a lock timeout, waits for locked rows that long. Raises `psycopg.Error` when the database refuses
        the batch, `Away`, and `AppendUnknown`.
        """
        failures = 0
        unsettled = False
        while True:
            sent = False
            try:
                connection = self._connect()
                outcomes = self._settle(connection, segments) if unsettled else None
                if outcomes is None:
                    unsettled = False
                    sent = True
                    outcomes = self._send(connection, segments, lock_timeout_seconds)
            except _LOST as error:
                certain = _is_certain(error, self._connection)
                if certain and _is_elsewhere(error):
                    self._begin_anew()  # its row is gone, as that of a writer that was taken for dead
                    if not failures:
                        failures += 1
                        continue
                elif certain and not unsettled and not isinstance(error, _PASSING):
                    raise
                unsettled = unsettled or (sent and not certain)
                failures += 1
                self.disconnect()
                self._wait_or_raise(failures, unsettled, error)
            except Exception as error:
                if not sent and not unsettled:
                    raise
                self.disconnect()
                self._begin_anew()
                raise AppendUnknown(_UNKNOWN) from error
            else:
                if self._failing_since is not None:
                    self._failing_since = None
                    logger.info("The writer of %r stores again", self._using)
                return outcomes

    def _wait_or_raise(self, failures: int, unsettled: bool, error: Exception) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            logger.warning("Appends of %r wait: the writer failed, and tries again: %s", self._using, error)
        if not self._keeps_trying(now - self._failing_since) or not self._has_worked:
            if unsettled:
                self._begin_anew()  # a backend may be at the old row yet
                raise AppendUnknown(_UNKNOWN) from error
            raise Away(str(error)) from error
        if failures > 1:
            time.sleep(database.backoff_seconds(failures - 1, 1.0))

    def _send(
        self, connection: database.Connection, segments: Sequence[Segment], lock_timeout_seconds: float | None
    ) -> list[Outcome]:
        values = _batch(self._id, self._seq + 1, segments, lock_timeout_seconds)
        run = self._execute_read_committed if self._needs_transaction else self._execute
        [[bases, stored_at, refusals]] = run(connection, sql.STORE, values)
        self._seq += 1
        return _outcomes(segments, arrays.numbers(bases or ""), stored_at or "", refusals)

    def _execute_read_committed(
        self, connection: database.Connection, statement: str, values: Sequence[database.Value]
    ) -> list[list[str | None]]:
        """Run a statement where sessions have another isolation level by default."""
        self._execute(connection, "BEGIN ISOLATION LEVEL READ COMMITTED")
        try:
            rows = self._execute(connection, statement, values)
        except psycopg.Error:
            self._execute(connection, "ROLLBACK")
            raise
        self._execute(connection, "COMMIT")
        return rows

    def _execute(
        self, connection: database.Connection, statement: str, values: Sequence[database.Value] = ()
    ) -> list[list[str | None]]:
        return database.execute(connection, statement, values, timeout_seconds=self._timeout_seconds)

    def _settle(self, connection: database.Connection, segments: Sequence[Segment]) -> list[Outcome] | None:
        """What became of a batch whose reply was lost; None if it was not stored, and never will be."""
        rows = self._execute(connection, sql.SETTLE, [self._id])
        if not rows:
            self._begin_anew()
            raise AppendUnknown(_UNKNOWN)
        tried = self._seq + 1
        seq, batch, at, streams, bases = (value or "" for value in rows[0])
        self._seq = int(seq)
        if int(batch) != tried:
            return None
        stored = {
            stream_id: base
            for stream_id, base in zip(arrays.numbers(streams), arrays.numbers(bases), strict=True)
            if base >= 0
        }
        logger.info("Batch %d of the writer of %r had been committed", tried, self._using)
        return [
            Outcome("stored", stored[stream_id], _time(at) if segment.end else None)
            if (stream_id := segment.lane.stream_id) in stored
            else Outcome("again")
            for segment in segments
        ]

    def step_over(self, stream_id: int) -> bool:
        """Raise a stream's counter past chunks that something else stored; False if its row is locked."""
        try:
            return bool(self._execute(self._connect(), sql.STEP_OVER, [str(stream_id)]))
        except Exception:  # noqa: BLE001 - it comes back at whoever stores next
            self.disconnect()
            return False

    # The connection --------------------------------------------------------------------------------

    def _connect(self) -> database.Connection:
        connection = self._connection
        if connection is None:
            connection = database.connect(self._using, _ROLE, timeout_seconds=self._timeout_seconds)
            self._connection = connection
            [[isolation]] = self._execute(connection, sql.GET_ISOLATION)
            self._needs_transaction = isolation != "read committed"
        if not self._is_registered:
            self._execute(connection, sql.FORGET_OLD_WRITERS)
            self._execute(connection, sql.REGISTER_WRITER, [self._id])
            self._is_registered = True
        self._has_worked = True
        return connection

    def disconnect(self) -> None:
        """Close the connection; the next batch opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

    def close(self) -> None:
        """Remove the writer's row, if that is quickly done, and disconnect."""
        if self._connection is not None and self._is_registered:
            with contextlib.suppress(*_LOST):
                self._execute(self._connection, sql.FORGET_WRITER, [self._id])
        self.disconnect()


_LOST = (psycopg.Error, TimeoutError, OSError)
_PASSING = (
    psycopg.errors.ReadOnlySqlTransaction,  # a standby, perhaps about to be promoted
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
_UNKNOWN = (
    "The connection was lost while this was being stored, and whether it is could not be found out; "
    "read the stream's end before trying again."
)


def _is_certain(error: Exception, connection: database.Connection | None) -> bool:
    """Whether the server says that a statement failed, and is there to say more: nothing of it is stored."""
    if connection is None or not isinstance(error, psycopg.Error) or error.sqlstate is None:
        return False
    # Connection exceptions (also those that a pooler makes up), and an operator's intervention.
    gone = error.sqlstate.startswith(("08", "57P"))
    return not gone and connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE


def _is_elsewhere(error: Exception) -> bool:
    """Whether the writer's row was not at the batch before."""
    return isinstance(error, psycopg.Error) and error.sqlstate == sql.WRITER_IS_ELSEWHERE


def _batch(
    writer_id: str, seq: int, segments: Sequence[Segment], lock_timeout_seconds: float | None
) -> list[database.Value]:
    """The parameters of `sql.STORE`."""
    payloads: list[bytes] = []
    places: list[int] = []
    nths: list[int] = []
    for place, segment in enumerate(segments, 1):
        count = len(segment.payloads)
        payloads += segment.payloads
        places += [place] * count
        nths += range(count)
    ends = [segment.end for segment in segments]
    return [
        writer_id,
        str(seq),
        arrays.bigints([segment.lane.stream_id for segment in segments]),
        arrays.bigints([len(segment.payloads) for segment in segments]),
        arrays.bigints([segment.expected_offset for segment in segments]),
        arrays.texts([end and end.state for end in ends]),
        arrays.texts([end and end.reason for end in ends]),
        arrays.byteas(payloads),
        arrays.integers(places),
        arrays.integers(nths),
        None if lock_timeout_seconds is None else f"{max(1, round(lock_timeout_seconds * 1000))}ms",
    ]


def _outcomes(
    segments: Sequence[Segment], bases: list[int], stored_at: str, refusals: str | None
) -> list[Outcome]:
    """What `sql.STORE` says about each segment."""
    refused = iter(json.loads(refusals) if refusals else ())
    return [
        Outcome("stored", base, _time(stored_at) if segment.end else None)
        if base >= 0
        else _refused(*next(refused))
        for segment, base in zip(segments, bases, strict=True)
    ]


def _refused(kind: str, state: str | None, reason: str | None, tail: int | None) -> Outcome:
    if kind == "elsewhere":
        return Outcome(kind, tail or 0)
    if kind == "closed":
        return Outcome(kind, 0, None, state or "", reason or "")
    return Outcome(kind)


def _time(epoch_seconds: str) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(float(epoch_seconds), datetime.UTC)
