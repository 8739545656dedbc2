"""A stream goes with its chunks, on every path, however many append to it at that moment."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import psycopg
import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import OperationalError, connection, transaction
from django.test import Client
from django.test.utils import isolate_apps
from django.urls import path, reverse

from django_pgstreams.exceptions import StreamMissing
from django_pgstreams.models import Chunk, Stream
from tests.concurrency import DEADLINE_SECONDS, run_all, start
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

APPENDERS = 3

site = admin.AdminSite(name="deleting")
site.register(Stream, admin.ModelAdmin)
site.register(User, admin.ModelAdmin)
urlpatterns = [path("deleting/", site.urls)]


def orphans() -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT count(*) FROM pgstreams_chunk AS c
            WHERE NOT EXISTS (SELECT FROM pgstreams_stream AS s WHERE s.id = c.stream_id)
            """
        )
        return cursor.fetchone()[0]


def delete_instance(stream: Stream, client: Client) -> None:
    stream.delete()


def delete_stale_instance_in_a_transaction(stream: Stream, client: Client) -> None:
    with transaction.atomic():
        User.objects.create_user(f"written along {stream.key}")
        stream.delete()


def delete_queryset(stream: Stream, client: Client) -> None:
    Stream.objects.filter(pk=stream.pk).delete()


def delete_by_owner(stream: Stream, client: Client) -> None:
    stream.owner.delete()


def delete_by_owners_queryset(stream: Stream, client: Client) -> None:
    User.objects.filter(pk=stream.owner_id).delete()


def delete_in_admin(stream: Stream, client: Client) -> None:
    url = reverse("deleting:pgstreams_stream_delete", args=[stream.pk])
    assert client.post(url, {"post": "yes"}).status_code == 302


def delete_by_admin_action(stream: Stream, client: Client) -> None:
    response = client.post(
        reverse("deleting:pgstreams_stream_changelist"),
        {"action": "delete_selected", "_selected_action": [stream.pk], "post": "yes"},
    )
    assert response.status_code == 302


def delete_owner_by_admin_action(stream: Stream, client: Client) -> None:
    response = client.post(
        reverse("deleting:auth_user_changelist"),
        {"action": "delete_selected", "_selected_action": [stream.owner_id], "post": "yes"},
    )
    assert response.status_code == 302


WAYS: list[Callable[[Stream, Client], None]] = [
    delete_instance,
    delete_stale_instance_in_a_transaction,
    delete_queryset,
    delete_by_owner,
    delete_by_owners_queryset,
    delete_in_admin,
    delete_by_admin_action,
    delete_owner_by_admin_action,
]


def append_until_it_is_gone(pk: int, each: Callable[[Stream, int], object], begun: threading.Barrier) -> int:
    """How many appends went well before `StreamMissing` came; any other error fails the test."""
    mine = Stream.objects.get(pk=pk)
    begun.wait(DEADLINE_SECONDS)
    for count in range(100_000):
        try:
            each(mine, count)
        except StreamMissing:
            return count
    raise AssertionError("the stream was never deleted")


def append_one(stream: Stream, number: int) -> None:
    stream.append(number)


def append_some(stream: Stream, number: int) -> None:
    stream.append_many(range(20))


def append_in_a_transaction(stream: Stream, number: int) -> None:
    with transaction.atomic():
        stream.append(number)
        Chunk.objects.bulk_create([Chunk(stream=stream, data=number)])


@pytest.mark.parametrize("delete", WAYS)
def test_no_chunk_is_left_when_a_stream_is_deleted_under_appends(delete, admin_client):
    bystander = Stream.objects.create(key="bystander")
    bystander.append("stays")
    for attempt in range(8):
        stream = Stream.objects.create(key=f"s/{attempt}", owner=User.objects.create_user(f"owner {attempt}"))
        begun = threading.Barrier(APPENDERS + 1)
        appending = [
            start(append_until_it_is_gone, stream.pk, each, begun)
            for each in (append_one, append_some, append_in_a_transaction)
        ]
        begun.wait(DEADLINE_SECONDS)
        wait_until(lambda: Chunk.objects.filter(stream_id=stream.pk).exists(), "chunks are being stored")  # noqa: B023
        delete(stream, admin_client)
        assert sum(future.result(DEADLINE_SECONDS) for future in appending) > 0
        assert not Stream.objects.filter(key=f"s/{attempt}").exists()
        assert orphans() == 0
    assert [chunk.data for chunk in Chunk.objects.all()] == ["stays"]


def test_an_append_that_waits_for_the_deletion_finds_the_stream_missing():
    stream = Stream.objects.create(key="s")
    stream.append(1)
    stale = Stream.objects.get()
    with transaction.atomic():
        stream.delete()
        waiting = start(stale.append, 2)
        wait_until(is_somebody_waiting, "the append waits for the row")
        assert not waiting.done()
    assert isinstance(waiting.exception(DEADLINE_SECONDS), StreamMissing)
    assert Chunk.objects.count() == orphans() == 0


def test_an_append_that_waits_for_a_deletion_that_is_rolled_back_is_stored():
    stream = Stream.objects.create(key="s")
    stream.append(1)
    stale = Stream.objects.get()
    with transaction.atomic():
        Stream.objects.all().delete()
        waiting = start(stale.append, 2)
        wait_until(is_somebody_waiting, "the append waits for the row")
        transaction.set_rollback(True)
    assert waiting.result(DEADLINE_SECONDS).offset == 1
    assert [chunk.data for chunk in stale.read()] == [1, 2]


def test_a_deletion_waits_for_an_append_and_takes_its_chunk_along():
    stream = Stream.objects.create(key="s")
    with transaction.atomic():
        stream.append(1)
        deleting = start(Stream.objects.filter(key="s").delete)
        wait_until(is_somebody_waiting, "the deletion waits for the row")
    deleting.result(DEADLINE_SECONDS)
    assert Chunk.objects.count() == orphans() == Stream.objects.count() == 0


def test_above_read_committed_a_deletion_that_would_miss_chunks_is_postgres_error():
    stream = Stream.objects.create(key="s")
    with pytest.raises(OperationalError) as caught, transaction.atomic():  # noqa: PT012 - all of it is needed
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert Stream.objects.count() == 1  # takes the snapshot
        run_all(lambda: Stream.objects.get().append("unseen"))
        stream.delete()
    assert isinstance(caught.value.__cause__, psycopg.errors.SerializationFailure)
    stream.delete()
    assert Chunk.objects.count() == orphans() == 0


def is_somebody_waiting() -> bool:
    """Whether another session waits for this one's transaction."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT count(*) FROM pg_locks
            WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))
            """
        )
        return cursor.fetchone()[0] > 0


def append_to_all(streams: list[Stream]) -> None:
    for number in range(1000):
        try:
            Chunk.objects.bulk_create([Chunk(stream=stream, data=number) for stream in streams])
        except StreamMissing:
            return


def delete_all_once_appended(stream: Stream) -> None:
    wait_until(stream.chunks.exists, "chunks are being stored")
    Stream.objects.order_by("-key").delete()


@pytest.mark.parametrize("attempt", range(10))
def test_deleting_several_streams_under_bulk_appends_in_any_order_never_deadlocks(attempt):
    streams = [Stream.objects.create(key=key) for key in "abcd"]
    run_all(
        functools.partial(append_to_all, list(Stream.objects.order_by("key"))),
        functools.partial(append_to_all, list(Stream.objects.order_by("-key"))),
        functools.partial(delete_all_once_appended, streams[0]),
    )
    assert Chunk.objects.count() == Stream.objects.count() == 0


def test_deleting_loads_no_chunk_and_takes_few_statements(django_assert_max_num_queries):
    stream = Stream.objects.create(key="s")
    stream.append_many(["x" * 1000] * 2000)
    with django_assert_max_num_queries(6) as queries:
        stream.delete()
    assert not [query for query in queries.captured_queries if "payload" in query["sql"]]
    assert Chunk.objects.count() == 0


def test_a_deletion_that_fails_keeps_stream_and_chunks():
    stream = Stream.objects.create(key="s")
    stream.append(1)
    with transaction.atomic():
        Stream.objects.all().delete()
        transaction.set_rollback(True)
    assert [chunk.data for chunk in Stream.objects.get().read()] == [1]


@isolate_apps("tests")
def test_a_proxys_deletion_takes_the_chunks_along():
    class Log(Stream):
        class Meta:
            app_label = "tests"
            proxy = True

    apps.get_app_config("pgstreams").ready()  # as when the project's models are all there
    for delete in (lambda log: log.delete(), lambda log: Log.objects.filter(pk=log.pk).delete()):
        log = Log.objects.create(key="log")
        log.append_many(range(3))
        delete(log)
        assert Stream.objects.count() == 0
        assert orphans() == 0
