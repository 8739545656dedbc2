"""A visitor's websocket to a consumer in this process, without a server between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, Self

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from channels.routing import URLRouter
from django.db import connection, connections, transaction
from django.urls import re_path

from django_pgstreams import hub
from django_pgstreams.routing import websocket_urlpatterns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from django_pgstreams.consumers import StreamConsumer
    from django_pgstreams.models import Stream

SOCKET_TASKS = {"pgstreams-heartbeat", "pgstreams-subscription", "pgstreams-cancel"}
DEADLINE_SECONDS = 20.0
_POLL_SECONDS = 0.01

# Streams -------------------------------------------------------------------------------------------------


async def append(stream: Stream, *values: Any, **options: Any) -> None:
    await stream.aappend_many(values, **options)


@sync_to_async
def execute(statement: str, *parameters: object) -> None:
    """Run plain SQL."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)


@sync_to_async
def trim(stream: Stream, first: int) -> None:
    """Remove the chunks before `first`, as retention will: counter and chunks in one transaction."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "UPDATE pgstreams_stream SET first_offset = greatest(first_offset, %s) WHERE id = %s",
            [first, stream.pk],
        )
        cursor.execute(
            'DELETE FROM pgstreams_chunk WHERE stream_id = %s AND "offset" < %s', [stream.pk, first]
        )


def lock_chunks() -> None:
    """Make every read of chunks wait for the end of this transaction."""
    with connection.cursor() as cursor:
        cursor.execute("LOCK TABLE pgstreams_chunk IN ACCESS EXCLUSIVE MODE")


@contextlib.asynccontextmanager
async def held(work: Callable[[], object]) -> AsyncIterator[None]:
    """A transaction of another connection that has done some work, and stays open inside."""
    done, may_end = threading.Event(), threading.Event()

    def run() -> None:
        try:
            with transaction.atomic():
                work()
                done.set()
                may_end.wait(DEADLINE_SECONDS)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert await asyncio.to_thread(done.wait, DEADLINE_SECONDS)
        yield
    finally:
        may_end.set()
        await asyncio.to_thread(thread.join)


# Sockets -------------------------------------------------------------------------------------------------


async def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition()`; fails when the deadline passes before."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"Waited {DEADLINE_SECONDS:g} s in vain: {what}."
        await asyncio.sleep(_POLL_SECONDS)
    return value


def urls(consumer: type[StreamConsumer]) -> URLRouter:
    """The app's websocket URLs, with another consumer."""
    return URLRouter(
        [re_path(known.pattern.regex.pattern, consumer.as_asgi()) for known in websocket_urlpatterns]
    )


class Visit:
    """One websocket; `user` is who the session says. What is read as a frame is acknowledged at once."""

    def __init__(
        self,
        path: str = "/ws/streams/",
        user: Any = None,
        *,
        consumer: type[StreamConsumer] | None = None,
        subprotocols: list[str] | None = None,
        acknowledges: bool = True,
    ) -> None:
        routes = URLRouter(websocket_urlpatterns) if consumer is None else urls(consumer)
        path, _, query_string = path.partition("?")
        scope = {
            "type": "websocket",
            "path": urllib.parse.unquote(path),
            "query_string": query_string.encode(),
            "headers": [],
            "subprotocols": subprotocols or [],
        }
        if user is not None:
            scope["user"] = user
        # Not the one of Channels, which keeps connections from being closed.
        self.communicator = ApplicationCommunicator(routes, scope)
        self.subprotocol: str | None = None
        self._acknowledges = acknowledges

    async def __aenter__(self) -> Self:
        await self.communicator.send_input({"type": "websocket.connect"})
        accepted = await self.message()
        assert accepted["type"] == "websocket.accept"
        self.subprotocol = accepted["subprotocol"]
        return self

    async def __aexit__(self, *raised: object) -> None:
        if not self.communicator.future.done():
            await self.leave()

    async def leave(self) -> None:
        """End as a browser does, and wait until the consumer has ended; raises what it raised."""
        await self.communicator.send_input({"type": "websocket.disconnect", "code": 1001})
        await self.communicator.wait(DEADLINE_SECONDS)

    async def send(self, kind: str, stream: str, **fields: Any) -> None:
        await self.send_text(json.dumps({"type": kind, "stream": stream, **fields}))

    async def send_text(self, text: str) -> None:
        await self.communicator.send_input({"type": "websocket.receive", "text": text})

    async def send_bytes(self, data: bytes) -> None:
        await self.communicator.send_input({"type": "websocket.receive", "bytes": data})

    async def message(self) -> dict[str, Any]:
        """What the consumer sends next, as the server gets it."""
        return await self.communicator.receive_output(DEADLINE_SECONDS)

    async def text(self) -> str:
        """The next frame, undecoded; fails when the socket is closed instead."""
        message = await self.message()
        assert message["type"] == "websocket.send", message
        return message["text"]

    async def frame(self) -> dict[str, Any]:
        frame = json.loads(await self.text())
        if frame["type"] == "chunks" and self._acknowledges:
            await self.send("ack", frame["stream"], offset=frame["next"])
        return frame

    async def frames(self, last: str) -> list[dict[str, Any]]:
        """The next frames, up to the first of a type."""
        found = [await self.frame()]
        while found[-1]["type"] != last:
            found.append(await self.frame())
        return found

    async def data(self, count: int) -> list[Any]:
        """The next values of the one stream that is followed; each frame goes on where the last one ended."""
        values: list[Any] = []
        position = None
        while len(values) < count:
            frame = await self.frame()
            if frame["type"] == "chunks":
                assert position in (None, frame["offset"])
                assert frame["next"] == frame["offset"] + len(frame["data"])
                position = frame["next"]
                values += frame["data"]
            else:
                assert frame["type"] in ("subscribed", "live"), frame
        return values

    async def close_code(self) -> int:
        """The code that the socket is closed with; fails when a frame comes instead."""
        message = await self.message()
        assert message["type"] == "websocket.close", message
        return message["code"]


def followers() -> int:
    """How many followers this loop's hub has."""
    return hub.get("default").followers


def tasks() -> set[str]:
    """The names of this loop's tasks that work for one socket; the hub's reads are for all."""
    return SOCKET_TASKS & {task.get_name() for task in asyncio.all_tasks()}
