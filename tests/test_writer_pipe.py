from __future__ import annotations

import asyncio
import threading

import pytest
from django.db import connections

from django_pgstreams.exceptions import InvalidPayload, StreamClosed, StreamMissing
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from django_pgstreams.signals import stream_closed
from django_pgstreams.writer import StreamWriter
from tests.concurrency import start
from tests.following import in_thread, until
from tests.waiting import wait_until
from tests.writing import is_stored, stored


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="piped")


@pytest.fixture
async def astream(alive):
    return await Stream.objects.acreate(key="piped")


def texts(stream):
    return [chunk.data for chunk in stream.read()]


def ended(stream):
    """How the database says that the stream ended; its instance says the same."""
    own = Stream.objects.get(pk=stream.pk)
    for name in ("state", "reason", "next_offset", "closed_at"):
        assert getattr(stream, name) == getattr(own, name)
    return own.state, own.reason


async def slowly(pieces, log=None):
    try:
        for piece in pieces:
            await asyncio.sleep(0)
            yield piece
    finally:
        if log is not None:
            log.append("closed")


def of(pieces, log):
    try:
        yield from pieces
    finally:
        log.append("closed")


# To the end ----------------------------------------------------------------------------------------


def test_everything_is_appended_and_the_stream_is_completed(stream, ear):
    told = []
    stream_closed.connect(receiver := lambda **given: told.append(given["stream"]), weak=False)
    with StreamWriter(stream) as writer:
        writer.pipe({"token": number} for number in range(5000))
    stream_closed.disconnect(receiver)
    assert stored(stream) == [{"token": number} for number in range(5000)]
    assert ended(stream) == ("completed", "")
    assert told == [stream]
    wait_until(lambda: ear.heard(f"{stream.pk}:5000!"), "the end is heard")


def test_a_pipe_needs_no_connection_of_django(stream, ear):
    def pipe():
        StreamWriter(stream).pipe("ab")
        return connections["default"].connection

    assert start(pipe).result(30) is None
    wait_until(lambda: ear.heard(f"{stream.pk}:2!"), "the end is heard")


async def test_everything_an_async_iterator_yields_is_appended(astream):
    told = []
    stream_closed.connect(receiver := lambda **given: told.append(given["stream"]), weak=False)
    async with StreamWriter(astream) as writer:
        await writer.apipe(slowly(range(1000)))
    stream_closed.disconnect(receiver)
    assert await in_thread(stored)(astream) == list(range(1000))
    assert await in_thread(ended)(astream) == ("completed", "")
    assert told == [astream]


def test_an_empty_iterator_completes_the_stream(stream):
    StreamWriter(stream).pipe([])
    assert ended(stream) == ("completed", "")


def test_the_tail_follows_what_was_appended_before(stream):
    with StreamWriter(stream) as writer:
        writer.append("a")
        writer.append_nowait("b")
        writer.pipe(["c"])
    assert stored(stream) == ["a", "b", "c"]
    with pytest.raises(StreamClosed):
        writer.pipe(["d"])
    assert ended(stream) == ("completed", "")


# Failures ------------------------------------------------------------------------------------------


def test_an_iterator_that_raises_fails_the_stream(stream):
    def tokens():
        yield "a"
        yield "b"
        raise OSError("the model hung up")

    subscription = subscribe(stream)
    with StreamWriter(stream) as writer, pytest.raises(OSError, match="hung up"):
        writer.pipe(tokens())
    assert [chunk.data for chunk in subscription] == ["a", "b"]
    assert (subscription.state, subscription.reason) == ("failed", "OSError: the model hung up")
    assert ended(stream) == ("failed", "OSError: the model hung up")


async def test_an_async_iterator_that_raises_fails_the_stream(astream):
    async def tokens():
        yield "a"
        raise OSError("the model hung up")

    async with StreamWriter(astream) as writer:
        with pytest.raises(OSError, match="hung up"):
            await writer.apipe(tokens())
    assert await in_thread(ended)(astream) == ("failed", "OSError: the model hung up")
    assert await in_thread(stored)(astream) == ["a"]


class NoIterator:
    def __iter__(self):
        raise ConnectionError("no model")

    def __aiter__(self):
        raise ConnectionError("no model")


def test_a_source_that_does_not_even_begin_fails_the_stream(stream):
    with pytest.raises(ConnectionError):
        StreamWriter(stream).pipe(NoIterator())
    assert ended(stream) == ("failed", "ConnectionError: no model")


async def test_an_async_source_that_does_not_even_begin_fails_the_stream(astream):
    with pytest.raises(ConnectionError):
        await StreamWriter(astream).apipe(NoIterator())
    assert await in_thread(ended)(astream) == ("failed", "ConnectionError: no model")


def test_an_interrupt_fails_the_stream_too(stream):
    def tokens():
        yield "a"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StreamWriter(stream).pipe(tokens(), join_seconds=60)
    assert ended(stream) == ("failed", "KeyboardInterrupt")
    assert stored(stream) == ["a"]


def test_any_reason_can_be_stored(stream):
    def tokens():
        yield "a"
        raise ValueError("\0\ud800" + "x" * 5000)

    with pytest.raises(ValueError, match="x"):
        StreamWriter(stream).pipe(tokens())
    state, reason = ended(stream)
    assert state == "failed"
    assert reason.startswith("ValueError: \ufffd\ufffdxxx")
    assert len(reason) == 1000


def test_a_value_that_cannot_be_stored_fails_the_stream_after_those_before_it(stream):
    log = []
    with pytest.raises(InvalidPayload, match="JSON"):
        StreamWriter(stream).pipe(of(["a", "b", float("nan"), "c"], log))
    assert stored(stream) == ["a", "b"]
    assert ended(stream)[0] == "failed"
    assert ended(stream)[1].startswith("InvalidPayload: ")
    assert log == ["closed"]


async def test_a_value_that_cannot_be_stored_fails_an_async_pipe(astream):
    log = []
    with pytest.raises(InvalidPayload):
        await StreamWriter(astream).apipe(slowly(["a", object(), "c"], log))
    assert await in_thread(stored)(astream) == ["a"]
    assert (await in_thread(ended)(astream))[0] == "failed"
    assert log == ["closed"]


async def test_a_task_that_is_cancelled_fails_the_stream(astream):
    async def tokens():
        yield "a"
        yield "b"
        await asyncio.Event().wait()

    async with StreamWriter(astream) as writer:
        task = asyncio.create_task(writer.apipe(tokens(), join_seconds=60))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert task.cancelled()
    state, reason = await in_thread(ended)(astream)
    assert (state, "cancelled" in reason) == ("failed", True)
    assert await in_thread(stored)(astream) == ["ab"]


async def test_a_timeout_around_a_pipe_fails_the_stream(astream):
    async def tokens():
        yield "a"
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await StreamWriter(astream).apipe(tokens())
    assert (await in_thread(ended)(astream))[0] == "failed"


# Somebody else ends the stream ---------------------------------------------------------------------


def endless(log, go):
    try:
        yield "first"
        assert go.wait(30)
        number = 0
        while True:
            number += 1
            yield number
    finally:
        log.append("closed")


def test_the_iterator_is_stopped_when_somebody_cancels_the_stream(stream):
    log, go = [], threading.Event()
    piping = start(StreamWriter(stream).pipe, endless(log, go))
    wait_until(lambda: is_stored(stream, 1), "the first is stored")
    Stream.objects.get(pk=stream.pk).cancel("enough")
    go.set()
    assert piping.result(30) is None
    assert log == ["closed"]
    assert (stream.state, stream.reason) == ("cancelled", "enough")
    assert stored(stream) == ["first"]


async def test_an_async_iterator_is_stopped_when_somebody_cancels_the_stream(astream):
    log, go = [], asyncio.Event()

    async def tokens():
        try:
            yield "first"
            await go.wait()
            while True:
                await asyncio.sleep(0)
                yield "more"
        finally:
            log.append("closed")

    task = asyncio.create_task(StreamWriter(astream).apipe(tokens()))
    async with asyncio.timeout(30):
        while not await in_thread(is_stored)(astream, 1):
            pass
    await (await Stream.objects.aget(pk=astream.pk)).acancel("enough")
    go.set()
    assert await asyncio.wait_for(task, 30) is None
    assert log == ["closed"]
    assert (astream.state, astream.reason) == ("cancelled", "enough")


def test_a_stream_that_is_cancelled_before_its_last_piece_is_no_error(stream):
    Stream.objects.get(pk=stream.pk).cancel()
    log = []
    StreamWriter(stream).pipe(of([], log))
    StreamWriter(stream).pipe(of(["a"], log))
    assert log == ["closed", "closed"]
    assert stream.state == "cancelled"


def test_a_stream_that_somebody_else_completes_is_an_error(stream):
    Stream.objects.get(pk=stream.pk).close()
    log = []
    with pytest.raises(StreamClosed):
        StreamWriter(stream).pipe(of(["a", "b"], log))
    assert log == ["closed"]
    assert ended(Stream.objects.get(pk=stream.pk)) == ("completed", "")


def test_a_stream_that_is_deleted_meanwhile_is_an_error(stream):
    log, go = [], threading.Event()
    piping = start(StreamWriter(stream).pipe, endless(log, go))
    wait_until(lambda: is_stored(stream, 1), "the first is stored")
    Stream.objects.filter(pk=stream.pk).delete()
    go.set()
    assert isinstance(piping.exception(30), StreamMissing)
    assert log == ["closed"]


# Joining -------------------------------------------------------------------------------------------


@pytest.fixture
def text(live):
    return Stream.objects.create(key="text", content_type="text/plain")


def test_text_is_joined_by_size(text):
    StreamWriter(text).pipe(["abc"] * 10, join_bytes=9)
    assert texts(text) == ["abcabcabc"] * 3 + ["abc"]


def test_nothing_is_joined_unless_it_is_wanted(text):
    StreamWriter(text).pipe("abc", join_seconds=0, join_bytes=0)
    assert texts(text) == ["a", "b", "c"]


def test_held_text_does_not_wait_for_the_next_piece(text):
    go = threading.Event()

    def tokens():
        yield "ab"
        yield "cd"
        assert go.wait(30)
        yield "e"

    piping = start(lambda: StreamWriter(text).pipe(tokens(), join_seconds=0.1))
    wait_until(lambda: texts(text) == ["abcd"], "the timer sends what is held")
    go.set()
    piping.result(30)
    assert texts(text) == ["abcd", "e"]
    assert ended(Stream.objects.get(pk=text.pk)) == ("completed", "")


async def test_held_text_does_not_wait_for_the_next_piece_of_an_async_iterator(alive):
    text = await Stream.objects.acreate(key="text", content_type="text/plain")
    go = asyncio.Event()

    async def tokens():
        yield "ab"
        yield "cd"
        await go.wait()
        yield "e"

    got = []

    async def follow():
        async for chunk in subscribe(text):
            got.append(chunk.data)

    following = asyncio.create_task(follow())
    piping = asyncio.create_task(StreamWriter(text).apipe(tokens(), join_seconds=0.1))
    await until(lambda: got == ["abcd"], "the timer sends what is held")
    go.set()
    await piping
    await following
    assert got == ["abcd", "e"]


def test_joined_text_is_complete_whatever_the_timer_does(text):
    """The timer's thread and the iterator's send at the same time."""
    words = [f"{number} " for number in range(3000)]

    def tokens():
        for place, word in enumerate(words):
            if place % 10 == 0:
                threading.Event().wait(0.0005)
            yield word

    StreamWriter(text).pipe(tokens(), join_seconds=0.001)
    found = texts(text)
    assert "".join(found) == "".join(words)
    assert 1 < len(found) < 3000


def test_the_end_sends_what_is_held(text):
    StreamWriter(text).pipe(["a", "b"], join_seconds=60, join_bytes=1000)
    assert texts(text) == ["ab"]


def test_a_failure_sends_what_is_held_first(text):
    def tokens():
        yield "a"
        yield "b"
        raise ValueError("over")

    with pytest.raises(ValueError, match="over"):
        StreamWriter(text).pipe(tokens(), join_seconds=60)
    assert texts(text) == ["ab"]
