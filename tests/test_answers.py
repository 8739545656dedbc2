from __future__ import annotations

import asyncio
import datetime
import logging
from concurrent.futures import Future

import pytest

from django_pgstreams import answers
from django_pgstreams.buffer import WakeUp
from django_pgstreams.exceptions import (
    AppendFailed,
    AppendUnknown,
    OffsetConflict,
    StreamBusy,
    StreamClosed,
    StreamMissing,
)
from django_pgstreams.pending import Append, End, Pending
from django_pgstreams.settling import Away, Outcome

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


def segment_of(*payloads, expected=None, end=None):
    """A segment of stream 7, taken from a lane; a payload of None is a marker."""
    pending = Pending(10**9)
    for place, payload in enumerate(payloads):
        pending.add(Append(7, "a/b", payload, Future(), None, expected if place == 0 else None))
    if end:
        pending.add(Append(7, "a/b", None, Future(), None, None, end))
    [segment] = pending.take_batch(2000, 10**9)
    return segment


def answered(segment, result):
    """The values of the answers, how many there are, and the wake-ups."""
    found, wake_ups = [], []
    count = answers.of_segment(segment, result, found, wake_ups)
    assert [append for append, _ in found] == segment.appends[:count]
    return [value for _, value in found], wake_ups


# What became of a segment --------------------------------------------------------------------------


def test_each_append_gets_its_offset_and_the_stream_one_wake_up():
    values, wake_ups = answered(segment_of(b"a", None, b"b", None), Outcome("stored", 5))
    assert values == [5, (6, None), 6, (7, None)]
    assert wake_ups == [WakeUp(7, 7, False)]


def test_the_end_is_told_with_the_tail_and_its_time_and_the_wake_up_says_so():
    values, wake_ups = answered(segment_of(b"a", end=End("completed", "")), Outcome("stored", 5, NOW))
    assert values == [5, (6, NOW)]
    assert wake_ups == [WakeUp(7, 6, True)]


def test_markers_alone_wake_nobody():
    values, wake_ups = answered(segment_of(None, None), answers.NOTHING)
    assert len(values) == 2
    assert wake_ups == []


@pytest.mark.parametrize("result", [answers.LOCKED, Outcome("again")])
def test_what_is_tried_again_is_not_answered(result):
    assert answered(segment_of(b"a", None), result) == ([], [])


def test_a_conflict_is_that_of_its_append_alone():
    segment = segment_of(b"a", b"b", expected=3)
    [error], wake_ups = answered(segment, Outcome("elsewhere", 9))
    assert isinstance(error, OffsetConflict)
    assert (error.expected, error.actual) == (3, 9)
    assert "'a/b' is at offset 9" in str(error)
    assert wake_ups == []


def test_markers_before_a_conflict_are_answered():
    pending = Pending(10**9)
    pending.add(Append(7, "a/b", None, Future()))
    pending.add(Append(7, "a/b", b"a", Future(), None, 3))
    [segment] = pending.take_batch(2000, 10**9)
    values, _ = answered(segment, Outcome("elsewhere", 9))
    assert values[0] is None
    assert isinstance(values[1], OffsetConflict)


def test_an_ended_stream_refuses_with_its_state_and_reason():
    segment = segment_of(b"a", None, b"b", end=End("completed", ""))
    values, _ = answered(segment, Outcome("closed", state="cancelled", reason="enough"))
    assert values[1] is None
    for error in (values[0], values[2], values[3]):
        assert isinstance(error, StreamClosed)
        assert (error.state, error.reason) == ("cancelled", "enough")
        assert "'a/b' is cancelled (enough)" in str(error)


def test_a_missing_stream_is_explained():
    [error], _ = answered(segment_of(b"a"), Outcome("missing"))
    assert isinstance(error, StreamMissing)
    assert "'a/b'" in str(error)
    assert "not been committed" in str(error)
    assert "TransactionTestCase" in str(error)


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (Away("no route"), AppendFailed),
        (ValueError("strange"), AppendFailed),
        (AppendUnknown("nobody knows"), AppendUnknown),
        (StreamBusy("held"), StreamBusy),
    ],
)
def test_each_caller_gets_an_error_of_its_own_with_the_cause(result, kind):
    values, _ = answered(segment_of(b"a", b"b", None), result)
    first, second, marker = values
    assert type(first) is type(second) is kind
    assert first is not second
    assert first.__cause__ is result
    assert str(result) in str(first)
    assert marker is None


# Telling the callers -------------------------------------------------------------------------------


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often other threads wake it."""

    woken = 0

    def call_soon_threadsafe(self, *args, **kwargs):
        self.woken += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def of_loop(loop, value):
    return Append(7, "a/b", b"a", loop.create_future(), loop), value


def test_all_callers_of_an_event_loop_are_told_with_one_wake_up_of_it():
    loop = CountingLoop()
    told = [of_loop(loop, offset) for offset in range(50)]
    told[10] = of_loop(loop, StreamClosed("over"))
    thread = Append(7, "a/b", b"a", Future()), 50
    answers.send([*told, thread])
    assert loop.woken == 1
    assert thread[0].reply.result(0) == 50
    results = loop.run_until_complete(
        asyncio.gather(*(append.reply for append, _ in told), return_exceptions=True)
    )
    loop.close()
    assert results[:10] + results[11:] == [*range(10), *range(11, 50)]
    assert isinstance(results[10], StreamClosed)


def test_callers_that_have_gone_keep_nobody_from_its_answer(caplog):
    caplog.set_level(logging.ERROR)
    loop, closed = CountingLoop(), CountingLoop()
    told = [of_loop(closed, 0), of_loop(loop, 1), of_loop(loop, 2), of_loop(loop, StreamClosed("over"))]
    finished, rude, last = Future(), Future(), Future()
    finished.set_result("already")
    rude.add_done_callback(lambda _: (_ for _ in ()).throw(SystemExit(3)))
    told += [(Append(7, "a/b", b"a", reply), 3) for reply in (finished, rude, last)]
    told[1][0].reply.cancel()
    told[3][0].reply.cancel()
    closed.close()
    answers.send(told)
    assert loop.run_until_complete(told[2][0].reply) == 2
    loop.close()
    assert finished.result(0) == "already"
    assert (rude.result(0), last.result(0)) == (3, 3)
    assert len([record for record in caplog.records if "could not be told" in record.message]) == 2
