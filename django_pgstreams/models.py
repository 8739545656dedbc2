"""`Stream` and `Chunk`.

Invariant: counters and state of a stream are written by the app's own statements only (`store`), never from
an instance, which may be stale; and a stored chunk never changes and goes only with its stream. `managers`
holds the same line for querysets.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import count
from typing import Any, NoReturn

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError, models, router
from django.db.models.base import ModelState
from django.db.models.functions import Now
from django.db.models.signals import post_save, pre_save
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from . import codec, conf, keys, pages, signals, store
from .exceptions import ChunkImmutable, InvalidPayload, ManagedField, StreamGap, StreamMissing
from .managers import (
    MANAGED_FIELDS,
    ChunkManager,
    ChunkQuerySet,
    StreamQuerySet,
    mark_stored,
    refuse_content_type,
    refuse_managed,
    store_chunks,
)
from .metadata import MetadataField

_INITIAL = {
    "next_offset": 0,
    "first_offset": 0,
    "state": "open",
    "reason": "",
    "appended_at": None,
    "closed_at": None,
}
"""What the managed fields of a new stream hold (any epoch will do)."""


def new_epoch() -> str:
    """A random name for one life of a key."""
    return secrets.token_urlsafe(12)


class Stream(models.Model):
    """An append-only, gapless sequence of chunks under a unique key."""

    class State(models.TextChoices):
        """How a stream stands; all but open are for ever."""

        OPEN = "open", _("open")
        COMPLETED = "completed", _("completed")
        FAILED = "failed", _("failed")
        CANCELLED = "cancelled", _("cancelled")

    key = models.CharField(
        _("key"),
        max_length=keys.MAX_KEY_CHARACTERS,
        unique=True,
        validators=[keys.check_key],
        help_text=_("A unique name, such as chat/17/answer/3."),
    )
    epoch = models.CharField(max_length=36, default=new_epoch, editable=False)
    content_type = models.CharField(
        _("content type"),
        max_length=codec.MAX_CONTENT_TYPE_CHARACTERS,
        default=codec.DEFAULT_CONTENT_TYPE,
        db_default=codec.DEFAULT_CONTENT_TYPE,
        validators=[codec.check_content_type],
        help_text=_("application/json, text/…, or anything else for bytes."),
    )
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.CASCADE,
        null=True,
        blank=True,
        related_name="+",
        verbose_name=_("owner"),
    )
    metadata = MetadataField(_("metadata"), default=dict, blank=True)
    state = models.CharField(
        _("state"),
        max_length=9,
        choices=State,
        default=State.OPEN,
        db_default=State.OPEN,
        editable=False,
    )
    reason = models.TextField(_("reason"), default="", db_default="", editable=False)
    next_offset = models.BigIntegerField(_("tail"), default=0, db_default=0, editable=False)
    first_offset = models.BigIntegerField(_("first offset"), default=0, db_default=0, editable=False)
    created_at = models.DateTimeField(_("created"), db_default=Now(), editable=False)
    appended_at = models.DateTimeField(_("last append"), null=True, editable=False)
    closed_at = models.DateTimeField(_("closed"), null=True, editable=False)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True)

    objects = StreamQuerySet.as_manager()

    class Meta:
        verbose_name = _("stream")
        verbose_name_plural = _("streams")
        indexes = [
            models.Index(fields=["id"], name="pgstreams_stream_open", condition=models.Q(state="open"))
        ]

    def __str__(self) -> str:
        return self.key

    # Saving ----------------------------------------------------------------------------------------

    def save(  # type: ignore[override]
        self,
        *,
        force_insert: bool = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
    ) -> None:
        """Django's, except that it never writes a managed field of an existing stream.

        Raises `InvalidKey`, `ManagedField` (also for another content type than the stored one), and
        `StreamMissing` if the stream has been deleted since.
        """
        if self._state.adding or force_insert:
            self.check_new()
            # Not Django's "update, else insert": an update would write the counters of an existing row.
            super().save(force_insert=True, using=using, update_fields=update_fields)
            return
        using = using or self._alias()
        names = self._names_to_save(update_fields)
        if names:
            self._check_existing(names, using)
        try:
            super().save(force_update=force_update, using=using, update_fields=names)
        except DatabaseError as error:
            if error.__cause__ is not None:
                raise
            raise self._missing() from error

    def _names_to_save(self, update_fields: Iterable[str] | None) -> set[str]:
        if update_fields is not None:
            names = set(update_fields)
            # The content type may be named, as long as it is the stored one.
            refuse_managed(names - {"content_type"}, "save()")
            return names
        kept_back = MANAGED_FIELDS | self.get_deferred_fields()
        return {
            field.name
            for field in self._meta.concrete_fields
            if not field.primary_key and field.attname not in kept_back
        }

    def _check_existing(self, names: set[str], using: str) -> None:
        """Refuse before anything fails in SQL, so that the caller's transaction stays usable."""
        stored = type(self)._base_manager.using(using).filter(pk=self.pk)
        content_type = stored.values_list("content_type", flat=True).first()
        if content_type is None:
            raise self._missing()
        if "key" in names:
            keys.check_key(self.key)
        if "content_type" in names and self.content_type != content_type:
            refuse_content_type("save()")

    def check_new(self) -> None:
        """Raise `InvalidKey`, `InvalidPayload` or `ManagedField` unless this can be a new stream."""
        keys.check_key(self.key)
        codec.check_content_type(self.content_type)
        given = [name for name, value in _INITIAL.items() if getattr(self, name) != value]
        refuse_managed(given, "A new stream")

    def _missing(self) -> StreamMissing:
        return StreamMissing(f"Stream {self.key!r} does not exist: it was deleted or never saved.")

    # Appending and closing -------------------------------------------------------------------------

    def append(self, data: Any, *, expected_offset: int | None = None, close: bool = False) -> Chunk:
        """Append one value as part of the caller's transaction, and return its saved chunk.

        `expected_offset` stores only if that is the tail (else `OffsetConflict`); `close` completes the
        stream in the same statement. Raises `InvalidPayload`, `StreamClosed`, `StreamMissing`: nothing is
        stored then, and the transaction stays usable.
        """
        chunk = Chunk(stream=self)
        chunk.data = data
        chunk.save(using=self._alias(), expected_offset=expected_offset, close=close)
        return chunk

    def append_many(
        self, values: Iterable[Any], *, expected_offset: int | None = None, close: bool = False
    ) -> list[Chunk]:
        """Append values in one go, all or nothing; the offsets are consecutive. Errors as for `append`."""
        chunks = []
        for index, data in enumerate(values):
            chunk = Chunk(stream=self)
            try:
                chunk.data = data
            except InvalidPayload as error:
                raise InvalidPayload(f"Value {index}: {error}") from error
            chunks.append(chunk)
        if not chunks and not close and expected_offset is None:
            return chunks
        using = self._alias()
        counters = store_chunks(self, chunks, using, expected_offset=expected_offset, close=close)
        mark_stored(self, chunks, counters, using)
        if chunks:
            signals.chunks_appended.send(sender=Stream, stream=self, chunks=list(chunks), using=using)
        if close:
            signals.stream_closed.send(sender=Stream, stream=self, using=using)
        return chunks

    def close(self, *, lock_timeout_seconds: float | None = None) -> None:
        """End the stream as completed. Raises `StreamClosed` if it has ended already, `StreamMissing`.

        With a lock timeout, waits for another transaction that long only, then raises `StreamBusy`.
        """
        self._close(self.State.COMPLETED, "", lock_timeout_seconds)

    def fail(self, reason: str) -> None:
        """End the stream as failed. Errors as for `close`."""
        self._close(self.State.FAILED, reason)

    def cancel(self, reason: str = "", *, lock_timeout_seconds: float | None = None) -> None:
        """End the stream as cancelled, on behalf of somebody else than its writer, who gets `StreamClosed`.

        Waits for a writer's transaction for `LOCK_TIMEOUT_SECONDS` only (or the time given), then raises
        `StreamBusy`. Other errors as for `close`.
        """
        timeout = conf.get().LOCK_TIMEOUT_SECONDS if lock_timeout_seconds is None else lock_timeout_seconds
        self._close(self.State.CANCELLED, reason, lock_timeout_seconds=timeout)

    def _close(self, state: str, reason: str, lock_timeout_seconds: float | None = None) -> None:
        using = self._alias()
        # A reason is often an error's text: no character in it may keep the stream open.
        reason = codec.storable_text(reason)
        self.take_counters(
            store.close(using, self.pk, self.key, state, reason, lock_timeout_seconds=lock_timeout_seconds)
        )
        signals.stream_closed.send(sender=Stream, stream=self, using=using)

    def _alias(self) -> str:
        return router.db_for_write(Stream, instance=self)

    def take_counters(self, counters: store.Counters) -> None:
        """Set this instance's managed fields to what the database has."""
        for name, value in counters._asdict().items():
            setattr(self, name, value)

    async def aappend(self, data: Any, *, expected_offset: int | None = None, close: bool = False) -> Chunk:
        """Async twin of `append`."""
        return await sync_to_async(self.append)(data, expected_offset=expected_offset, close=close)

    async def aappend_many(
        self, values: Iterable[Any], *, expected_offset: int | None = None, close: bool = False
    ) -> list[Chunk]:
        """Async twin of `append_many`."""
        return await sync_to_async(self.append_many)(values, expected_offset=expected_offset, close=close)

    async def aclose(self, *, lock_timeout_seconds: float | None = None) -> None:
        """Async twin of `close`."""
        await sync_to_async(self.close)(lock_timeout_seconds=lock_timeout_seconds)

    async def afail(self, reason: str) -> None:
        """Async twin of `fail`."""
        await sync_to_async(self.fail)(reason)

    async def acancel(self, reason: str = "", *, lock_timeout_seconds: float | None = None) -> None:
        """Async twin of `cancel`."""
        await sync_to_async(self.cancel)(reason, lock_timeout_seconds=lock_timeout_seconds)

    # Reading what is stored ------------------------------------------------------------------------

    def read(self, offset: int = 0, limit: int | None = None) -> Iterator[Chunk]:
        """The stored chunks from a position on, at most `limit`, page by page in flat memory.

        Ends at the tail as it is when reached; `hub.subscribe` follows it. Raises `StreamGap` when the
        position was trimmed away, `StreamMissing` when the stream is gone, `ValueError` for a negative
        position or limit.
        """
        _check_range(offset, limit)
        return (chunk for page in self._read_pages(offset, limit) for chunk in page)

    async def aread(self, offset: int = 0, limit: int | None = None) -> AsyncIterator[Chunk]:
        """Async twin of `read`."""
        _check_range(offset, limit)
        chunk_pages = self._read_pages(offset, limit)
        while page := await sync_to_async(lambda: next(chunk_pages, None))():
            for chunk in page:
                yield chunk

    def _read_pages(self, offset: int, limit: int | None) -> Iterator[list[Chunk]]:
        end = None if limit is None else offset + limit
        while end is None or offset < end:
            page = self._read_page(offset, end)
            yield Chunk.stored(self, page.chunks)
            offset = page.next
            if page.at_tail:
                return

    def _read_page(self, position: int, end: int | None) -> pages.Page:
        now = conf.get()
        [page] = store.read_pages(
            self._alias(),
            [self.pk],
            [position],
            max_chunks=now.PAGE_CHUNKS if end is None else min(end - position, now.PAGE_CHUNKS),
            max_bytes=now.PAGE_BYTES,
        )
        if page.row is None:
            raise self._missing()
        if page.gap_to is not None:
            raise StreamGap(
                f"Chunks {position}–{page.gap_to - 1} of stream {self.key!r} are no longer stored; "
                f"read from {page.gap_to}.",
                requested=position,
                first=page.gap_to,
            )
        return page


def _check_range(offset: int, limit: int | None) -> None:
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError(f"A position and a limit are 0 or more, not {offset} and {limit}.")


# One class for "no such stream", whether Django's lookup or an append finds it out.
Stream.DoesNotExist = StreamMissing  # type: ignore[misc,assignment]


class Chunk(models.Model):
    """One immutable stored piece of a stream.

    `Chunk(stream=s, data=value)` encodes the value by the stream's content type; saving it appends it.
    """

    pk = models.CompositePrimaryKey("stream_id", "offset")
    # The stream's deletion removes its chunks in one statement (`receivers`); Django has nothing to
    # collect, so no page and no cascade ever loads them.
    stream = models.ForeignKey(
        Stream, models.DO_NOTHING, related_name="chunks", db_constraint=False, db_index=False
    )
    offset = models.BigIntegerField()
    payload = models.BinaryField(editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    objects = ChunkManager.from_queryset(ChunkQuerySet)()

    _encoded: bytes | None = None
    """What the setter of `data` made; a payload from elsewhere is checked before it is stored."""

    class Meta:
        # Django's own detours, such as `stream.chunks.add()`, meet the refusals of the manager too.
        base_manager_name = "objects"
        verbose_name = _("chunk")
        verbose_name_plural = _("chunks")

    def __str__(self) -> str:
        return f"{self.stream_id}:{self.offset}"

    def save(  # type: ignore[override]
        self,
        *,
        force_insert: bool = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
        expected_offset: int | None = None,
        close: bool = False,
    ) -> None:
        """Append this new chunk to its stream as `Stream.append` does; a stored one: `ChunkImmutable`."""
        if force_update or update_fields is not None:
            raise ChunkImmutable(f"Chunk {self} never changes: append a new one.")
        self.check_new()
        using = using or router.db_for_write(Chunk, instance=self.stream)
        pre_save.send(sender=Chunk, instance=self, raw=False, using=using, update_fields=None)
        counters = store_chunks(self.stream, [self], using, expected_offset=expected_offset, close=close)
        mark_stored(self.stream, [self], counters, using)
        post_save.send(sender=Chunk, instance=self, created=True, raw=False, using=using, update_fields=None)
        if close:
            signals.stream_closed.send(sender=Stream, stream=self.stream, using=using)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: `ChunkImmutable`."""
        raise ChunkImmutable(f"Chunk {self} is not deleted on its own: delete its stream.")

    @classmethod
    def stored(cls, stream: Stream, run: pages.Run) -> list[Chunk]:
        """Instances for rows that were read by the app's own SQL; their times are what Django would give.

        They are made as unpickling makes them, without `__init__` and its signals, which would take most of
        the time of a read.
        """
        using, stream_id, aware = stream._state.db, stream.pk, settings.USE_TZ
        chunks = []
        columns = zip(count(run.first), run.payloads, run.created_at(), strict=False)
        for offset, payload, created_at in columns:
            state = ModelState()
            state.db = using
            state.adding = False
            state.fields_cache = {"stream": stream}
            chunk = cls.__new__(cls)
            chunk.__dict__.update(
                _state=state,
                stream_id=stream_id,
                offset=offset,
                payload=payload,
                created_at=created_at if aware else timezone.make_naive(created_at),
            )
            chunks.append(chunk)
        return chunks

    def mark_stored(self, offset: int, created_at: datetime.datetime, using: str | None) -> None:
        """Make this the instance of a stored row."""
        self.offset = offset
        self.created_at = created_at
        self._state.adding = False
        self._state.db = using

    @property
    def data(self) -> Any:
        """The value that the payload stands for, by the stream's content type."""
        return codec.decode(self.stream.content_type, bytes(self.payload))

    @data.setter
    def data(self, value: Any) -> None:
        if not self._state.adding:
            raise ChunkImmutable(f"Chunk {self} is stored and never changes.")
        self.payload = self._encoded = codec.encode(self.stream.content_type, value)
        codec.check_size(self.payload, conf.get().MAX_CHUNK_BYTES)

    def check_new(self) -> None:
        """Raise `ChunkImmutable`, `ManagedField` or `InvalidPayload` unless this chunk can be appended."""
        if not self._state.adding:
            raise ChunkImmutable(f"Chunk {self} is stored and never changes: append a new one.")
        if self.offset is not None:
            raise ManagedField(
                f"Offset {self.offset} was given, but an append takes its offset from the stream; "
                "use append(…, expected_offset=…) to require one."
            )
        if self._encoded is None or self.payload is not self._encoded:
            self.payload = self._encoded = codec.check_payload(self.stream.content_type, self.payload)
        codec.check_size(self.payload, conf.get().MAX_CHUNK_BYTES)
