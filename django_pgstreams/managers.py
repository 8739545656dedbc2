"""The managers of `Stream` and `Chunk`, and the way of new chunks into the table.

Invariant: no path through Django writes a managed field, gives a stream a key that breaks the rule, or
changes a stored chunk; and instances change only once everything that was asked for is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from django.db import models, transaction
from django.db.models.utils import resolve_callables

from . import keys, signals, store
from .exceptions import ChunkImmutable, InvalidKey, ManagedField

if TYPE_CHECKING:
    from .models import Chunk, Stream

MANAGED_FIELDS = frozenset(
    {"next_offset", "first_offset", "epoch", "state", "reason", "appended_at", "closed_at"}
)


def refuse_managed(names: Collection[str], what: str) -> None:
    """Raise `ManagedField` if a managed field, or the content type, is among the names to be written."""
    if "content_type" in names:
        refuse_content_type(what)
    managed = sorted(MANAGED_FIELDS.intersection(names))
    if managed:
        raise ManagedField(
            f"{what} cannot write {', '.join(managed)}: only append(), close(), fail() and cancel() do, "
            "because a value from an instance may be stale."
        )


def refuse_content_type(what: str) -> NoReturn:
    """Raise `ManagedField`: the stored payloads are of the content type that the stream was created with."""
    raise ManagedField(
        f"{what} cannot change content_type: what is stored was encoded by it. Create another stream."
    )


class StreamQuerySet(models.QuerySet["Stream"]):
    """Streams; refuses to write managed fields."""

    def update(self, **kwargs: Any) -> int:
        """Django's, for the fields that are not managed."""
        refuse_managed(kwargs, "update()")
        if "key" in kwargs:
            if not isinstance(kwargs["key"], str):
                raise InvalidKey("update() cannot check a computed key: rename streams with save().")
            keys.check_key(kwargs["key"])
        return super().update(**kwargs)

    def update_or_create(
        self,
        defaults: Mapping[str, Any] | None = None,
        create_defaults: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Stream, bool]:
        """Django's, which would have `save()` write all dates, managed ones too."""
        values = defaults or {}
        refuse_managed(values.keys() - {"content_type"}, "update_or_create()")
        self._for_write = True
        with transaction.atomic(using=self.db):
            stream, created = self.select_for_update().get_or_create(
                values if create_defaults is None else create_defaults, **kwargs
            )
            if not created:
                for name, value in resolve_callables(values):
                    setattr(stream, name, value)
                stream.save(using=self.db)
        return stream, created

    def bulk_update(
        self, objs: Iterable[Stream], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """Django's, for the fields that are not managed, and not for keys, which it would compute in SQL."""
        names = list(fields)
        refuse_managed(names, "bulk_update()")
        if "key" in names:
            raise InvalidKey("bulk_update() does not rename streams: use save().")
        return super().bulk_update(objs, names, batch_size=batch_size)

    def bulk_create(
        self,
        objs: Iterable[Stream],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Collection[str] | None = None,
        unique_fields: Collection[str] | None = None,
    ) -> list[Stream]:
        """Django's, with each stream checked as in `save()`."""
        streams = list(objs)
        refuse_managed(update_fields or (), "bulk_create()")
        for stream in streams:
            stream.check_new()
        return super().bulk_create(
            streams,
            batch_size=batch_size,
            ignore_conflicts=ignore_conflicts,
            update_conflicts=update_conflicts,
            update_fields=update_fields,
            unique_fields=unique_fields,
        )


class ChunkQuerySet(models.QuerySet["Chunk"]):
    """Chunks; they can be added and read, nothing else."""

    def only(self, *fields: str) -> ChunkQuerySet:
        """Django's; the joined stream stays, since it says how to decode a chunk."""
        return super().only(*fields, *(["stream"] if self.query.select_related else []))

    def update(self, **kwargs: Any) -> NoReturn:
        """Refused: `ChunkImmutable`."""
        raise ChunkImmutable("Chunks never change: append a new one instead of update().")

    def bulk_update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: `ChunkImmutable`."""
        raise ChunkImmutable("Chunks never change: append a new one instead of bulk_update().")

    def delete(self) -> NoReturn:
        """Refused: `ChunkImmutable`."""
        raise ChunkImmutable("Chunks are not deleted one by one: delete their stream.")

    def bulk_create(
        self,
        objs: Iterable[Chunk],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Collection[str] | None = None,
        unique_fields: Collection[str] | None = None,
    ) -> list[Chunk]:
        """Append chunks to their streams in the order given, all or nothing, and set their offsets.

        Streams are locked in the order of their ids, so parallel calls do not deadlock. Raises as
        `Stream.append` does.
        """
        if ignore_conflicts or update_conflicts:
            raise ChunkImmutable(
                "Chunks never conflict or change: drop ignore_conflicts and update_conflicts."
            )
        chunks = list(objs)
        by_stream: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            chunk.check_new()
            by_stream.setdefault(chunk.stream.pk or 0, []).append(chunk)
        self._for_write = True
        with transaction.atomic(using=self.db):
            runs = [by_stream[stream_id] for stream_id in sorted(by_stream)]
            found = [store_chunks(run[0].stream, run, self.db) for run in runs]
            for run, counters in zip(runs, found, strict=True):
                mark_stored(run[0].stream, run, counters, self.db)
                stream = run[0].stream
                signals.chunks_appended.send(
                    sender=stream._meta.concrete_model, stream=stream, chunks=run, using=self.db
                )
        return chunks


class ChunkManager(models.Manager["Chunk"]):
    """Joins the stream, so that `Chunk.data` never queries."""

    def get_queryset(self) -> ChunkQuerySet:
        return ChunkQuerySet(self.model, using=self._db).select_related("stream")


def store_chunks(
    stream: Stream,
    chunks: Sequence[Chunk],
    using: str,
    *,
    expected_offset: int | None = None,
    close: bool = False,
) -> store.Counters:
    """Store new chunks of one stream; the instances stay as they are until `mark_stored`."""
    payloads = [bytes(chunk.payload) for chunk in chunks]
    return store.append(using, stream.pk, stream.key, payloads, expected_offset=expected_offset, close=close)


def mark_stored(stream: Stream, chunks: Sequence[Chunk], counters: store.Counters, using: str) -> None:
    """Set on the instances what the database gave them."""
    created_at: Any = counters.appended_at  # never None after an append
    first = counters.next_offset - len(chunks)
    for offset, chunk in enumerate(chunks, first):
        chunk.mark_stored(offset, created_at, using)
        if chunk.stream is not stream:
            chunk.stream.take_counters(counters)
    stream.take_counters(counters)
