"""`Socket`: the life of one websocket and of the tasks that work for it; knows nothing of streams.

Invariant: whatever ends the socket, in whatever state, ends its tasks; nothing is sent after a close; and a
client that vanishes is no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, ClassVar

from channels.consumer import get_handler_name
from channels.exceptions import StopConsumer
from channels.generic.websocket import AsyncWebsocketConsumer
from channels.sessions import InstanceSessionWrapper

logger = logging.getLogger(__name__)

CLOSE_RESTARTING = 1012
CLOSE_FAILED = 4500  # Daphne refuses to send 1011, or any other code but 1000 below 3000

_GOODBYE_SECONDS = 1.0
_LINGER_SECONDS = 10.0
"""A connection that is over is cut after this time, if its client has not read what was left by then."""


class Socket(AsyncWebsocketConsumer):
    """A websocket consumer that owns tasks."""

    # The app wakes its consumers itself: a configured channel layer is left alone, and none is needed.
    channel_layer_alias: ClassVar[Any] = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._tasks: dict[asyncio.Task[None], bool] = {}  # whether a task outlives the client
        self._over = False  # nothing can be sent any more
        self._write = send
        self._write_frame = _frame_sender(send)
        try:
            await super().__call__(scope, receive, self._deliver)
        except asyncio.CancelledError:
            await self._say_goodbye()
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            await self._wait_for_tasks()

    async def dispatch(self, message: Any) -> None:
        """Channels', but without a turn of the process's one database thread before each frame.

        Else a permission check that blocks that thread would keep every socket of the process from ending. So
        whatever uses a connection gives it back itself.
        """
        await getattr(self, get_handler_name(message))(message)

    async def websocket_disconnect(self, message: Any) -> None:
        """Channels', again without that turn."""
        await self.disconnect(message["code"])
        raise StopConsumer

    async def disconnect(self, code: int) -> None:
        """End what works for this socket, and wait for what is carried out all the same."""
        self._end()
        await self._wait_for_tasks()

    async def send(  # type: ignore[override]  # as Channels' own websocket consumers do
        self, text_data: str | None = None, bytes_data: bytes | None = None, close: bool = False
    ) -> None:
        """Channels', which takes two more steps for each frame: they would be a tenth of a frame's cost."""
        if text_data is None or close:
            await super().send(text_data, bytes_data, close)
        else:
            await self._deliver({"type": "websocket.send", "text": text_data})

    async def _deliver(self, message: Any) -> None:
        """The server's `send`, which nothing follows after a close, and which a client may leave at any time.

        Servers differ there: some drop a late frame, some raise an `OSError`, some another error. The
        disconnect is on its way in any case.
        """
        if message["type"] == "websocket.accept":
            await self._write(message)
        elif not self._over:
            write = self._write_frame
            if message["type"] == "websocket.close":
                write = self._write_close
                self._end(closing=asyncio.current_task())
                _cut_later(self._write_frame)
            try:
                await write(message)
            except Exception:
                logger.debug("A client vanished before its %s", message["type"], exc_info=True)
                self._end()
                _cut_later(self._write_frame)

    async def _write_close(self, message: Any) -> None:
        """Close with another code where the server refuses this one, and would leave the socket open."""
        try:
            await self._write(message)
        except Exception:  # noqa: BLE001 - each server has errors of its own
            await self._write(message | {"code": CLOSE_FAILED})

    async def _say_goodbye(self) -> None:
        """Tell the client of a server that stops to come back; hypercorn would call it an error here."""
        if self._over:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._deliver({"type": "websocket.close", "code": CLOSE_RESTARTING})

    def _end(self, *, closing: asyncio.Task[Any] | None = None) -> None:
        """Send nothing more; stop all tasks but the one that is closing and those that outlive the client."""
        self._over = True
        for task, outlives_client in self._tasks.items():
            if task is not closing and not outlives_client:
                task.cancel()

    async def _wait_for_tasks(self) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _spawn(
        self, work: Coroutine[Any, Any, None], name: str, *, outlives_client: bool = False
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = outlives_client
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)


def _frame_sender(send: Any) -> Any:
    """The server's `send` for frames: not through Channels' sessions, which only save with an HTTP response.

    They would look at the session once for each frame, which is up to a seventh of a frame's cost.
    """
    wrapper = getattr(send, "__self__", None)
    return wrapper.real_send if type(wrapper) is InstanceSessionWrapper else send


def _cut_later(send: Any) -> None:
    """Have a connection that is over cut after a while, if need be, so that its client cannot keep it.

    Daphne does so itself. uvicorn would wait for ever for a client that does not read, and so never stop.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is not None and hasattr(transport, "abort"):
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, transport.abort)
