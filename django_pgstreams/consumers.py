"""`StreamConsumer`: websockets that follow streams, protocol `pgstreams.v1`.

Invariant: not a byte of a stream leaves before `has_permission` has allowed it, a stream that is unknown
looks like one that is forbidden, and whatever ends the socket ends its subscriptions (`sockets`).

Close codes: 1000 after the end of the one stream of a one-stream URL; 4500 for a failure here, worth another
try; 4400 for a URL, or many frames in a row, that cannot be understood; 4403 for a stream that this user may
not see or that does not exist; 4408 for a client that takes nothing for too long, and may come back; 4422 for
a chunk that cannot be sent, on the URL of one stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.models import AnonymousUser
from django.db import InterfaceError, OperationalError, close_old_connections, router

from . import conf, hub, lookups, permissions, turns, wire
from .exceptions import InvalidKey, StreamBusy, StreamClosed, StreamMissing
from .flow import Flow
from .follower import Chunks, Closed, Event, Gap, Live, Reset
from .models import Stream
from .pages import Run
from .sockets import CLOSE_FAILED, Socket
from .wire import BadFrame, ClientFrame

logger = logging.getLogger(__name__)

CLOSE_ENDED = 1000
CLOSE_BAD_REQUEST = 4400
CLOSE_REFUSED = 4403
CLOSE_STALLED = 4408
CLOSE_UNREADABLE = 4422

MAX_BAD_FRAMES = 20
"""So many frames in a row that cannot be understood close the socket. No sound client sends them, and one
that reads nothing would have the server hold an answer to each."""

_MAX_REASON_CHARACTERS = 4000
_REFUSED = "This stream does not exist, or you may not see it."
_CANCEL_REFUSED = "This stream does not exist, or you may not cancel it."
_STALLED = "Nothing was acknowledged for too long; come back with the last position."
_UNAVAILABLE = "Streams cannot be looked up now; try again."


class _Unavailable(Exception):
    """Whether the user may have the stream cannot be said now: the database is away."""


class _Unreadable(Exception):
    """A stored chunk cannot be put into a frame; the message is for the client."""

    def __init__(self, chunk: wire.Unreadable) -> None:
        super().__init__(chunk.message)
        self.next = chunk.next


class _Stalled(Exception):
    """The client has acknowledged nothing for too long, though it has all that it may have until it does."""


class _Subscribed:
    """One stream followed over this socket."""

    def __init__(self, key: str, offset: int | str) -> None:
        settings = conf.get()
        self.key = key
        self.content_type = ""  # once the stream is known
        self.max_frame_bytes = settings.MAX_FRAME_BYTES
        self.task: asyncio.Task[None] | None = None
        # A client may acknowledge where it starts at once.
        self.flow = Flow(max(0, offset) if isinstance(offset, int) else 0, settings.MAX_UNACKED_BYTES)
        self.acknowledged: asyncio.Event | None = None  # what waits for room waits for this

    async def room(self, size_bytes: int) -> None:
        """Wait until there is room for a frame of this size. Raises `_Stalled`."""
        while not self.flow.has_room(size_bytes):
            self.acknowledged = asyncio.Event()
            try:
                async with asyncio.timeout(conf.get().STALL_SECONDS):
                    await self.acknowledged.wait()
            except TimeoutError:
                raise _Stalled from None


class StreamConsumer(Socket):
    """Follows many streams over one socket, or the one that the URL names.

    Override `get_stream` to find streams in another way, and `has_permission` to decide in code instead of by
    the hook.
    """

    async def get_stream(self, key: str) -> Stream | None:
        """The stream of a key, or None. Raising refuses: with 4500 if the database is away, else for good."""
        return await lookups.stream(key, router.db_for_write(Stream))

    async def has_permission(self, stream: Stream, action: str) -> bool:
        """Whether the socket's user may `"view"` or `"cancel"` a stream. Only True allows; raising refuses.

        Also called, its answer ignored, with an unsaved stream where the key is unknown.
        """
        user = self.scope.get("user") or AnonymousUser()
        return await permissions.allowed(user, stream, action)

    # The socket's life -----------------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._subscriptions: dict[str, _Subscribed] = {}
        self._cancelling: set[str] = set()
        self._bad_frames = 0  # in a row
        self._only: str | None = None  # the key of a one-stream URL
        await super().__call__(scope, receive, send)

    async def connect(self) -> None:
        """Accept, so that a refusal can reach the page as a close code, and subscribe if the URL says so."""
        offered = self.scope.get("subprotocols") or []
        await self.accept(wire.SUBPROTOCOL if wire.SUBPROTOCOL in offered else None)
        self._spawn(self._beat(), "pgstreams-heartbeat")
        route = self.scope.get("url_route")
        self._only = route["kwargs"].get("key") if route else None
        if self._only is not None:
            try:
                frame = wire.parse_url(self._only, self.scope.get("query_string", b""))
            except (BadFrame, InvalidKey) as error:
                await self._error("bad_request", str(error))
                await self.close(CLOSE_BAD_REQUEST)
                return
            await self._subscribe(frame)

    async def _beat(self) -> None:
        """Send pings; where the server waits for the client to read, they show that it does not."""
        while True:
            await asyncio.sleep(conf.get().HEARTBEAT_SECONDS)
            try:
                async with asyncio.timeout(conf.get().STALL_SECONDS):
                    await self.send(wire.frame("ping"))
            except TimeoutError:
                logger.info("A client that does not read is disconnected")
                await self.close(CLOSE_STALLED)
                return

    async def _error(self, code: str, message: str, about: ClientFrame | None = None, **more: int) -> None:
        """Send an error about what a frame asked for; without one, about what was not understood."""
        stream, request = (None, {}) if about is None else (about.stream, {"request": about.type})
        await self.send(wire.frame("error", stream, **request, code=code, message=message, **more))

    # Frames from the client ------------------------------------------------------------------------

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Act on one frame; one that is malformed is answered with an error frame, up to `MAX_BAD_FRAMES`."""
        if self._over:
            return
        try:
            frame = wire.parse(text_data)
        except BadFrame as error:
            await self._error("bad_frame", str(error))
            await self._count_bad_frame()
        except InvalidKey as error:
            await self._error("bad_key", str(error))
            await self._count_bad_frame()
        else:
            self._bad_frames = 0
            handlers: dict[str, Callable[[ClientFrame], Awaitable[None]]] = {
                "subscribe": self._subscribe,
                "ack": self._ack,
                "unsubscribe": self._unsubscribe,
                "cancel": self._cancel,
            }
            await handlers[frame.type](frame)

    async def _count_bad_frame(self) -> None:
        self._bad_frames += 1
        if self._bad_frames >= MAX_BAD_FRAMES:
            logger.info("A client that cannot be understood is disconnected: %s", self._who())
            await self.close(CLOSE_BAD_REQUEST)

    async def _subscribe(self, frame: ClientFrame) -> None:
        if frame.stream in self._subscriptions:
            await self._error("already_subscribed", "Unsubscribe first to read from elsewhere.", frame)
            return
        if len(self._subscriptions) >= conf.get().MAX_SUBSCRIPTIONS:
            message = f"A socket follows at most {len(self._subscriptions)} streams."
            await self._error("too_many", message, frame)
            return
        subscribed = self._subscriptions[frame.stream] = _Subscribed(frame.stream, frame.offset)
        subscribed.task = self._spawn(self._serve(frame, subscribed), "pgstreams-subscription")

    async def _ack(self, frame: ClientFrame) -> None:
        subscribed = self._subscriptions.get(frame.stream)
        if subscribed is None or not isinstance(frame.offset, int):
            return  # the last chunks are acknowledged after the end
        flow = subscribed.flow
        if not flow.was_sent(frame.offset):
            message = f"Position {frame.offset} was not sent yet, only {flow.sent}."
            await self._error("bad_ack", message, frame)
        elif flow.acknowledge(frame.offset) and subscribed.acknowledged is not None:
            subscribed.acknowledged.set()

    async def _unsubscribe(self, frame: ClientFrame) -> None:
        subscribed = self._subscriptions.pop(frame.stream, None)
        if subscribed is not None and subscribed.task is not None:
            subscribed.task.cancel()
            await asyncio.wait([subscribed.task])

    async def _cancel(self, frame: ClientFrame) -> None:
        if frame.stream in self._cancelling:
            return  # the answer to the first one is on its way
        if len(self._cancelling) >= conf.get().MAX_SUBSCRIPTIONS:
            await self._error("too_many", "Wait for the other cancellations.", frame)
            return
        self._cancelling.add(frame.stream)
        # Carried out even if the client leaves at once: who presses "stop" may also close the page.
        self._spawn(self._cancel_stream(frame), "pgstreams-cancel", outlives_client=True)

    async def _cancel_stream(self, frame: ClientFrame) -> None:
        key = frame.stream
        try:
            stream = await self._admit(frame, "cancel")
            if stream is None:
                await self._error("forbidden", _CANCEL_REFUSED, frame)
                return
            # In another thread than everybody's look-ups, since it may wait for the stream's writer.
            await sync_to_async(_cancel_now, thread_sensitive=False)(stream)
            logger.info("Cancelled: stream %r, by %s", key, self._who())
        except _Unavailable:
            await self._error("unavailable", _UNAVAILABLE, frame)
        except StreamBusy as error:
            await self._error("busy", str(error), frame)
        except (StreamClosed, StreamMissing):
            await self._error("closed", "The stream has ended already.", frame)
        except Exception:
            logger.exception("Stream %r could not be cancelled", key)
            await self._error("internal", "The stream could not be cancelled; try again.", frame)
        finally:
            self._cancelling.discard(key)

    async def _admit(self, frame: ClientFrame, action: str) -> Stream | None:
        """The stream, if it exists and the user may do this with it. Raises `_Unavailable`.

        Why something is refused is for the log alone.
        """
        key, stream, is_away = frame.stream, None, False
        why = "the check failed"
        try:
            stream = await self.get_stream(key)
            # Asked for unknown keys too: a refusal takes the same time either way.
            allowed = await self.has_permission(stream or Stream(key=key), action)
            why = "no such stream" if stream is None else "" if allowed is True else "no permission"
        except (OperationalError, InterfaceError) as error:
            # Refused all the same, but not for good: a page that reconnects now shall come back.
            logger.warning("Access to stream %r could not be checked: %s", key, error)
            is_away = True
        except Exception:
            logger.exception("Access to stream %r could not be checked; it is refused", key)
        # An override may have used Django's async queries, which keep their connection, even a broken one.
        await turns.give_back()
        if is_away:
            raise _Unavailable
        if why:
            logger.info("Refused: %s, stream %r, by %s (%s)", frame.type, key, self._who(), why)
            return None
        return stream

    def _who(self) -> str:
        """The socket's user, for the log."""
        pk = getattr(self.scope.get("user"), "pk", None)
        return "an anonymous user" if pk is None else f"user {pk}"

    # One subscription ------------------------------------------------------------------------------

    async def _serve(self, frame: ClientFrame, subscribed: _Subscribed) -> None:
        """Follow one stream to its end, or to what keeps it from being followed."""
        key = frame.stream
        try:
            code = await self._follow(frame, subscribed)
        except _Unavailable:
            code = CLOSE_FAILED
            await self._error("unavailable", _UNAVAILABLE, frame)
        except _Unreadable as error:
            code = CLOSE_UNREADABLE
            logger.warning("Stream %r cannot be served on: %s", key, error)
            await self._error("unreadable", str(error), frame, next=error.next)
        except _Stalled:
            code = CLOSE_STALLED
            logger.info("A client that acknowledges nothing of stream %r is disconnected", key)
            await self._error("stalled", _STALLED, frame)
        except Exception:
            code = CLOSE_FAILED
            logger.exception("Stream %r could not be served", key)
            await self._error("internal", "The stream could not be read; try again.", frame)
        finally:
            if self._subscriptions.get(key) is subscribed:
                del self._subscriptions[key]
        if key == self._only or code == CLOSE_STALLED:
            await self.close(code)

    async def _follow(self, frame: ClientFrame, subscribed: _Subscribed) -> int:
        """Send a stream's frames until its end; returns the close code for a socket of one stream."""
        key = frame.stream
        stream = await self._admit(frame, "view")
        if stream is None:
            await self._error("forbidden", _REFUSED, frame)
            return CLOSE_REFUSED
        position = hub.start(stream, frame.offset)
        # "tail" and the last n are places of the stream as it is now, whatever life the client knew.
        known = frame.epoch if position == frame.offset else None
        using = router.db_for_write(Stream, instance=stream)
        follower = hub.get(using).follow(stream.pk, position, known or stream.epoch)
        try:
            subscribed.flow.sent, subscribed.content_type = position, stream.content_type
            await self.send(_subscribed_frame(key, stream, position))
            while True:
                event = follower.poll()
                if event is not None:
                    # A server may take frames without ever yielding; others want their turn.
                    await asyncio.sleep(0)
                while event is None:
                    event = await follower.later()
                if isinstance(event, Chunks):
                    left_bytes = await self._send_chunks(event.chunks, subscribed, alone=follower.is_alone)
                    if left_bytes:
                        # Whoever waits keeps nothing: what found no room is read again.
                        follower.go_back(event.chunks, subscribed.flow.sent)
                        event = None
                        await subscribed.room(left_bytes)
                    continue
                await self._send_event(event, subscribed)
                if isinstance(event, Closed):
                    return CLOSE_ENDED
        finally:
            follower.close()

    async def _send_event(self, event: Event, subscribed: _Subscribed) -> None:
        key = subscribed.key
        match event:
            case Live(offset):
                await self.send(wire.frame("live", key, offset=offset))
            case Gap(requested, first):
                subscribed.flow.skip(first)
                await self.send(wire.frame("gap", key, requested=requested, first=first))
            case Reset(epoch):
                subscribed.flow.restart()
                await self.send(wire.frame("reset", key, epoch=epoch))
            case Closed(offset, state, reason):
                reason = reason[:_MAX_REASON_CHARACTERS]
                await self.send(wire.frame("closed", key, offset=offset, state=state, reason=reason))

    async def _send_chunks(self, chunks: Run, subscribed: _Subscribed, *, alone: bool) -> int:
        """Send chunks as long as there is room; returns the bytes of the first frame for which there is none.

        Raises `_Unreadable` for a chunk that has no place in a frame.
        """
        key = subscribed.key
        made: wire.RunFrames | None = chunks.frames
        if made is None or made.stream != key:
            made = wire.run_frames(key, subscribed.content_type, chunks, subscribed.max_frame_bytes)
            if not alone:
                chunks.frames = made  # once for all who are given the same run, under the same key
        for text, position, size_bytes in made.frames:
            # Before the send: the acknowledgement may be quick.
            if not subscribed.flow.take(position, size_bytes):
                return size_bytes
            await self.send(text)
        if made.unreadable is not None:
            raise _Unreadable(made.unreadable)
        return 0


def _cancel_now(stream: Stream) -> None:
    try:
        stream.cancel("cancelled by a reader")
    finally:
        close_old_connections()  # this thread's: nobody else would


def _subscribed_frame(key: str, stream: Stream, position: int) -> str:
    return wire.frame(
        "subscribed",
        key,
        epoch=stream.epoch,
        offset=position,
        first=stream.first_offset,
        tail=stream.next_offset,
        state=stream.state,
        content_type=stream.content_type,
    )
