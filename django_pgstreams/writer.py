"""`StreamWriter`: appends at full speed, beside the caller's transaction.

Invariant: an offset is returned once its chunk is committed, and the appends of one writer keep their order.
All writers of a process share one thread and one connection per database (`committer`): while one batch
commits, the next one gathers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime
import operator
import threading
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Self, cast

from django.db import connections, router, transaction

from . import codec, committer, conf, piping, signals
from .exceptions import PGStreamsError, StreamClosed, StreamMissing
from .models import Stream
from .pending import Append, End


class StreamWriter:
    """Appends to one stream; `with` or `async with`. Leaving the block waits for what is pending.

    Not part of the caller's transaction: what it has stored stays when that rolls back. Any number of threads
    and tasks may use one, and many may write to one stream.
    """

    def __init__(self, stream: Stream, *, using: str | None = None) -> None:
        """`using` is a database alias; else the router's choice for writing the stream."""
        if not isinstance(stream, Stream):
            raise TypeError(f"A StreamWriter needs a Stream, not {type(stream).__name__}.")
        if stream.pk is None:
            raise ValueError(f"Stream {stream.key!r} must be saved before a StreamWriter can append to it.")
        self.stream = stream
        self._stream_id: int = stream.pk  # deleting the stream takes it from the instance
        self._key = stream.key
        self._content_type = stream.content_type
        self._using = using or router.db_for_write(Stream, instance=stream)
        self._max_chunk_bytes = conf.get().MAX_CHUNK_BYTES
        self._failures = 0
        self._first_failure: BaseException | None = None

    # Appending -------------------------------------------------------------------------------------

    def append(self, data: Any, *, expected_offset: int | None = None) -> int:
        """Append a value and return its offset, once it is committed.

        `expected_offset` stores it only if that is the tail (else `OffsetConflict`). Raises `InvalidPayload`,
        `StreamClosed`, `StreamMissing`, `StreamBusy`, `AppendFailed`: nothing is stored then; and
        `AppendUnknown`. Inside `atomic()` it raises `TransactionManagementError`: it would wait for what its
        own transaction holds.
        """
        self._refuse_in_transaction()
        reply = _Reply()
        self._add(data, reply, None, expected_offset)
        offset: int = reply.wait()
        return offset

    def append_nowait(
        self, data: Any, *, expected_offset: int | None = None
    ) -> concurrent.futures.Future[int]:
        """Append a value without waiting; a future of its offset, with the errors of `append`.

        Raises `InvalidPayload`, and `WriterFull` when too much is pending. The future cannot be cancelled.
        """
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        future.add_done_callback(self._note_failure)
        self._add(data, future, None, expected_offset, waits=False)
        return future

    async def aappend(self, data: Any, *, expected_offset: int | None = None) -> int:
        """Async twin of `append`. When its caller is cancelled the value is stored all the same, unless
        `WRITER_MAX_PENDING_BYTES` kept it waiting for room."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        self._add(data, future, loop, expected_offset)
        return await future

    def _add(
        self,
        data: Any,
        reply: Any,
        loop: asyncio.AbstractEventLoop | None = None,
        expected_offset: int | None = None,
        waits: bool = True,
    ) -> None:
        if expected_offset is not None and abs(operator.index(expected_offset)) > _MAX_OFFSET:
            raise ValueError(f"expected_offset must be an offset, not {expected_offset}.")
        payload = codec.encode(self._content_type, data)
        codec.check_size(payload, self._max_chunk_bytes)
        append = Append(self._stream_id, self._key, payload, reply, loop, expected_offset)
        committer.add(self._using, append, waits)

    def _note_failure(self, future: concurrent.futures.Future[int]) -> None:
        error = future.exception()
        if error is not None:
            self._failures += 1
            self._first_failure = self._first_failure or error

    def _refuse_in_transaction(self) -> None:
        """As `atomic(durable=True)` does, which lets the transactions of `TestCase` pass."""
        connection = connections[self._using]
        if connection.in_atomic_block and not getattr(connection.atomic_blocks[-1], "_from_testcase", False):
            raise transaction.TransactionManagementError(
                f"A StreamWriter does not wait inside atomic() on {self._using!r}: it is not part of that "
                "transaction. Use stream.append(), which is, or append outside of it."
            )

    # The block -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._refuse_in_transaction()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        reply = _Reply()
        self._send(None, reply)
        reply.wait()
        self._raise_failures(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._send(None, future, loop)
        await future
        self._raise_failures(error)

    def _send(self, end: End | None, reply: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Send a marker, which is answered once everything before it is, or the stream's end."""
        committer.add(self._using, Append(self._stream_id, self._key, None, reply, loop, None, end))

    def _raise_failures(self, error: BaseException | None) -> None:
        """Raise the first append without a caller that failed, unless the block has failed itself."""
        first, self._first_failure = self._first_failure, None
        failures, self._failures = self._failures, 0
        if first is not None and error is None:
            if failures > 1:
                first.add_note(f"{failures - 1} later appends failed as well.")
            raise first

    # Piping ----------------------------------------------------------------------------------------

    def pipe(
        self, iterable: Iterable[Any], *, join_seconds: float | None = None, join_bytes: int | None = None
    ) -> None:
        """Append everything that an iterator yields, then end the stream.

        It is completed; or, when the iterator raises, failed with that error as the reason, which readers
        see, and the error is raised on. With `join_seconds`, `join_bytes` or both, consecutive strings (or
        bytes) are joined until the first of them is that old, or they are that long. When somebody cancels
        the stream, the iterator is closed and `pipe` returns: `stream.state` tells. Errors as for `append`.
        """
        self._refuse_in_transaction()
        flow = self._flow(self._submit, _start_timer, join_seconds, join_bytes)
        iterator: Any = None
        try:
            iterator = iter(iterable)
            for piece in iterator:
                flow.push(piece)
                self._wait(flow, all_of_them=committer.is_full(self._using))
            flow.flush()
            self._wait(flow, all_of_them=True)
            self._end(_COMPLETED)
        except piping.Failed as failed:
            flow.stop()
            if not self._is_over(failed.error):
                with contextlib.suppress(piping.Failed):
                    self._end(_failed(failed.error))
            if not self._is_cancelled(failed.error):
                raise failed.error from None
        except BaseException as error:
            flow.flush()
            flow.stop()
            with contextlib.suppress(piping.Failed):
                self._end(_failed(error))
            raise
        finally:
            if hasattr(iterator, "close"):
                iterator.close()

    async def apipe(
        self,
        aiterable: AsyncIterable[Any],
        *,
        join_seconds: float | None = None,
        join_bytes: int | None = None,
    ) -> None:
        """Async twin of `pipe`. When its task is cancelled, the stream fails."""
        loop = asyncio.get_running_loop()
        flow = self._flow(self._submit_to_loop, loop.call_later, join_seconds, join_bytes)
        iterator: Any = None
        try:
            iterator = aiter(aiterable)
            async for piece in iterator:
                flow.push(piece)
                await self._await(flow, all_of_them=committer.is_full(self._using))
            flow.flush()
            await self._await(flow, all_of_them=True)
            await self._aend(_COMPLETED)
        except piping.Failed as failed:
            flow.stop()
            if not self._is_over(failed.error):
                with contextlib.suppress(piping.Failed):
                    await self._aend(_failed(failed.error))
            if not self._is_cancelled(failed.error):
                raise failed.error from None
        except BaseException as error:
            flow.flush()
            flow.stop()
            with contextlib.suppress(piping.Failed):
                await self._aend(_failed(error))
            raise
        finally:
            if hasattr(iterator, "aclose"):
                await iterator.aclose()

    def _flow(
        self, send: Any, start_timer: Any, join_seconds: float | None, join_bytes: int | None
    ) -> piping.Flow:
        return piping.Flow(
            send,
            start_timer,
            join_seconds=join_seconds,
            join_bytes=join_bytes,
            max_chunk_bytes=self._max_chunk_bytes,
        )

    def _submit(self, data: Any) -> concurrent.futures.Future[int]:
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        self._add(data, future)
        return future

    def _submit_to_loop(self, data: Any) -> asyncio.Future[int]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        self._add(data, future, loop)
        return future

    def _wait(self, flow: piping.Flow, *, all_of_them: bool) -> None:
        while (reply := flow.wait_for(all_of_them=all_of_them)) is not None:
            concurrent.futures.wait([cast("concurrent.futures.Future[int]", reply)])
            flow.settle()

    async def _await(self, flow: piping.Flow, *, all_of_them: bool) -> None:
        while (reply := flow.wait_for(all_of_them=all_of_them)) is not None:
            await asyncio.wait([cast("asyncio.Future[int]", reply)])
            flow.settle()

    def _end(self, end: End) -> None:
        """End the stream after what is pending. Raises `piping.Failed`."""
        reply = _Reply()
        self._send(end, reply)
        try:
            self._take_end(end, reply.wait())
        except PGStreamsError as error:
            raise piping.Failed(error) from error
        signals.stream_closed.send_robust(sender=Stream, stream=self.stream, using=self._using)

    async def _aend(self, end: End) -> None:
        """Async twin of `_end`; a caller that is cancelled once more does not take the end back."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._send(end, future, loop)
        try:
            self._take_end(end, await asyncio.shield(future))
        except PGStreamsError as error:
            raise piping.Failed(error) from error
        await signals.stream_closed.asend_robust(sender=Stream, stream=self.stream, using=self._using)

    def _take_end(self, end: End, ended: tuple[int, datetime.datetime]) -> None:
        stream = self.stream
        stream.next_offset, stream.closed_at = ended
        stream.state, stream.reason = end

    def _is_over(self, error: Exception) -> bool:
        """Whether somebody else has ended the stream; the instance is told."""
        if isinstance(error, StreamClosed):
            self.stream.state, self.stream.reason = error.state, error.reason
        return isinstance(error, StreamClosed | StreamMissing)

    def _is_cancelled(self, error: Exception) -> bool:
        return isinstance(error, StreamClosed) and error.state == Stream.State.CANCELLED


class _Reply:
    """What a blocked thread waits for: lighter than a future."""

    __slots__ = ("_error", "_lock", "_result")

    def __init__(self) -> None:
        committer.refuse_in_own_thread()
        self._lock = threading.Lock()
        self._lock.acquire()
        self._error: Exception | None = None
        self._result: Any = None

    def set_result(self, result: Any) -> None:
        self._result = result
        self._lock.release()

    def set_exception(self, error: Exception) -> None:
        self._error = error
        self._lock.release()

    def wait(self) -> Any:
        """Block until there is a result, and return it, or raise the error."""
        self._lock.acquire()
        if self._error is not None:
            raise self._error
        return self._result


_MAX_OFFSET = 2**63 - 1
_MAX_REASON_CHARACTERS = 1000
_COMPLETED = End(Stream.State.COMPLETED, "")


def _failed(error: BaseException) -> End:
    """The end of a stream whose source failed."""
    if isinstance(error, asyncio.CancelledError):
        return End(Stream.State.FAILED, "The task that wrote it was cancelled.")
    name, text = type(error).__name__, str(error)
    reason = f"{name}: {text}" if text else name
    return End(Stream.State.FAILED, codec.storable_text(reason[:_MAX_REASON_CHARACTERS]))


def _start_timer(seconds: float, function: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer
