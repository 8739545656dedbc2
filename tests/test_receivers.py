from __future__ import annotations

import contextlib
import time

import pytest
from asgiref.sync import async_to_sync
from channels.db import database_sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.auth import get_user_model
from django.core import serializers
from django.core.management import call_command
from django.db import connections, transaction
from django.http import HttpResponse
from django.test import Client, TestCase, TransactionTestCase
from django.urls import path

from django_pgstreams import notifier, receivers
from django_pgstreams.consumers import StreamConsumer
from django_pgstreams.exceptions import ChunkImmutable
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Chunk, Stream
from tests.concurrency import start
from tests.following import Ear, query, sessions, store
from tests.waiting import wait_until

urlpatterns = [
    path("fail/", lambda request: _append_and_raise()),
    path("fine/", lambda request: HttpResponse(Stream.objects.get(key="view").append("fine").offset)),
]


def _append_and_raise():
    Stream.objects.get(key="view").append("never")
    raise RuntimeError("the view fails")


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="announced")


def only_these(ear, *words):
    """Whether exactly these wake-ups come, in any order; the last thing a test asks of an ear.

    A last chunk and the end after it may be announced one after the other.
    """
    marker = Stream.objects.create(key=f"marker/{time.monotonic_ns()}")
    marker.append("everything before has been announced")
    wait_until(lambda: ear.heard(f"{marker.pk}:1"), "the marker is heard")
    heard = ear.words()
    kept = [w for w in heard if not w.startswith(f"{marker.pk}:") and f"{w}!" not in heard]
    return sorted(kept) == sorted(words)


# What is announced, and when (C16) -----------------------------------------------------------------


def test_nothing_is_announced_before_the_commit_and_then_at_once(stream, ear):
    with transaction.atomic():
        stream.append("x")
        assert not ear.hear(0.3)
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "it is heard")
    assert only_these(ear, f"{stream.pk}:1")


def test_a_rollback_announces_nothing_and_the_offset_is_used_again(stream, ear):
    with contextlib.suppress(RuntimeError), transaction.atomic():
        stream.append("x")
        stream.append_many(["y", "z"])
        stream.close()
        raise RuntimeError
    assert only_these(ear)
    assert stream.append("again").offset == 0


def test_a_savepoint_that_is_rolled_back_announces_only_what_is_outside(stream, ear):
    other = Stream.objects.create(key="other")
    with transaction.atomic():
        stream.append("outside")
        with contextlib.suppress(RuntimeError), transaction.atomic():
            stream.append("inside")
            other.append("inside")
            raise RuntimeError
    assert only_these(ear, f"{stream.pk}:1")


def test_a_reader_sees_only_what_is_committed(stream):
    reading = start(lambda: [chunk.data for chunk in subscribe(stream)])
    with transaction.atomic():
        stream.append("outside")
        with contextlib.suppress(RuntimeError), transaction.atomic():
            stream.append("inside")
            raise RuntimeError
    stream.append("after", close=True)
    assert reading.result(30) == ["outside", "after"]


def test_a_view_that_fails_under_atomic_requests_announces_nothing(ear, settings, monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    settings.ROOT_URLCONF = __name__
    stream = Stream.objects.create(key="view")
    client = Client(raise_request_exception=False)
    assert client.get("/fail/").status_code == 500
    assert client.get("/fine/").content == b"0"
    assert only_these(ear, f"{stream.pk}:1")


def test_an_announcement_waits_for_the_commit_of_the_alias_that_was_written_to(proxy, ear):
    stream = Stream.objects.using(proxy.alias).create(key="alias")
    with transaction.atomic(using=proxy.alias):
        with transaction.atomic(using="default"):
            stream.append("x")
        assert not ear.hear(0.3)
    wait_until(lambda: ear.heard(f"{stream.pk}:1"), "it is heard")
    assert list(notifier._notifiers) == [proxy.alias]


# Which writes are announced (C17) ------------------------------------------------------------------


def test_five_hundred_appended_at_once_are_one_wake_up_and_all_arrive(stream, ear):
    subscription = subscribe(stream)
    reading = start(lambda: [chunk.data for chunk in subscription])
    assert len(stream.append_many(range(500))) == 500
    wait_until(lambda: subscription.position == 500, "all arrive")
    assert only_these(ear, f"{stream.pk}:500")
    stream.close()
    assert reading.result(30) == list(range(500))


def test_an_empty_append_many_announces_nothing(stream, ear):
    stream.append_many([])
    assert only_these(ear)


def test_bulk_create_announces_each_stream_once(stream, ear):
    other = Stream.objects.create(key="other")
    Chunk.objects.bulk_create(Chunk(stream=one, data=value) for value in range(10) for one in (stream, other))
    assert only_these(ear, f"{stream.pk}:10", f"{other.pk}:10")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda stream: stream.append(1), [":1"]),
        (lambda stream: Chunk.objects.create(stream=stream, data=1), [":1"]),
        (lambda stream: Chunk(stream=stream, data=1).save(), [":1"]),
        (lambda stream: stream.chunks.create(data=1), [":1"]),
        (lambda stream: stream.append_many([1, 2]), [":2"]),
        (lambda stream: stream.append(1, close=True), [":1!"]),
        (lambda stream: stream.close(), [":0!"]),
        (lambda stream: stream.fail("x"), [":0!"]),
        (lambda stream: stream.cancel("x"), [":0!"]),
        (lambda stream: stream.delete(), [":0!"]),
        (lambda stream: Stream.objects.filter(pk=stream.pk).delete(), [":0!"]),
        (lambda stream: stream.save(), []),
        (lambda stream: Stream.objects.filter(pk=stream.pk).update(metadata={}), []),
    ],
)
def test_each_way_to_write_is_announced_once(stream, ear, write, words):
    pk = stream.pk
    write(stream)
    assert only_these(ear, *(f"{pk}{word}" for word in words))


def test_the_streams_that_go_with_their_owner_are_announced(ear):
    owner = get_user_model().objects.create_user("owner")
    streams = [Stream.objects.create(key=f"owned/{number}", owner=owner) for number in range(2)]
    owner.delete()
    assert only_these(ear, *(f"{stream.pk}:0!" for stream in streams))


def test_a_fixture_announces_nothing_and_the_next_append_follows_it(stream, ear, tmp_path):
    stream.append_many(range(100))
    fixture = tmp_path / "chunks.json"
    fixture.write_text(serializers.serialize("json", Chunk.objects.filter(stream=stream)))
    target = Stream.objects.create(key="target")
    text = fixture.read_text().replace(f'"stream": {stream.pk}', f'"stream": {target.pk}')
    text = text.replace(f'"pk": [{stream.pk},', f'"pk": [{target.pk},')
    fixture.write_text(text)
    call_command("loaddata", str(fixture), verbosity=0)
    assert Chunk.objects.filter(stream=target).count() == 100
    assert only_these(ear, f"{stream.pk}:100")
    assert target.append("next").offset == 100


def test_rows_that_another_program_puts_beyond_the_tail_arrive_with_the_next_append(stream, settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 0.2}
    stream.append_many(range(3))
    for offset in (3, 4):
        query(
            'INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at) '
            "VALUES (%s, %s, convert_to(%s::text, 'UTF8'), now())",
            stream.pk,
            offset,
            offset,
        )
    subscription = subscribe(stream)
    reading = start(lambda: [(chunk.offset, chunk.data) for chunk in subscription])
    wait_until(lambda: subscription.position == 3, "what is counted arrives")
    assert stream.append(5, close=True).offset == 5
    assert reading.result(30) == [(offset, offset) for offset in range(6)]


def test_saving_a_stored_chunk_again_is_refused_and_delivers_nothing(stream, ear):
    chunk = stream.append("x")
    with pytest.raises(ChunkImmutable):
        chunk.save()
    assert only_these(ear, f"{stream.pk}:1")
    assert [c.data for c in stream.read()] == ["x"]


def test_what_another_program_inserts_arrives_within_the_poll_interval(stream, settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 0.5}
    subscription = subscribe(stream)
    reading = start(lambda: [chunk.offset for chunk in subscription])
    stream.append("first")
    wait_until(lambda: subscription.position == 1, "the first arrives")
    store(stream, 3)
    began = time.monotonic()
    wait_until(lambda: subscription.position == 4, "the others arrive")
    assert time.monotonic() - began < 10
    stream.close()
    assert reading.result(30) == [0, 1, 2, 3]


def test_an_announcement_that_cannot_be_made_does_not_fail_the_commit(stream, settings):
    ran = []
    with transaction.atomic():
        stream.append("x")
        transaction.on_commit(lambda: ran.append("the project's own hook"))
        settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": "often"}
    assert ran
    settings.PGSTREAMS = {}
    assert [chunk.data for chunk in stream.read()] == ["x"]


# Tests of applications (C18) -----------------------------------------------------------------------


class TestCaseOfAnApplication(TestCase):
    def test_captured_callbacks_flush_once(self):
        ear = Ear()
        self.addCleanup(ear.close)
        stream = Stream.objects.create(key="case")
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            stream.append("x")
        assert len(callbacks) == 1
        wait_until(lambda: ear.heard(f"{stream.pk}:1"), "it is flushed")
        notifier.close_all()
        assert [word for word in ear.words() if word.startswith(f"{stream.pk}:")] == [f"{stream.pk}:1"]

    def test_without_them_nothing_is_flushed(self):
        ear = Ear()
        self.addCleanup(ear.close)
        stream = Stream.objects.create(key="case")
        stream.append("x")
        assert not ear.hear(0.2)
        assert [chunk.data for chunk in stream.read()] == ["x"]


class TransactionTestCaseOfAnApplication(TransactionTestCase):
    def setUp(self):
        receivers.release()  # an earlier test's background readers may be idle yet

    def test_a_websocket_receives_what_a_thread_appends(self):
        user = get_user_model().objects.create_user("reader")
        stream = Stream.objects.create(key="chat/1", owner=user)

        async def talk():
            socket = WebsocketCommunicator(StreamConsumer.as_asgi(), "/ws/streams/")
            socket.scope["user"] = user
            assert (await socket.connect())[0]
            await socket.send_json_to({"type": "subscribe", "stream": "chat/1"})
            kinds = [(await socket.receive_json_from(30))["type"] for _ in range(2)]
            assert kinds == ["subscribed", "live"]
            await database_sync_to_async(stream.append)({"text": "hello"})
            frame = await socket.receive_json_from(30)
            assert (frame["type"], frame["offset"], frame["data"]) == ("chunks", 0, [{"text": "hello"}])
            await socket.disconnect(timeout=30)

        async_to_sync(talk)()
        wait_until(lambda: not sessions("reader"), "the event loop has closed its sessions")
        receivers.release()


# Letting go ----------------------------------------------------------------------------------------


def test_release_disconnects_everything_and_all_of_it_comes_back(stream, ear):
    reading = start(lambda: [chunk.data for chunk in subscribe(stream)])
    stream.append("x", close=True)
    assert reading.result(30) == ["x"]
    wait_until(lambda: sessions("notifier"), "the notifier is connected")
    receivers.release()
    wait_until(
        lambda: (
            not query(
                "SELECT FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name LIKE 'pgstreams-%%'"
            )
        ),
        "no session is left",
    )
    other = Stream.objects.create(key="other")
    reading = start(lambda: [chunk.data for chunk in subscribe(other)])
    other.append("y", close=True)
    assert reading.result(30) == ["y"]
    wait_until(lambda: ear.heard(f"{other.pk}:1!"), "it is announced")
