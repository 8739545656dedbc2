"""`StreamConsumer`: websockets that follow streams, protocol `pgstreams.v1`.

Invariant: not a byte of a stream leaves before `has_permission` has allowed it, a stream that is unknown looks
like one that is forbidden, and whatever ends the socket ends its subscriptions. No channel layer is used.

Close codes: 1000 after the end of the one stream of a one-stream URL, 1011 for a failure here, 4400 for a URL that
cannot be understood, 4403 for a stream that this user may not see or that does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import parse_qs

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.contrib.auth.models import AnonymousUser
from django.db import router

from . import codec, conf, hub, keys, permissions, wire
from .exceptions import InvalidKey, StreamBusy, StreamClosed, StreamMissing
from .follower import Chunks, Closed, Event, Gap, Live, Reset
from .models import Stream
from .wire import BadFrame, ClientFrame

logger = logging.getLogger(__name__)

CLOSE_ENDED = 1000
CLOSE_FAILED = 1011
CLOSE_BAD_REQUEST = 4400
CLOSE_REFUSED = 4403

_MAX_CLIENT_FRAME_CHARACTERS = 64 * 1024
_REFUSED = "This stream does not exist, or you may not see it."


class _Subscribed:
    """One stream followed over this socket."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.sent = 0  # the position after the last chunk that was sent
        self.acked = 0  # the position that the client has acknowledged


class StreamConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]
    """Follows many streams over one socket, or the one that the URL names.

    Override `get_stream` to find streams in another way, and `has_permission` to decide in code instead of by
    the hook.
    """

    # The app wakes its consumers itself: a configured channel layer is left alone, and none is needed.
    channel_layer_alias = None

    async def get_stream(self, key: str) -> Stream | None:
        """The stream of a key, or None. Raising refuses."""
        streams = Stream.objects.using(router.db_for_write(Stream))
        return await database_sync_to_async(streams.filter(key=key).first)()

    async def has_permission(self, stream: Stream, action: str) -> bool:
        """Whether the socket's user may `"view"` or `"cancel"` a stream. Only True allows; raising refuses.

        Also called, its answer ignored, with an unsaved stream where the key is unknown.
        """
        user = self.scope.get("user") or AnonymousUser()
        return await permissions.allowed(user, stream, action)

    # The socket's life -----------------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._subscriptions: dict[str, _Subscribed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone = False
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stop()

    async def connect(self) -> None:
        """Accept, so that a refusal can reach the page as a close code, and subscribe if the URL says so."""
        offered = self.scope.get("subprotocols") or []
        await self.accept(wire.SUBPROTOCOL if wire.SUBPROTOCOL in offered else None)
        self._spawn(self._beat(), "pgstreams-heartbeat")
        route = self.scope.get("url_route") or {"kwargs": {}}
        self._only = route["kwargs"].get("key")
        if self._only is not None:
            try:
                frame = _frame_of_url(self._only, self.scope.get("query_string", b""))
            except (BadFrame, InvalidKey) as error:
                await self._error("bad_request", str(error))
                await self.close(CLOSE_BAD_REQUEST)
                return
            await self._subscribe(frame)

    async def disconnect(self, code: int) -> None:
        """End what this socket follows."""
        await self._stop()

    async def _stop(self) -> None:
        self._gone = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(conf.get().HEARTBEAT_SECONDS)
            await self.send(text_data=wire.frame("ping"))

    async def _error(self, code: str, message: str, stream: str | None = None) -> None:
        await self.send(text_data=wire.frame("error", stream, code=code, message=message))

    # Frames from the client ------------------------------------------------------------------------

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Act on one frame; one that is malformed is answered with an error frame."""
        try:
            if text_data is None:
                raise BadFrame("Frames are JSON text; this one is binary.")
            if len(text_data) > _MAX_CLIENT_FRAME_CHARACTERS:
                raise BadFrame(f"A frame has at most {_MAX_CLIENT_FRAME_CHARACTERS:,} characters.")
            frame = wire.parse(text_data)
        except BadFrame as error:
            await self._error("bad_frame", str(error))
        except InvalidKey as error:
            await self._error("bad_key", str(error))
        else:
            handlers: dict[str, Callable[[ClientFrame], Awaitable[None]]] = {
                "subscribe": self._subscribe,
                "ack": self._ack,
                "unsubscribe": self._unsubscribe,
                "cancel": self._cancel,
            }
            await handlers[frame.type](frame)

    async def _subscribe(self, frame: ClientFrame) -> None:
        if frame.stream in self._subscriptions:
            await self._error(
                "already_subscribed", "Unsubscribe first to read from elsewhere.", frame.stream
            )
            return
        if len(self._subscriptions) >= conf.get().MAX_SUBSCRIPTIONS:
            await self._error(
                "too_many",
                f"A socket follows at most {len(self._subscriptions)} streams.",
                frame.stream,
            )
            return
        subscribed = self._subscriptions[frame.stream] = _Subscribed()
        subscribed.task = self._spawn(self._serve(frame, subscribed), "pgstreams-subscription")

    async def _ack(self, frame: ClientFrame) -> None:
        subscribed = self._subscriptions.get(frame.stream)
        if subscribed is None or not isinstance(frame.offset, int):
            return  # the last chunks are acknowledged after the end
        if frame.offset > subscribed.sent:
            await self._error(
                "bad_ack",
                f"Position {frame.offset} was not sent yet, only {subscribed.sent}.",
                frame.stream,
            )
            return
        subscribed.acked = max(subscribed.acked, frame.offset)

    async def _unsubscribe(self, frame: ClientFrame) -> None:
        subscribed = self._subscriptions.pop(frame.stream, None)
        if subscribed is not None and subscribed.task is not None:
            subscribed.task.cancel()
            await asyncio.wait([subscribed.task])

    async def _cancel(self, frame: ClientFrame) -> None:
        self._spawn(self._cancel_stream(frame.stream), "pgstreams-cancel")

    async def _cancel_stream(self, key: str) -> None:
        stream = await self._admit(key, "cancel")
        if stream is None:
            await self._error("forbidden", _REFUSED, key)
            return
        try:
            await database_sync_to_async(stream.cancel)("cancelled by a reader")
        except StreamBusy as error:
            await self._error("busy", str(error), key)
        except (StreamClosed, StreamMissing):
            await self._error("closed", "The stream has ended already.", key)
        except Exception:
            logger.exception("Stream %r could not be cancelled", key)
            await self._error("internal", "The stream could not be cancelled; try again.", key)

    async def _admit(self, key: str, action: str) -> Stream | None:
        """The stream, if it exists and the user may do this with it."""
        try:
            stream = await self.get_stream(key)
            # Asked for unknown keys too: a refusal takes the same time either way.
            allowed = await self.has_permission(stream or Stream(key=key), action)
        except Exception:
            logger.exception("Access to stream %r could not be checked; it is refused", key)
            return None
        return stream if allowed is True else None

    # One subscription ------------------------------------------------------------------------------

    async def _serve(self, frame: ClientFrame, subscribed: _Subscribed) -> None:
        key = frame.stream
        try:
            code = await self._follow(frame, subscribed)
        except Exception:
            if self._gone:
                return
            logger.exception("Stream %r could not be served", key)
            code = CLOSE_FAILED
            with contextlib.suppress(Exception):  # the socket itself may be what failed
                await self._error("internal", "The stream could not be read; try again.", key)
        finally:
            if self._subscriptions.get(key) is subscribed:
                del self._subscriptions[key]
        if self._only is not None:
            with contextlib.suppress(Exception):
                await self.close(code)

    async def _follow(self, frame: ClientFrame, subscribed: _Subscribed) -> int:
        """Send a stream's frames until its end; returns the close code for a socket of one stream."""
        key = frame.stream
        stream = await self._admit(key, "view")
        if stream is None:
            await self._error("forbidden", _REFUSED, key)
            return CLOSE_REFUSED
        position = hub.start(stream, frame.offset)
        using = router.db_for_write(Stream, instance=stream)
        follower = hub.get(using).follow(stream.pk, position, frame.epoch or stream.epoch)
        try:
            subscribed.sent = position
            await self.send(text_data=_subscribed_frame(stream, position))
            while True:
                event = await follower.next()
                await self._send_event(key, stream.content_type, event, subscribed)
                if isinstance(event, Closed):
                    return CLOSE_ENDED
                await asyncio.sleep(
                    0
                )  # a server may send without ever yielding; others want their turn
        finally:
            follower.close()

    async def _send_event(
        self, key: str, content_type: str, event: Event, subscribed: _Subscribed
    ) -> None:
        match event:
            case Chunks(chunks):
                texts = [codec.splice(content_type, chunk.payload) for chunk in chunks]
                frames = wire.chunk_frames(key, chunks[0].offset, texts, conf.get().MAX_FRAME_BYTES)
                for text, position in frames:
                    subscribed.sent = position  # before the send: the acknowledgement may be quick
                    await self.send(text_data=text)
            case Live(offset):
                await self.send(text_data=wire.frame("live", key, offset=offset))
            case Gap(requested, first):
                subscribed.sent = first
                await self.send(text_data=wire.frame("gap", key, requested=requested, first=first))
            case Reset(epoch):
                subscribed.sent = subscribed.acked = 0
                await self.send(text_data=wire.frame("reset", key, epoch=epoch))
            case Closed(offset, state, reason):
                await self.send(
                    text_data=wire.frame("closed", key, offset=offset, state=state, reason=reason)
                )


def _frame_of_url(key: str, query_string: bytes) -> ClientFrame:
    """The subscription that a one-stream URL asks for. Raises `BadFrame`, `InvalidKey`."""
    keys.check_key(key)
    try:
        query = parse_qs(query_string.decode())
    except UnicodeDecodeError as error:
        raise BadFrame(f"The query string is not UTF-8: {error}.") from error
    given = query.get("offset", ["0"])[-1]
    offset: int | str = given
    if given != wire.TAIL:
        try:
            offset = int(given)
        except ValueError as error:
            raise BadFrame(f'offset is a whole number or "tail", not {given[:60]!a}.') from error
    epoch = query.get("epoch", [None])[-1]
    return ClientFrame("subscribe", key, wire.check_start(offset), epoch)


def _subscribed_frame(stream: Stream, position: int) -> str:
    return wire.frame(
        "subscribed",
        stream.key,
        epoch=stream.epoch,
        offset=position,
        first=stream.first_offset,
        tail=stream.next_offset,
        state=stream.state,
        content_type=stream.content_type,
    )
