"""The app's own statements, run on a Django connection: the only writers of counters and state.

Invariant: refused means untouched. Every refusal is found before a row is written and without a failing
statement, so the caller's transaction stays usable and nothing is half-done.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psycopg.errors
from django.db import OperationalError, connections, transaction

from . import pages, sql
from .exceptions import OffsetConflict, StreamBusy, StreamClosed, StreamMissing

_STATEMENT_BYTES = 32 * 1024 * 1024
"""Payload per statement: Postgres takes 1 GB at the most, and the text form doubles it."""
_ATTEMPTS = 3


class Counters(NamedTuple):
    """The managed part of a stream's row, as the database has it."""

    next_offset: int
    first_offset: int
    state: str
    reason: str
    appended_at: datetime.datetime | None
    closed_at: datetime.datetime | None


def append(
    using: str,
    stream_id: int | None,
    key: str,
    payloads: Sequence[bytes],
    *,
    expected_offset: int | None = None,
    close: bool = False,
) -> Counters:
    """Store payloads at the stream's tail; the first gets offset `next_offset - len(payloads)`.

    Raises `StreamClosed`, `StreamMissing` or `OffsetConflict`; then nothing was stored.
    """
    batches = list(_batches(payloads))
    if len(batches) == 1:
        return _append(using, stream_id, key, batches[0], expected_offset, close)
    with transaction.atomic(using=using):
        for number, batch in enumerate(batches):
            counters = _append(
                using,
                stream_id,
                key,
                batch,
                expected_offset if number == 0 else None,
                close and number == len(batches) - 1,
            )
    return counters


def _batches(payloads: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The payloads in runs that fit into a statement; at least one run."""
    batch: list[bytes] = []
    size = 0
    for payload in payloads:
        if batch and size + len(payload) > _STATEMENT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(payload)
        size += len(payload)
    yield batch


def _append(
    using: str,
    stream_id: int | None,
    key: str,
    payloads: list[bytes],
    expected_offset: int | None,
    close: bool,
) -> Counters:
    parameters = {
        "stream_id": stream_id,
        "payloads": payloads,
        "expected_offset": expected_offset,
        "close": close,
    }
    for _ in range(_ATTEMPTS):
        row = _fetch(using, sql.APPEND, parameters)
        if row is not None and row[0] is not None:
            return Counters(*row)
        found = counters(using, stream_id, key)
        refuse_closed(key, found)
        if expected_offset is not None and found.next_offset != expected_offset:
            raise OffsetConflict.at(key, expected=expected_offset, actual=found.next_offset)
        _execute(using, sql.STEP_OVER_STRAY_CHUNKS, {"stream_id": stream_id})
    raise StreamBusy(
        f"Stream {key!r} keeps getting chunks that do not advance its counter: "
        "another program inserts rows into it; let it append through the app."
    )


def close(
    using: str,
    stream_id: int | None,
    key: str,
    state: str,
    reason: str,
    *,
    lock_timeout_seconds: float | None = None,
) -> Counters:
    """End the stream. Raises `StreamClosed`, `StreamMissing`; `StreamBusy` after the lock timeout, if any."""
    parameters = {"stream_id": stream_id, "state": state, "reason": reason}
    if lock_timeout_seconds is None:
        row = _fetch(using, sql.CLOSE, parameters)
    else:
        with bounded_wait(using, key, lock_timeout_seconds):
            row = _fetch(using, sql.CLOSE, parameters)
    if row is None:
        found = counters(using, stream_id, key)
        refuse_closed(key, found)
        raise StreamBusy(f"Stream {key!r} changed while it was being closed; try again.")
    return Counters(*row)


def counters(using: str, stream_id: int | None, key: str) -> Counters:
    """The managed part of the stream's row; raises `StreamMissing`."""
    row = _fetch(using, sql.COUNTERS, {"stream_id": stream_id})
    if row is None:
        raise StreamMissing(f"Stream {key!r} does not exist: it was deleted or never saved.")
    return Counters(*row)


def refuse_closed(key: str, found: Counters) -> None:
    """Raise `StreamClosed` if the stream has ended."""
    if found.state != "open":
        raise StreamClosed.as_it_ended(key, state=found.state, reason=found.reason)


def read_pages(
    using: str,
    stream_ids: Sequence[int],
    positions: Sequence[int],
    *,
    max_chunks: int,
    max_bytes: int,
) -> list[pages.Page]:
    """One page of each stream from its position on; what the caller's transaction wrote is seen."""
    parameters = pages.parameters(stream_ids, positions, max_chunks=max_chunks, max_bytes=max_bytes)
    with connections[using].cursor() as cursor:
        cursor.execute(sql.PAGES, parameters)
        return pages.from_rows(positions, cursor.fetchall())


def delete_chunks(using: str, stream_id: int) -> None:
    """Lock the stream's row against appends until the transaction ends, and delete its chunks."""
    _fetch(using, sql.LOCK_STREAM, {"stream_id": stream_id})
    _execute(using, sql.DELETE_CHUNKS, {"stream_id": stream_id})


@contextlib.contextmanager
def bounded_wait(using: str, key: str, lock_timeout_seconds: float) -> Iterator[None]:
    """Statements inside wait so long for a lock; then `StreamBusy`, and the transaction stays usable."""
    # 0 would mean no limit to Postgres.
    milliseconds = max(1, round(lock_timeout_seconds * 1000))
    try:
        with transaction.atomic(using=using):
            before = _fetch(using, sql.GET_LOCK_TIMEOUT, {})
            _fetch(using, sql.SET_LOCK_TIMEOUT, {"lock_timeout": f"{milliseconds}ms"})
            yield
            _fetch(using, sql.SET_LOCK_TIMEOUT, {"lock_timeout": before[0] if before else "0"})
    except OperationalError as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise StreamBusy(
                f"Another transaction has held stream {key!r} for {lock_timeout_seconds:g} s; try again."
            ) from error
        raise


def _fetch(using: str, statement: str, parameters: dict[str, Any]) -> tuple[Any, ...] | None:
    with transaction.mark_for_rollback_on_error(using=using), connections[using].cursor() as cursor:
        cursor.execute(statement, parameters)
        row: tuple[Any, ...] | None = cursor.fetchone()
        return row


def _execute(using: str, statement: str, parameters: dict[str, Any]) -> None:
    with transaction.mark_for_rollback_on_error(using=using), connections[using].cursor() as cursor:
        cursor.execute(statement, parameters)
