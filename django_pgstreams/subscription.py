"""Following a stream from Python: with `for` in any thread, with `async for` in any event loop.

Invariant: `position` is always where to go on: behind the chunk (or batch) that was yielded last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeAlias

from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, router

from . import background, turns
from .exceptions import StreamGap, StreamMissing, StreamReset
from .follower import DELETED, Chunks, Closed, Event, Follower, Gap, Reset
from .models import Chunk, Stream

Follow: TypeAlias = Callable[[str, int, int, str], Awaitable[Follower]]
"""Registers, in the running event loop, a follower of (alias, stream id, position, epoch)."""


class Subscription:
    """A way through a stream. Iterating again goes on from `position`."""

    def __init__(
        self,
        stream: Stream | str,
        offset: int | str,
        *,
        epoch: str | None,
        using: str | None,
        follow: Follow,
    ) -> None:
        self.position: int | str = offset
        """The offset wanted next: after the chunk, or the batch, that was yielded last."""
        self.epoch = epoch
        """The life of the stream that the position belongs to, once iteration has begun."""
        self.state = ""
        """How the stream ended, once it has."""
        self.reason = ""
        """Why it ended."""
        self._stream = stream
        self._using = using
        self._follow = follow
        self._closed = False
        self._stop: Callable[[], object] | None = None  # ends the iteration under way

    def batches(self) -> Batches:
        """The same in lists, as they were read: for `for` and `async for`."""
        return Batches(self)

    def close(self) -> None:
        """End the iteration, from any thread, as if there were no more chunks; `state` stays empty."""
        self._closed = True
        if self._stop is not None:
            self._stop()

    def __iter__(self) -> Iterator[Chunk]:
        for batch in self._batches():
            for chunk in batch:
                self.position = chunk.offset + 1
                yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async with contextlib.aclosing(self._abatches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    self.position = chunk.offset + 1
                    yield chunk
                del batch, chunk

    def _batches(self) -> Iterator[list[Chunk]]:
        """Blocks; the hub of the background loop reads for all threads."""
        if _in_event_loop():
            raise SynchronousOnlyOperation("A plain loop would block this event loop: use `async for`.")
        stream, follower = background.submit(self._begin(self._resolve_apart())).result()
        process = os.getpid()
        pending = None
        try:
            while True:
                _check_process(process)
                pending = background.submit(follower.next())
                chunks = self._take(stream, pending.result())
                if chunks is None:
                    return
                if chunks:
                    yield chunks
        finally:
            if os.getpid() == process:
                if pending is not None:
                    pending.cancel()
                background.loop().call_soon_threadsafe(follower.close)

    async def _abatches(self) -> AsyncGenerator[list[Chunk], None]:
        stream, follower = await self._begin(turns.run(self._resolve))
        try:
            while (chunks := self._take(stream, await follower.next())) is not None:
                if chunks:
                    yield chunks
                # Thousands wait for hours: none keeps what it has passed on.
                del chunks
        finally:
            follower.close()

    def _resolve(self) -> tuple[Stream, int]:
        """The stream as it is now, and the position as a number."""
        given = self._stream
        if isinstance(given, Stream):
            using = self._using or router.db_for_write(Stream, instance=given)
            key, found = given.key, Stream.objects.using(using).filter(pk=given.pk)
        else:
            using = self._using or router.db_for_write(Stream)
            key, found = given, Stream.objects.using(using).filter(key=given)
        stream = found.first()
        if stream is None:
            raise StreamMissing(f"Stream {key!a} does not exist: it was deleted, or is not committed yet.")
        self.epoch = self.epoch or stream.epoch
        self.position = start(stream, self.position)
        return stream, self.position

    async def _resolve_apart(self) -> tuple[Stream, int]:
        """`_resolve` in a thread of the background loop: whoever follows for hours holds no connection.

        Not in asgiref's thread, which may be the one that waits here, and which a forked child does not have.
        """

        def resolve() -> tuple[Stream, int]:
            try:
                return self._resolve()
            finally:
                connections.close_all()

        return await asyncio.to_thread(resolve)

    async def _begin(self, resolved: Awaitable[tuple[Stream, int]]) -> tuple[Stream, Follower]:
        stream, position = await resolved
        using = str(stream._state.db)
        follower = await self._follow(using, stream.pk, position, self.epoch or stream.epoch)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and all in it
                loop.call_soon_threadsafe(follower.close)

        self._stop = stop
        if self._closed:
            follower.close()
        return stream, follower

    def _take(self, stream: Stream, event: Event) -> list[Chunk] | None:
        """The chunks of an event; None at the end; raises where the reader must decide."""
        match event:
            case Chunks(chunks):
                return Chunk.stored(stream, chunks)
            case Closed(_, state, reason):
                if state == DELETED:
                    raise StreamMissing(f"Stream {stream.key!r} was deleted while it was followed.")
                self.state, self.reason = state, reason
                return None
            case Gap(requested, first):
                raise StreamGap(
                    f"Chunks {requested}–{first - 1} of stream {stream.key!r} are no longer stored; "
                    f"subscribe from {first} to go on.",
                    requested=requested,
                    first=first,
                )
            case Reset(epoch):
                raise StreamReset(
                    f"Position {self.position} is not one of stream {stream.key!r} as it is now "
                    f"(epoch {epoch}); subscribe from 0.",
                    epoch=epoch,
                )
        return []


class Batches:
    """The chunks of a subscription in lists."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def __iter__(self) -> Iterator[list[Chunk]]:
        for batch in self._subscription._batches():
            self._subscription.position = batch[-1].offset + 1
            yield batch

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        async with contextlib.aclosing(self._subscription._abatches()) as batches:
            async for batch in batches:
                self._subscription.position = batch[-1].offset + 1
                yield batch
                del batch


def _check_process(process: int) -> None:
    """Raise `RuntimeError` in a child of the process that iterates: what reads for it is not there."""
    if os.getpid() != process:
        raise RuntimeError(
            "This iteration began before the process forked, and goes on in its parent only. "
            "Iterate again: the subscription goes on from its position."
        )


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def start(stream: Stream, offset: int | str) -> int:
    """The position that a start (`wire.check_start`) means for a stream as it was just read."""
    if isinstance(offset, str):
        return stream.next_offset
    if offset < 0:
        return max(stream.first_offset, stream.next_offset + offset)
    return offset
