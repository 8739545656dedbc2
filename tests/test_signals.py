"""The app's signals: who is told of what, once, and inside the transaction."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from django.db import connection, transaction
from django.db.models.signals import post_save, pre_save

from django_pgstreams.exceptions import StreamClosed
from django_pgstreams.models import Chunk, Stream
from django_pgstreams.signals import chunks_appended, stream_closed

pytestmark = pytest.mark.django_db


class Heard(NamedTuple):
    signal: str
    sender: type
    arguments: dict[str, Any]
    in_transaction: bool


@pytest.fixture
def heard():
    """What was sent while the test ran, in order."""
    events: list[Heard] = []
    signals = {
        "pre_save": pre_save,
        "post_save": post_save,
        "chunks_appended": chunks_appended,
        "stream_closed": stream_closed,
    }
    receivers = []
    for name, signal in signals.items():

        def receive(sender, name=name, **arguments):
            if sender in (Stream, Chunk):
                events.append(Heard(name, sender, arguments, connection.in_atomic_block))

        receivers.append((signal, receive))
        signal.connect(receive)
    yield events
    for signal, receive in receivers:
        signal.disconnect(receive)


@pytest.fixture
def stream(heard):
    stream = Stream.objects.create(key="s")
    heard.clear()
    return stream


def names(heard) -> list[str]:
    return [event.signal for event in heard]


def test_a_single_append_sends_djangos_signals_for_its_chunk(stream, heard):
    chunk = stream.append(1)
    assert names(heard) == ["pre_save", "post_save"]
    assert all(event.sender is Chunk and event.arguments["instance"] is chunk for event in heard)
    assert heard[1].arguments["created"] is True
    assert heard[1].arguments["raw"] is False
    assert heard[1].arguments["using"] == "default"


def test_append_many_sends_one_signal_with_all_chunks(stream, heard):
    chunks = stream.append_many([1, 2, 3])
    [event] = heard
    assert event.signal == "chunks_appended"
    assert event.sender is Stream
    assert event.arguments["stream"] is stream
    assert event.arguments["chunks"] == chunks
    assert event.arguments["using"] == "default"


def test_an_empty_append_many_sends_nothing(stream, heard):
    assert stream.append_many([]) == []
    assert heard == []


def test_bulk_create_sends_one_signal_for_each_stream_within_its_transaction(stream, heard):
    other = Stream.objects.create(key="other")
    heard.clear()
    a, b, c = [Chunk(stream=s, data=n) for n, s in enumerate([other, stream, other])]
    Chunk.objects.bulk_create([a, b, c])
    assert names(heard) == ["chunks_appended"] * 2
    by_stream = {event.arguments["stream"]: event.arguments["chunks"] for event in heard}
    assert by_stream == {stream: [b], other: [a, c]}
    assert all(event.in_transaction and event.sender is Stream for event in heard)


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (lambda stream: stream.close(), "completed", ""),
        (lambda stream: stream.fail("no disk"), "failed", "no disk"),
        (lambda stream: stream.cancel("enough"), "cancelled", "enough"),
    ],
)
def test_an_end_is_told_with_its_state_and_reason(stream, heard, end, state, reason):
    end(stream)
    [event] = heard
    assert (event.signal, event.sender) == ("stream_closed", Stream)
    assert event.arguments["stream"] is stream
    assert (stream.state, stream.reason) == (state, reason)
    with pytest.raises(StreamClosed):
        end(stream)
    assert len(heard) == 1


def test_a_last_chunk_is_told_before_the_end(stream, heard):
    stream.append(1, close=True)
    assert names(heard) == ["pre_save", "post_save", "stream_closed"]


def test_the_last_chunks_are_told_before_the_end(stream, heard):
    stream.append_many([1, 2], close=True)
    assert names(heard) == ["chunks_appended", "stream_closed"]


def test_what_is_refused_is_not_told(stream, heard):
    stream.close()
    heard.clear()
    with pytest.raises(StreamClosed):
        stream.append_many([1, 2])
    with pytest.raises(StreamClosed):
        Chunk.objects.bulk_create([Chunk(stream=stream, data=1)])
    assert heard == []
    with pytest.raises(StreamClosed):
        stream.append(1)
    assert names(heard) == ["pre_save"]


def test_a_receiver_that_fails_takes_the_append_with_it_as_in_django(stream):
    def fail(sender, **arguments):
        raise LookupError("from a receiver")

    post_save.connect(fail, sender=Chunk)
    try:
        with pytest.raises(LookupError), transaction.atomic():
            stream.append(1)
    finally:
        post_save.disconnect(fail, sender=Chunk)
    assert list(stream.read()) == []
    assert stream.append(1).offset == 0
