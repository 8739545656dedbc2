"""`Stream` and `Chunk`, and the managers that keep their invariants on every Django path.

Invariant: counters and state of a stream are written by the app's own statements only (`store`), never from an
instance, which may be stale; and a stored chunk never changes and goes only with its stream.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError, models, router, transaction
from django.db.models.functions import Now
from django.db.models.signals import post_save, pre_save
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from . import codec, conf, keys, signals, store
from .exceptions import ChunkImmutable, InvalidPayload, ManagedField, StreamGap, StreamMissing

MANAGED_FIELDS = frozenset(
    {"next_offset", "first_offset", "epoch", "state", "reason", "appended_at", "closed_at"}
)
_INITIAL = {
    "next_offset": 0,
    "first_offset": 0,
    "state": "open",
    "reason": "",
    "appended_at": None,
    "closed_at": None,
}


def new_epoch() -> str:
    return secrets.token_urlsafe(12)


def _refuse_managed(names: Iterable[str], what: str) -> None:
    managed = sorted(MANAGED_FIELDS.intersection(names))
    if managed:
        raise ManagedField(
            f"{what} cannot write {', '.join(managed)}: only append(), close(), fail() and cancel() do, "
            "because a value from an instance may be stale."
        )


class StreamQuerySet(models.QuerySet["Stream"]):
    """Streams; refuses to write managed fields."""

    def update(self, **kwargs: Any) -> int:
        _refuse_managed(kwargs, "update()")
        if "key" in kwargs:
            keys.check_key(kwargs["key"])
        return super().update(**kwargs)

    def bulk_create(self, objs: Iterable[Stream], *args: Any, **kwargs: Any) -> list[Stream]:
        """Django's, with each stream checked as in `save()`."""
        streams = list(objs)
        _refuse_managed(kwargs.get("update_fields") or (), "bulk_create()")
        for stream in streams:
            stream._check_new()
        return super().bulk_create(streams, *args, **kwargs)


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
        max_length=127,
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
    metadata = models.JSONField(_("metadata"), default=dict, blank=True)
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
    first_offset = models.BigIntegerField(
        _("first offset"), default=0, db_default=0, editable=False
    )
    created_at = models.DateTimeField(_("created"), db_default=Now(), editable=False)
    appended_at = models.DateTimeField(_("last append"), null=True, editable=False)
    closed_at = models.DateTimeField(_("closed"), null=True, editable=False)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True)

    objects = StreamQuerySet.as_manager()

    class Meta:
        verbose_name = _("stream")
        verbose_name_plural = _("streams")
        indexes = [
            models.Index(
                fields=["id"], name="pgstreams_stream_open", condition=models.Q(state="open")
            )
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

        Raises `InvalidKey`, `ManagedField`, and `StreamMissing` if the stream has been deleted since.
        """
        if self._state.adding:
            self._check_new()
            # Not Django's "update, else insert": an update would write the counters of an existing row.
            super().save(force_insert=True, using=using, update_fields=update_fields)
            return
        if update_fields is not None:
            update_fields = set(update_fields)
            _refuse_managed(update_fields, "save(update_fields=…)")
        else:
            kept_back = MANAGED_FIELDS | self.get_deferred_fields()
            update_fields = {
                field.name
                for field in self._meta.concrete_fields
                if not field.primary_key
                and field.attname not in kept_back
                and field.name not in kept_back
            }
        self._check_definition()
        try:
            super().save(force_update=force_update, using=using, update_fields=update_fields)
        except DatabaseError as error:
            if error.__cause__ is not None:
                raise
            raise StreamMissing(
                f"Stream {self.key!r} has been deleted; it was not saved again."
            ) from error

    def _check_definition(self) -> None:
        deferred = self.get_deferred_fields()
        if "key" not in deferred:
            keys.check_key(self.key)
        if "content_type" not in deferred:
            codec.check_content_type(self.content_type)

    def _check_new(self) -> None:
        self._check_definition()
        _refuse_managed(
            (name for name, value in _INITIAL.items() if getattr(self, name) != value),
            "A new stream",
        )

    # Appending and closing -------------------------------------------------------------------------

    def append(
        self, data: Any, *, expected_offset: int | None = None, close: bool = False
    ) -> Chunk:
        """Append one value as part of the caller's transaction, and return its saved chunk.

        `expected_offset` stores only if that is the tail (else `OffsetConflict`); `close` completes the stream in the
        same statement. Raises `InvalidPayload`, `StreamClosed`, `StreamMissing`: nothing is stored then, and the
        transaction stays usable.
        """
        chunk = Chunk(stream=self, data=data)
        chunk.save(using=self._alias(), expected_offset=expected_offset, close=close)
        return chunk

    def append_many(
        self, values: Iterable[Any], *, expected_offset: int | None = None, close: bool = False
    ) -> list[Chunk]:
        """Append values in one go, all or nothing; the offsets are consecutive. Errors as for `append`."""
        chunks = []
        for index, data in enumerate(values):
            try:
                chunks.append(Chunk(stream=self, data=data))
            except InvalidPayload as error:
                raise InvalidPayload(f"Value {index}: {error}") from error
        if chunks or close or expected_offset is not None:
            _insert(self, chunks, self._alias(), expected_offset=expected_offset, close=close)
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
        timeout = (
            conf.get().LOCK_TIMEOUT_SECONDS
            if lock_timeout_seconds is None
            else lock_timeout_seconds
        )
        self._close(self.State.CANCELLED, reason, lock_timeout_seconds=timeout)

    def _close(self, state: str, reason: str, lock_timeout_seconds: float | None = None) -> None:
        using = self._alias()
        self._take(
            store.close(
                using, self.pk, self.key, state, reason, lock_timeout_seconds=lock_timeout_seconds
            )
        )
        signals.stream_closed.send(sender=Stream, stream=self, using=using)

    def _alias(self) -> str:
        return router.db_for_write(Stream, instance=self)

    def _take(self, counters: store.Counters) -> None:
        """Set this instance's managed fields to what the database has."""
        for name, value in counters._asdict().items():
            setattr(self, name, value)

    async def aappend(
        self, data: Any, *, expected_offset: int | None = None, close: bool = False
    ) -> Chunk:
        """Async twin of `append`."""
        return await sync_to_async(self.append)(data, expected_offset=expected_offset, close=close)

    async def aappend_many(
        self, values: Iterable[Any], *, expected_offset: int | None = None, close: bool = False
    ) -> list[Chunk]:
        """Async twin of `append_many`."""
        return await sync_to_async(self.append_many)(
            values, expected_offset=expected_offset, close=close
        )

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

        Ends at the tail as it is when reached; `hub.subscribe` follows it. Raises `StreamGap` when the position was
        trimmed away, `StreamMissing` when the stream is gone, `ValueError` for a negative position.
        """
        if offset < 0:
            raise ValueError(f"A position to read from is 0 or more, not {offset}.")
        position = offset
        while limit is None or position - offset < limit:
            page = self._page(position, None if limit is None else limit - (position - offset))
            if not page:
                return
            yield from page
            position = page[-1].offset + 1

    async def aread(self, offset: int = 0, limit: int | None = None) -> AsyncIterator[Chunk]:
        """Async twin of `read`."""
        chunks = self.read(offset, limit)
        settings_now = conf.get()
        while True:
            page = await sync_to_async(_take_page)(
                chunks, settings_now.PAGE_CHUNKS, settings_now.PAGE_BYTES
            )
            if not page:
                return
            for chunk in page:
                yield chunk

    def _page(self, position: int, limit: int | None) -> list[Chunk]:
        settings_now = conf.get()
        max_chunks = (
            settings_now.PAGE_CHUNKS if limit is None else min(limit, settings_now.PAGE_CHUNKS)
        )
        pages = store.read_pages(
            self._alias(),
            [self.pk],
            [position],
            max_chunks=max_chunks,
            max_bytes=settings_now.PAGE_BYTES,
        )
        page = pages[0]
        if page.row is None:
            raise StreamMissing(
                f"Stream {self.key!r} does not exist: it was deleted or never saved."
            )
        if page.gap_to is not None:
            raise StreamGap(
                f"Chunks {position}–{page.gap_to - 1} of stream {self.key!r} are no longer stored; "
                f"read from {page.gap_to}.",
                requested=position,
                first=page.gap_to,
            )
        return [Chunk.stored(self, *stored) for stored in page.chunks]


# One class for "no such stream", whether Django's lookup or an append finds it out.
Stream.DoesNotExist = StreamMissing  # type: ignore[misc,assignment]


def _take_page(chunks: Iterator[Chunk], max_chunks: int, max_bytes: int) -> list[Chunk]:
    page: list[Chunk] = []
    size = 0
    for chunk in chunks:
        page.append(chunk)
        size += len(chunk.payload)
        if len(page) >= max_chunks or size >= max_bytes:
            break
    return page


class ChunkQuerySet(models.QuerySet["Chunk"]):
    """Chunks; they can be added and read, nothing else."""

    def update(self, **kwargs: Any) -> NoReturn:
        """Refused: `ChunkImmutable`."""
        raise ChunkImmutable("Chunks never change: append a new one instead of update().")

    def delete(self) -> NoReturn:
        """Refused: `ChunkImmutable`."""
        raise ChunkImmutable("Chunks are not deleted one by one: delete their stream.")

    def bulk_create(  # type: ignore[override]
        self,
        objs: Iterable[Chunk],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Collection[str] | None = None,
        unique_fields: Collection[str] | None = None,
    ) -> list[Chunk]:
        """Append chunks to their streams in the order given, all or nothing; offsets are set on the instances.

        Streams are locked in the order of their ids, so parallel calls do not deadlock. Raises as
        `Stream.append` does.
        """
        if ignore_conflicts or update_conflicts:
            raise ChunkImmutable(
                "Chunks never conflict or change: drop ignore_conflicts and update_conflicts."
            )
        chunks = list(objs)
        by_stream: dict[int | None, list[Chunk]] = {}
        for chunk in chunks:
            chunk._check_new()
            by_stream.setdefault(chunk.stream.pk, []).append(chunk)
        self._for_write = True
        with transaction.atomic(using=self.db):
            for pk in sorted(by_stream, key=lambda pk: pk or 0):
                _insert(by_stream[pk][0].stream, by_stream[pk], self.db)
        return chunks


class ChunkManager(models.Manager["Chunk"]):
    """Joins the stream, so that `Chunk.data` never queries."""

    def get_queryset(self) -> ChunkQuerySet:
        return ChunkQuerySet(self.model, using=self._db).select_related("stream")


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
        verbose_name = _("chunk")
        verbose_name_plural = _("chunks")

    def __str__(self) -> str:
        return f"{self.stream_id}:{self.offset}"

    @classmethod
    def stored(cls, stream: Stream, offset: int, payload: bytes, created_at: datetime.datetime) -> Chunk:
        """An instance for a row that was read by the app's own SQL; its time is what Django would give."""
        if timezone.is_aware(created_at):
            utc = created_at.astimezone(datetime.UTC)
            created_at = utc if settings.USE_TZ else timezone.make_naive(utc)
        chunk = cls(stream=stream, offset=offset, payload=payload, created_at=created_at)
        chunk._state.adding = False
        chunk._state.db = stream._state.db
        return chunk

    @property
    def data(self) -> Any:
        """The value that the payload stands for, by the stream's content type."""
        return codec.decode(self.stream.content_type, bytes(self.payload))

    @data.setter
    def data(self, value: Any) -> None:
        if not self._state.adding:
            raise ChunkImmutable(f"Chunk {self} is stored and never changes.")
        self.payload = self._encoded = codec.encode(self.stream.content_type, value)
        _check_size(self.payload)

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
        """Append this new chunk to its stream; see `Stream.append`. A stored chunk raises `ChunkImmutable`."""
        if force_update or update_fields is not None:
            raise ChunkImmutable(f"Chunk {self} never changes: append a new one.")
        self._check_new()
        using = using or router.db_for_write(Chunk, instance=self.stream)
        pre_save.send(sender=Chunk, instance=self, raw=False, using=using, update_fields=None)
        _store(self.stream, [self], using, expected_offset=expected_offset, close=close)
        post_save.send(
            sender=Chunk, instance=self, created=True, raw=False, using=using, update_fields=None
        )
        if close:
            signals.stream_closed.send(sender=Stream, stream=self.stream, using=using)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: `ChunkImmutable`."""
        raise ChunkImmutable(f"Chunk {self} is not deleted on its own: delete its stream.")

    def _check_new(self) -> None:
        if not self._state.adding:
            raise ChunkImmutable(f"Chunk {self} is stored and never changes: append a new one.")
        if self.offset is not None:
            raise ManagedField(
                f"Offset {self.offset} was given, but an append takes its offset from the stream; "
                "use append(…, expected_offset=…) to require one."
            )
        if self.payload is not self._encoded:
            codec.check_payload(self.stream.content_type, bytes(self.payload))
        _check_size(self.payload)


def _check_size(payload: bytes | memoryview) -> None:
    maximum = conf.get().MAX_CHUNK_BYTES
    if len(payload) > maximum:
        raise InvalidPayload(
            f"The payload has {len(payload):,} bytes; PGSTREAMS['MAX_CHUNK_BYTES'] allows {maximum:,}."
        )


def _store(
    stream: Stream,
    chunks: Sequence[Chunk],
    using: str,
    *,
    expected_offset: int | None = None,
    close: bool = False,
) -> None:
    """Store new chunks of one stream and set on all instances what the database gave them."""
    counters = store.append(
        using,
        stream.pk,
        stream.key,
        [bytes(chunk.payload) for chunk in chunks],
        expected_offset=expected_offset,
        close=close,
    )
    first = counters.next_offset - len(chunks)
    for place, chunk in enumerate(chunks):
        chunk.offset = first + place
        chunk.created_at = counters.appended_at
        chunk._state.adding = False
        chunk._state.db = using
        chunk.stream._take(counters)
    stream._take(counters)


def _insert(
    stream: Stream,
    chunks: Sequence[Chunk],
    using: str,
    *,
    expected_offset: int | None = None,
    close: bool = False,
) -> None:
    """`_store`, and the signals of the bulk paths."""
    _store(stream, chunks, using, expected_offset=expected_offset, close=close)
    if chunks:
        signals.chunks_appended.send(sender=Stream, stream=stream, chunks=list(chunks), using=using)
    if close:
        signals.stream_closed.send(sender=Stream, stream=stream, using=using)
