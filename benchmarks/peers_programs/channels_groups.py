"""Groups of the channel layer that the settings name: `group_send`, and a consumer's `receive`."""

from __future__ import annotations

import asyncio
from typing import Any

from channels.layers import get_channel_layer
from django.core.management import call_command

from .received import Received
from .work import STREAMS, Work, key, run_tasks

RETRY_SECONDS = 0.2


def prepare(plan: dict[str, Any]) -> None:
    """The tables, if the layer has any."""
    call_command("migrate", verbosity=0, interactive=False)


def write(work: Work, plan: dict[str, Any]) -> None:
    """A group per stream."""
    layer = get_channel_layer()

    async def append(stream: int, chunks: list[dict[str, Any]]) -> None:
        for data in chunks:
            await layer.group_send(key(stream), {"type": "chunk", "data": data})

    asyncio.run(run_tasks(work, append))


def read(received: Received, plan: dict[str, Any]) -> None:
    """A consumer per stream: a channel of its own in the stream's group."""
    layer = get_channel_layer()

    async def follow_one(channel: str) -> None:
        while True:
            message = await layer.receive(channel)
            if message["type"] == "chunk":
                received.take(message["data"])

    async def follow() -> None:
        # One consumer after another, as sockets are opened. Of channels_postgres, consumers that begin at
        # once start a listener each, and every message then arrives that often.
        following = []
        for stream in range(STREAMS):
            channel = await layer.new_channel()
            await layer.group_add(key(stream), channel)
            await wait_until_received(channel)
            following.append(asyncio.create_task(follow_one(channel)))
        received.following.set()
        await asyncio.gather(*following)

    async def wait_until_received(channel: str) -> None:
        receiving = asyncio.create_task(layer.receive(channel))
        while not receiving.done():
            await layer.send(channel, {"type": "hello"})
            await asyncio.wait([receiving], timeout=RETRY_SECONDS)

    asyncio.run(follow())
