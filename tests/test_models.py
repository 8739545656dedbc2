"""Streams and chunks as Django models: what may be written, and what stands however it is saved."""

from __future__ import annotations

import datetime
import json
import pickle
import resource
import sys
import weakref

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import DatabaseError, IntegrityError, connection, models, transaction
from django.db.models import F
from django.test.utils import isolate_apps
from django.urls import path, reverse

from django_pgstreams import codec, conf, pages, sql
from django_pgstreams.exceptions import (
    ChunkImmutable,
    InvalidKey,
    InvalidPayload,
    ManagedField,
    StreamGap,
    StreamMissing,
)
from django_pgstreams.managers import MANAGED_FIELDS
from django_pgstreams.models import Chunk, Stream
from tests.concurrency import in_this_thread

pytestmark = pytest.mark.django_db

RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024

GIVEN = {
    "next_offset": 5,
    "first_offset": 1,
    "epoch": "another",
    "state": "completed",
    "reason": "because",
    "appended_at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    "closed_at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
}


@pytest.fixture
def stream() -> Stream:
    return Stream.objects.create(key="s")


def managed(stream: Stream) -> dict[str, object]:
    """The managed fields as the database has them."""
    return Stream.objects.filter(pk=stream.pk).values(*MANAGED_FIELDS).get()


def stored(stream: Stream) -> list[tuple[int, object]]:
    return [(chunk.offset, chunk.data) for chunk in Chunk.objects.filter(stream=stream).order_by("offset")]


def append_and_close(stream: Stream) -> None:
    """What another process does to the stream in the meantime."""
    other = Stream.objects.get(pk=stream.pk)
    other.append_many(range(100))
    other.fail("no disk")


# New streams ---------------------------------------------------------------------------------------


def test_a_new_stream_has_defaults(stream):
    stream.refresh_from_db()
    assert (stream.content_type, stream.metadata, stream.owner) == ("application/json", {}, None)
    assert (stream.state, stream.reason) == (Stream.State.OPEN, "")
    assert (stream.next_offset, stream.first_offset) == (0, 0)
    assert stream.appended_at is stream.closed_at is stream.expires_at is None
    assert stream.created_at.tzinfo is datetime.UTC
    assert str(stream) == "s"


def test_each_stream_has_an_epoch_of_its_own(stream):
    before = stream.epoch
    stream.delete()
    assert len(before) == 16
    assert Stream.objects.create(key="s").epoch != before


def test_a_key_is_unique(stream):
    with pytest.raises(IntegrityError), transaction.atomic():
        Stream.objects.create(key="s")


@pytest.mark.parametrize("name", MANAGED_FIELDS - {"epoch"})
def test_a_new_stream_cannot_be_given_a_managed_field(name):
    with pytest.raises(ManagedField, match=f"A new stream cannot write {name}"):
        Stream.objects.create(key="s", **{name: GIVEN[name]})
    with pytest.raises(ManagedField, match=f"A new stream cannot write {name}"):
        Stream.objects.bulk_create([Stream(key="s", **{name: GIVEN[name]})])
    assert not Stream.objects.exists()


def test_a_preset_primary_key_is_for_a_new_stream_only(stream):
    preset = Stream.objects.create(pk=4711, key="preset")
    assert preset.append(1).offset == 0
    stream.append(1)
    with pytest.raises(IntegrityError), transaction.atomic():
        Stream(pk=stream.pk, key="over it").save()
    assert managed(stream)["next_offset"] == 1


def test_many_streams_are_created_at_once(stream):
    streams = Stream.objects.bulk_create([Stream(key=f"bulk/{n}") for n in range(3)])
    assert len({stream.epoch for stream in streams}) == 3
    assert [stream.append("x").offset for stream in streams] == [0, 0, 0]


@in_this_thread
async def test_the_async_twins_of_creating():
    await Stream.objects.acreate(key="a")
    await Stream.objects.abulk_create([Stream(key="b")])
    stream, created = await Stream.objects.aget_or_create(key="c")
    assert created
    stream.metadata = {"a": 1}
    await stream.asave()
    assert await Stream.objects.acount() == 3
    with pytest.raises(InvalidKey):
        await Stream.objects.acreate(key="")


@pytest.mark.parametrize("content_type", ["", "json", "text/plain\x00", "x/" + "y" * 126])
def test_a_bad_content_type_is_refused(content_type):
    with pytest.raises(InvalidPayload, match="content type"):
        Stream.objects.create(key="s", content_type=content_type)
    with pytest.raises(InvalidPayload, match="content type"):
        Stream.objects.bulk_create([Stream(key="s", content_type=content_type)])


def test_a_copy_of_a_used_stream_is_refused(stream):
    stream.append(1)
    stream.pk, stream.key, stream._state.adding = None, "copy", True
    with pytest.raises(ManagedField, match="next_offset"):
        stream.save()


# Stale instances -----------------------------------------------------------------------------------


def save_all(stale: Stream) -> None:
    stale.save()


def save_some(stale: Stream) -> None:
    stale.save(update_fields=["metadata"])


def save_forced(stale: Stream) -> None:
    stale.save(force_update=True)


def update_or_create(stale: Stream) -> None:
    Stream.objects.update_or_create(key="s", defaults={"metadata": {"saved": True}})


def update_or_create_with_both(stale: Stream) -> None:
    Stream.objects.update_or_create(
        pk=stale.pk, defaults={"metadata": lambda: {"saved": True}}, create_defaults={"key": "new"}
    )


def bulk_update(stale: Stream) -> None:
    assert Stream.objects.bulk_update([stale], ["metadata"]) == 1


def bulk_create_over_it(stale: Stream) -> None:
    Stream.objects.bulk_create(
        [Stream(key="s", metadata={"saved": True})],
        update_conflicts=True,
        update_fields=["metadata"],
        unique_fields=["key"],
    )


def queryset_update(stale: Stream) -> None:
    Stream.objects.filter(pk=stale.pk).update(metadata={"saved": True})


@pytest.mark.parametrize(
    "save",
    [
        *[save_all, save_some, save_forced, update_or_create, update_or_create_with_both],
        *[bulk_update, bulk_create_over_it, queryset_update],
    ],
)
def test_counter_and_state_stand_when_a_stale_instance_is_saved(stream, save):
    append_and_close(stream)
    before = managed(stream)
    stream.metadata = {"saved": True}
    save(stream)
    assert managed(stream) == before
    assert (before["next_offset"], before["state"], before["reason"]) == (100, "failed", "no disk")
    assert Stream.objects.get().metadata == {"saved": True}
    assert len(stored(stream)) == 100


def test_appending_goes_on_from_a_stale_instance(stream):
    Stream.objects.get(pk=stream.pk).append_many(range(100))
    stream.save()
    assert stream.append("next").offset == 100
    assert stream.next_offset == 101


@pytest.mark.parametrize("name", MANAGED_FIELDS)
def test_a_managed_field_cannot_be_saved_by_name(stream, name):
    before = managed(stream)
    setattr(stream, name, GIVEN[name])
    for refused in (
        lambda: stream.save(update_fields=[name, "metadata"]),
        lambda: Stream.objects.update(**{name: GIVEN[name]}),
        lambda: Stream.objects.update_or_create(key="s", defaults={name: GIVEN[name]}),
        lambda: Stream.objects.bulk_update([stream], ["metadata", name]),
        lambda: Stream.objects.bulk_create(
            [Stream(key="s")], update_conflicts=True, update_fields=[name], unique_fields=["key"]
        ),
        lambda: Stream.objects.bulk_create([Stream(key="s")], None, False, True, [name], ["key"]),
    ):
        with pytest.raises(ManagedField, match=f"cannot write {name}"):
            refused()
    stream.save()  # silently leaves it: the instance may just be stale
    assert managed(stream) == before


def test_a_counter_cannot_be_computed_either(stream):
    with pytest.raises(ManagedField):
        Stream.objects.update(next_offset=F("next_offset") + 1)


def test_what_is_refused_leaves_the_transaction_usable(stream):
    with transaction.atomic():
        for refused in (
            lambda: stream.save(update_fields=["state"]),
            lambda: Stream.objects.update(state="open"),
            lambda: Stream.objects.bulk_update([stream], ["state"]),
            lambda: Stream.objects.bulk_update([stream], ["content_type"]),
            lambda: Stream.objects.update_or_create(key="s", defaults={"state": "open"}),
        ):
            with pytest.raises(ManagedField):
                refused()
        assert stream.append(1).offset == 0


def test_a_deferred_instance_saves_what_it_has(stream):
    Stream.objects.update(metadata={"a": 1})
    for deferred in (
        Stream.objects.only("key").get(),
        Stream.objects.defer("metadata").get(),
        Stream.objects.only("pk").get(),
        Stream.objects.defer(*MANAGED_FIELDS).get(),
        Stream.objects.defer("content_type").get(),
    ):
        append_count = Stream.objects.get().next_offset
        assert deferred.append("x").offset == append_count
        deferred.save()
    renamed = Stream.objects.only("key").get()
    renamed.key = "renamed"
    renamed.save()
    found = Stream.objects.get()
    assert (found.key, found.metadata, found.next_offset) == ("renamed", {"a": 1}, 5)


def test_a_save_that_names_nothing_does_nothing(stream, django_assert_num_queries):
    with django_assert_num_queries(0):
        stream.save(update_fields=[])


def test_an_owner_can_change(stream, django_user_model):
    owner = django_user_model.objects.create_user("owner")
    stream.owner = owner
    stream.save()
    assert Stream.objects.get(owner=owner) == stream


# The content type stays ----------------------------------------------------------------------------


def test_a_content_type_stays_since_payloads_were_encoded_by_it(stream):
    stream.append({"a": 1})
    stream.content_type = "text/plain"
    for refused in (
        stream.save,
        lambda: stream.save(update_fields=["content_type"]),
        lambda: Stream.objects.update(content_type="text/plain"),
        lambda: Stream.objects.bulk_update([stream], ["content_type"]),
        lambda: Stream.objects.update_or_create(key="s", defaults={"content_type": "text/plain"}),
        lambda: Stream.objects.bulk_create(
            [stream], update_conflicts=True, update_fields=["content_type"], unique_fields=["key"]
        ),
    ):
        with pytest.raises(ManagedField, match="cannot change content_type"):
            refused()
    stream.refresh_from_db()
    assert stream.content_type == "application/json"
    assert stored(stream) == [(0, {"a": 1})]


def test_the_same_content_type_may_be_given_again(stream):
    stream.content_type = "application/json"
    stream.save(update_fields=["content_type"])
    found, created = Stream.objects.update_or_create(key="s", defaults={"content_type": "application/json"})
    assert (found, created) == (stream, False)


# Deleted streams -----------------------------------------------------------------------------------


def test_saving_a_deleted_stream_does_not_bring_it_back(stream):
    stale = Stream.objects.get()
    Stream.objects.all().delete()
    for save in (
        stale.save,
        lambda: stale.save(update_fields=["metadata"]),
        lambda: stale.save(force_update=True),
    ):
        with pytest.raises(StreamMissing, match="'s' does not exist"):
            save()
    assert not Stream.objects.exists()


def test_saving_the_very_instance_that_was_deleted_does_not_either(stream):
    stream.delete()
    with pytest.raises(StreamMissing, match="'s' does not exist"):
        stream.save()
    assert not Stream.objects.exists()


def test_a_save_that_finds_nothing_leaves_the_transaction_usable(stream):
    stale = Stream.objects.get()
    stream.delete()
    with transaction.atomic():
        with pytest.raises(StreamMissing):
            stale.save()
        assert Stream.objects.create(key="next").append(1).offset == 0


def test_another_database_error_is_not_taken_for_a_missing_stream(stream):
    Stream.objects.create(key="taken")
    stream.key = "taken"
    with pytest.raises(IntegrityError), transaction.atomic():
        stream.save()
    stream.key, stream.metadata = "s", {"a": "\0"}
    with pytest.raises(DatabaseError), transaction.atomic():
        stream.save()


# Admin ---------------------------------------------------------------------------------------------


class MetadataAdmin(admin.ModelAdmin):
    """A project's own admin; somebody else appends and closes between its form's GET and its UPDATE."""

    fields = ("key", "content_type", "owner", "metadata", "expires_at")

    def save_model(self, request, obj, form, change):
        append_and_close(obj)
        super().save_model(request, obj, form, change)


site = admin.AdminSite(name="stale")
site.register(Stream, MetadataAdmin)
urlpatterns = [path("stale/", site.urls)]


@pytest.mark.urls(__name__)
def test_counter_and_state_stand_when_the_admin_saves(stream, admin_client):
    url = reverse("stale:pgstreams_stream_change", args=[stream.pk])
    fields = {"key": "renamed", "content_type": stream.content_type, "metadata": '{"saved": true}'}
    response = admin_client.post(url, fields)
    assert response.status_code == 302, response.context["errors"]
    found = Stream.objects.get()
    assert (found.key, found.metadata) == ("renamed", {"saved": True})
    assert (found.next_offset, found.state, found.reason) == (100, "failed", "no disk")
    assert (found.epoch, found.closed_at is None) == (stream.epoch, False)


# Chunks are immutable ------------------------------------------------------------------------------


@pytest.fixture
def chunk(stream) -> Chunk:
    return stream.append({"a": 1})


def refused_changes(chunk: Chunk):
    """Every way by which Django would change or delete a stored chunk."""
    same = Chunk.objects.filter(pk=chunk.pk)
    yield chunk.save
    yield same.get().save
    yield lambda: chunk.save(force_insert=True)
    yield lambda: chunk.save(force_update=True)
    yield lambda: chunk.save(update_fields=["payload"])
    yield chunk.delete
    yield same.delete
    yield Chunk.objects.all().delete
    yield lambda: same.update(payload=b"2")
    yield lambda: Chunk.objects.update(offset=F("offset") + 1)
    yield lambda: Chunk.objects.bulk_update([chunk], ["payload"])
    yield lambda: Chunk.objects.bulk_create([chunk])
    yield lambda: Chunk.objects.bulk_create([], ignore_conflicts=True)
    yield lambda: Chunk.objects.bulk_create([], update_conflicts=True)
    yield lambda: setattr(chunk, "data", {"a": 2})
    yield lambda: chunk.stream.chunks.update(payload=b"2")
    yield chunk.stream.chunks.all().delete
    yield lambda: chunk.stream.chunks.filter(offset=0).delete()
    yield lambda: Chunk.objects.update_or_create(pk=chunk.pk, defaults={"payload": b"2"})


def test_a_stored_chunk_neither_changes_nor_goes(stream, chunk):
    for number, change in enumerate(refused_changes(chunk)):
        with pytest.raises(ChunkImmutable):
            change()
        assert stored(stream) == [(0, {"a": 1})], number


@in_this_thread
async def test_nor_by_the_async_twins(stream, chunk):
    for change in (
        chunk.asave,
        chunk.adelete,
        Chunk.objects.all().adelete,
        lambda: Chunk.objects.aupdate(payload=b"2"),
        lambda: Chunk.objects.abulk_create([chunk]),
        lambda: Chunk.objects.abulk_update([chunk], ["payload"]),
    ):
        with pytest.raises(ChunkImmutable):
            await change()


def test_a_chunk_moves_neither_to_another_offset_nor_to_another_stream(stream, chunk):
    other = Stream.objects.create(key="other")
    other.append("mine")
    chunk.offset = 7
    with pytest.raises(ChunkImmutable):
        chunk.save()
    for move in (
        lambda: other.chunks.add(stream.chunks.get()),
        lambda: other.chunks.add(stream.chunks.get(), bulk=False),
        lambda: other.chunks.set([stream.chunks.get()]),
        lambda: other.chunks.set([stream.chunks.get()], bulk=False),
    ):
        with pytest.raises(ChunkImmutable), transaction.atomic():
            move()
    assert not hasattr(stream.chunks, "clear")
    assert not hasattr(stream.chunks, "remove")
    assert (stored(stream), stored(other)) == ([(0, {"a": 1})], [(0, "mine")])


def test_a_new_chunk_cannot_be_given_its_offset(stream):
    for give in (
        lambda: Chunk(stream=stream, offset=0, data=1).save(),
        lambda: Chunk.objects.create(stream=stream, offset=5, data=1),
        lambda: Chunk.objects.bulk_create(
            [Chunk(stream=stream, data=1), Chunk(stream=stream, offset=1, data=1)]
        ),
        lambda: Chunk.objects.get_or_create(stream=stream, offset=0, defaults={"data": 1}),
    ):
        with pytest.raises(ManagedField, match="expected_offset"):
            give()
    assert stored(stream) == []


# Chunks and their data -----------------------------------------------------------------------------


def test_every_way_of_creating_a_chunk_appends(stream):
    Chunk(stream=stream, data=0).save()
    Chunk.objects.create(stream=stream, data=1)
    stream.chunks.create(data=2)
    Chunk.objects.bulk_create([Chunk(stream=stream, data=3), Chunk(stream=stream, data=4)])
    stream.chunks.bulk_create([Chunk(stream=stream, data=5)])
    stream.append(6)
    stream.append_many([7, 8])
    Chunk.objects.create(stream_id=stream.pk, payload=b"9")
    assert stored(stream) == [(n, n) for n in range(10)]


@in_this_thread
async def test_every_async_way_of_creating_a_chunk_appends():
    stream = await Stream.objects.acreate(key="async")
    await Chunk(stream=stream, data=0).asave()
    await Chunk.objects.acreate(stream=stream, data=1)
    await stream.chunks.acreate(data=2)
    await Chunk.objects.abulk_create([Chunk(stream=stream, data=3)])
    assert (await stream.aappend(4)).offset == 4
    assert [chunk.offset for chunk in await stream.aappend_many([5, 6])] == [5, 6]
    assert [chunk.data async for chunk in stream.aread()] == list(range(7))
    assert [chunk.data async for chunk in Chunk.objects.filter(stream=stream)] == list(range(7))


def test_an_appended_chunk_has_what_the_database_gave_it(stream):
    chunk = stream.append({"a": [1, "größe"]})
    assert chunk.pk == (stream.pk, 0)
    assert chunk.stream is stream
    assert chunk.data == {"a": [1, "größe"]}
    assert chunk.payload == '{"a":[1,"größe"]}'.encode()
    assert chunk.created_at == stream.appended_at
    [found] = stream.read()
    for same in (Chunk.objects.get(pk=chunk.pk), Chunk.objects.get(stream=stream, offset=0), found):
        assert same == chunk
        assert (same.data, same.payload) == (chunk.data, chunk.payload)
        assert same.created_at == chunk.created_at
        assert same.created_at.tzinfo == chunk.created_at.tzinfo == datetime.UTC
        assert str(same) == f"{stream.pk}:0"


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        ("application/json", {"a": None}),
        ("application/ld+json", [1.5]),
        ("text/plain", "a\0 😀"),
        ("text/html; charset=utf-8", ""),
        ("application/octet-stream", b"\x00\xff"),
        ("image/png", b""),
    ],
)
def test_data_is_what_the_content_type_says(content_type, data):
    stream = Stream.objects.create(key="s", content_type=content_type)
    assert stream.append(data).data == data
    assert stored(stream) == [(0, data)]
    assert type(stored(stream)[0][1]) is type(data)


def test_a_payload_given_directly_is_checked(stream):
    for payload in (b"{", b"NaN", rb'"\ud83d"', '"x"'.encode("utf-16"), "text", 5, None, b""):
        with pytest.raises(InvalidPayload):
            Chunk(stream=stream, payload=payload).save()
        with pytest.raises(InvalidPayload):
            Chunk.objects.bulk_create([Chunk(stream=stream, data=1), Chunk(stream=stream, payload=payload)])
    with pytest.raises(InvalidPayload):
        Chunk(stream=stream).save()
    changed = Chunk(stream=stream, data=1)
    changed.payload = b"nonsense"
    with pytest.raises(InvalidPayload):
        changed.save()
    Chunk(stream=stream, payload=b' {"b": 1, "a":2.50} ').save()
    assert Chunk.objects.get().payload == b' {"b": 1, "a":2.50} '


def test_data_never_queries(stream, django_assert_num_queries):
    stream.append_many(range(5))
    with django_assert_num_queries(1):
        assert [chunk.data for chunk in Chunk.objects.all()] == list(range(5))
    with django_assert_num_queries(1):
        assert Chunk.objects.get(offset=3).data == 3
    with django_assert_num_queries(1):
        assert [chunk.data for chunk in stream.chunks.order_by("offset")] == list(range(5))
    with django_assert_num_queries(1):
        assert [chunk.data for chunk in Chunk.objects.only("payload")] == list(range(5))
    with django_assert_num_queries(1):
        assert [chunk.data for chunk in stream.read()] == list(range(5))
    with django_assert_num_queries(1):
        chunk = stream.append(5)
        assert chunk.data == 5
    with django_assert_num_queries(0):
        assert chunk.stream.key == "s"


def test_a_payload_can_be_left_in_the_database(stream, django_assert_num_queries):
    stream.append_many(["x" * 1000] * 3)
    with django_assert_num_queries(1):
        assert [chunk.offset for chunk in Chunk.objects.defer("payload")] == [0, 1, 2]
    with django_assert_num_queries(1):
        assert [chunk.offset for chunk in Chunk.objects.only("offset")] == [0, 1, 2]
    with django_assert_num_queries(2):
        assert Chunk.objects.only("offset").first().data == "x" * 1000


@isolate_apps("tests")
def test_a_proxy_appends_like_the_model_itself():
    class Log(Stream):
        class Meta:
            app_label = "tests"
            proxy = True

    log = Log.objects.create(key="log")
    assert log.append(1).offset == 0
    assert log.append_many([2])[0].offset == 1
    log.metadata = {"a": 1}
    log.save()
    log.close()
    found = Log.objects.get()
    assert isinstance(found, Log)
    assert (found.state, found.next_offset, [chunk.data for chunk in found.read()]) == (
        "completed",
        2,
        [1, 2],
    )
    with pytest.raises(ManagedField):
        Log.objects.update(state="open")


# Reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "limit", "expected"),
    [
        (0, None, range(10)),
        (3, None, range(3, 10)),
        (0, 0, []),
        (0, 1, [0]),
        (2, 5, range(2, 7)),
        (8, 5, [8, 9]),
        (10, None, []),
        (10, 5, []),
        (11, None, []),
        (0, 10, range(10)),
        (0, 10**12, range(10)),
    ],
)
@pytest.mark.parametrize("page_chunks", [1, 3, 10, 1000])
def test_reading_from_a_position_up_to_a_limit(stream, settings, offset, limit, expected, page_chunks):
    settings.PGSTREAMS = {"PAGE_CHUNKS": page_chunks}
    stream.append_many(range(10))
    assert [(chunk.offset, chunk.data) for chunk in stream.read(offset, limit)] == [(n, n) for n in expected]


def test_pages_are_bounded_by_bytes_too_but_hold_one_chunk(stream, settings, django_assert_num_queries):
    settings.PGSTREAMS = {"PAGE_BYTES": 1000}
    stream.append_many(["x" * 400] * 4 + ["y" * 5000] + ["z" * 400] * 2)
    with django_assert_num_queries(3):
        assert [chunk.data[0] for chunk in stream.read()] == list("xxxxyzz")


def test_a_page_that_reaches_the_tail_is_the_last_query(stream, settings, django_assert_num_queries):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 5}
    stream.append_many(range(10))
    with django_assert_num_queries(2):
        assert len(list(stream.read())) == 10
    with django_assert_num_queries(1):
        assert list(stream.read(10)) == []


@pytest.mark.parametrize(("offset", "limit"), [(-1, None), (0, -1), (-5, 5)])
def test_a_negative_position_or_limit_is_refused_at_once(stream, offset, limit):
    with pytest.raises(ValueError, match="0 or more"):
        stream.read(offset, limit)


def test_reading_a_stream_that_is_gone(stream):
    stream.append_many(range(3))
    stale = Stream.objects.get()
    stream.delete()
    for gone in (stale, stream, Stream(key="never saved")):
        with pytest.raises(StreamMissing, match="does not exist"):
            list(gone.read())


def test_a_stream_deleted_between_pages_is_missing_not_at_its_end(stream, settings):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 2}
    stream.append_many(range(5))
    chunks = stream.read()
    assert [next(chunks).data, next(chunks).data] == [0, 1]
    Stream.objects.all().delete()
    with pytest.raises(StreamMissing):
        next(chunks)


def trim(stream: Stream, first_offset: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            'DELETE FROM pgstreams_chunk WHERE stream_id = %s AND "offset" < %s', [stream.pk, first_offset]
        )
        cursor.execute(
            "UPDATE pgstreams_stream SET first_offset = %s WHERE id = %s", [first_offset, stream.pk]
        )


def test_a_position_that_was_trimmed_away_is_a_gap(stream):
    stream.append_many(range(10))
    trim(stream, 6)
    for position in (0, 5):
        with pytest.raises(StreamGap, match=f"Chunks {position}–5 .*; read from 6") as caught:
            list(stream.read(position))
        assert (caught.value.requested, caught.value.first) == (position, 6)
    assert [chunk.offset for chunk in stream.read(6)] == [6, 7, 8, 9]
    trim(stream, 10)
    with pytest.raises(StreamGap) as caught:
        list(stream.read(7))
    assert caught.value.first == 10
    assert list(stream.read(10)) == []
    assert stream.append("next").offset == 10


def test_trimming_between_pages_is_a_gap_not_a_jump(stream, settings):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 2}
    stream.append_many(range(10))
    chunks = stream.read()
    assert [next(chunks).data, next(chunks).data] == [0, 1]
    trim(stream, 6)
    with pytest.raises(StreamGap) as caught:
        next(chunks)
    assert (caught.value.requested, caught.value.first) == (2, 6)


@in_this_thread
async def test_the_async_reader_pages_too(settings):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 3}
    stream = await Stream.objects.acreate(key="async")
    await stream.aappend_many(range(10))
    assert [chunk.data async for chunk in stream.aread(2, 5)] == [2, 3, 4, 5, 6]
    assert [chunk.data async for chunk in stream.aread(limit=0)] == []
    with pytest.raises(ValueError, match="0 or more"):
        [chunk async for chunk in stream.aread(-1)]
    await stream.adelete()
    with pytest.raises(StreamMissing):
        [chunk async for chunk in stream.aread()]


def fill(stream: Stream, count: int) -> None:
    """Store chunks of 100 bytes at once, as a program beside Django would."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO pgstreams_chunk (stream_id, "offset", payload)
            SELECT %s, n, convert_to('"' || repeat('x', 98) || '"', 'UTF8')
            FROM generate_series(0, %s - 1) AS n
            """,
            [stream.pk, count],
        )
        cursor.execute("UPDATE pgstreams_stream SET next_offset = %s WHERE id = %s", [count, stream.pk])


@pytest.mark.once
def test_reading_takes_the_same_memory_however_long_the_stream_is(stream):
    fill(stream, 200_000)
    alive: weakref.WeakSet[Chunk] = weakref.WeakSet()
    most_alive = count = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for count, chunk in enumerate(stream.read(), 1):
        alive.add(chunk)
        if count % 500 == 0:
            most_alive = max(most_alive, len(alive))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * RSS_UNIT_BYTES
    assert count == 200_000
    assert most_alive <= 2 * conf.get().PAGE_CHUNKS
    assert grown < 10_000_000


def test_a_page_touches_no_more_rows_than_it_brings_even_without_statistics(stream):
    """A planner without statistics sorted the whole rest of the stream for each page."""
    fill(stream, 20_000)
    values = pages.parameters([stream.pk], [3], max_chunks=100, max_bytes=10**6)
    with transaction.atomic(), connection.cursor() as cursor:

        def chunks_read() -> int:
            cursor.execute(
                "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) "
                "FROM pg_stat_xact_user_tables WHERE relname LIKE 'pgstreams_chunk%'"
            )
            return cursor.fetchone()[0]

        before = chunks_read()
        cursor.execute(sql.PAGES, values)
        [(*_, payloads, _, _, _)] = cursor.fetchall()
        assert len(payloads) == 100
        assert chunks_read() - before == 101  # the chunk before them is looked at, too


def test_what_is_read_can_be_spliced_as_it_is(stream):
    stream.append({"a\0": "\0", "b": "😀"})
    [chunk] = stream.read()
    assert json.loads(codec.splice(stream.content_type, chunk.payload)) == {"a\0": "\0", "b": "😀"}


class WritesToDefault:
    """A database router for a project with a replica, as Django's documentation has it."""

    def db_for_write(self, model, **hints):
        return "default"

    def allow_relation(self, one, other, **hints):
        return True


def test_a_stream_read_from_a_replica_is_written_where_the_router_says(stream, settings):
    settings.DATABASE_ROUTERS = [f"{__name__}.WritesToDefault"]
    stream._state.db = "replica"
    assert stream.append(0)._state.db == "default"
    assert stream.append_many([1])[0].offset == 1
    stream.metadata = {"a": 1}
    stream.save()
    assert [chunk.data for chunk in stream.read()] == [0, 1]
    stream.close()
    found = Stream.objects.get()
    assert (found.state, found.next_offset, found.metadata) == ("completed", 2, {"a": 1})


def test_a_chunk_can_be_read_again(stream):
    chunk = stream.append({"a": 1})
    for fields in (None, ["payload"], ["stream"]):
        chunk.refresh_from_db(fields=fields)
        assert (chunk.offset, chunk.data, chunk.stream) == (0, {"a": 1}, stream)
    again = pickle.loads(pickle.dumps(chunk))
    assert (again, again.data) == (chunk, chunk.data)


# Their place in Django -----------------------------------------------------------------------------


def test_chunks_hang_on_their_stream_without_a_database_constraint():
    field = Chunk._meta.get_field("stream")
    assert isinstance(Chunk._meta.pk, models.CompositePrimaryKey)
    assert not field.db_constraint
    assert not field.db_index
    assert Stream._meta.pk.get_internal_type() == "BigAutoField"
    assert Stream._meta.app_label == Chunk._meta.app_label == "pgstreams"


def test_an_owner_does_not_see_its_streams_among_its_own_names():
    assert not [name for name in dir(User) if "stream" in name]
