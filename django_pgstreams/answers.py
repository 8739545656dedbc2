"""What callers are told about their appends, and how; no database.

Invariant: each append is answered once, with its offset or with an error of its own, in the thread or event
loop that waits for it; a caller that has gone keeps nobody else from its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from .buffer import WakeUp
from .exceptions import (
    AppendFailed,
    OffsetConflict,
    PGStreamsError,
    StreamClosed,
    StreamMissing,
)
from .pending import Append, Segment
from .settling import Outcome

logger = logging.getLogger(__name__)

Result = Outcome | Exception
"""What became of a segment."""
Answer = tuple[Append, Any]
"""An append, and its offset or error."""

LOCKED = Outcome("locked")
NOTHING = Outcome("stored")


def of_segment(segment: Segment, result: Result, answers: list[Answer], wake_ups: list[WakeUp]) -> int:
    """Add a segment's answers and wake-up; returns how many of its appends are answered."""
    appends = segment.appends
    if result == LOCKED:
        return 0  # it is tried again
    if isinstance(result, Exception):
        answers += [(append, refusal(append, result)) for append in appends]
        return len(appends)
    match result.kind:
        case "stored":
            _answer_stored(segment, result, answers)
            if not segment.is_empty:
                tail = result.base + len(segment.payloads)
                wake_ups.append(WakeUp(segment.lane.stream_id, tail, segment.end is not None))
            return len(appends)
        case "elsewhere":
            conflict = next(place for place, append in enumerate(appends) if append.payload is not None)
            answers += [(append, None) for append in appends[:conflict]]
            refused = appends[conflict]
            error = OffsetConflict.at(refused.key, expected=refused.expected_offset or 0, actual=result.base)
            answers.append((refused, error))
            return conflict + 1
        case "closed" | "missing":
            why = _closed(segment, result) if result.kind == "closed" else _missing(segment)
            answers += [(append, refusal(append, why)) for append in appends]
            return len(appends)
        case _:
            return 0


def _answer_stored(segment: Segment, result: Outcome, answers: list[Answer]) -> None:
    offset = result.base
    if len(segment.payloads) == len(segment.appends):
        answers += zip(segment.appends, range(offset, offset + len(segment.appends)), strict=True)
        return
    for append in segment.appends:
        if append.payload is not None:
            answers.append((append, offset))
            offset += 1
        else:
            answers.append((append, (offset, result.ended_at)))


def _closed(segment: Segment, result: Outcome) -> StreamClosed:
    return StreamClosed.as_it_ended(segment.lane.key, state=result.state, reason=result.reason)


def _missing(segment: Segment) -> StreamMissing:
    return StreamMissing(
        f"The writer cannot see stream {segment.lane.key!r}: it was deleted, or the transaction that created "
        "it has not been committed yet (a TestCase never commits: test writers in a TransactionTestCase)."
    )


def refusal(append: Append, error: Exception) -> Exception | None:
    """An error of its own for each append, as a traceback belongs to one caller; None for a marker."""
    if append.payload is None and append.end is None:
        return None
    if isinstance(error, StreamClosed):
        own: Exception = StreamClosed(*error.args, state=error.state, reason=error.reason)
    elif isinstance(error, PGStreamsError):
        own = type(error)(*error.args)
    else:
        own = AppendFailed(f"Nothing was appended to stream {append.key!r}: {str(error).strip()}")
    own.__cause__ = error
    return own


def send(answers: Iterable[Answer]) -> None:
    """Tell the callers; those of one event loop with one wake-up of it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for answer in answers:
        loop = answer[0].loop
        if loop is None:
            try:
                _reply(*answer)
            except BaseException:  # whatever a callback of a future does: the thread must go on
                logger.exception("A caller could not be told about its append")
        elif loop in by_loop:
            by_loop[loop].append(answer)
        else:
            by_loop[loop] = [answer]
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_reply_all, of_loop)
        except RuntimeError:
            logger.debug("An event loop was closed before its appends were answered")


def _reply(append: Append, value: Any) -> None:
    if isinstance(value, Exception):
        append.reply.set_exception(value)
    else:
        append.reply.set_result(value)


def _reply_all(answers: Sequence[Answer]) -> None:
    """In the event loop of the callers, some of whom may have been cancelled."""
    for append, value in answers:
        if not append.reply.done():
            _reply(append, value)
