"""rakaia-streams' Django store: `append`, and its live view (server-sent events) on hypercorn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from django.core.management import call_command
from django_rakaia.store import get_store

from .received import Received
from .work import STREAMS, Work, key, run_threads


def prepare(plan: dict[str, Any]) -> None:
    """The tables, and a row per stream."""
    call_command("migrate", verbosity=0, interactive=False)
    for stream in range(STREAMS):
        get_store().create(key(stream), content_type="application/json")


def write(work: Work, plan: dict[str, Any]) -> None:
    """Each thread has Django's connection of that thread."""
    store = get_store()
    run_threads(work, lambda stream, data: store.append(key(stream), json.dumps(data).encode()))


def read(received: Received, plan: dict[str, Any]) -> None:
    """An EventSource per stream."""
    asyncio.run(follow(received, plan["port"]))


async def follow(received: Received, port: int) -> None:
    """Follow all streams for ever."""
    answered = asyncio.Semaphore(0)

    async def follow_one(client: httpx.AsyncClient, stream: int) -> None:
        url = f"http://127.0.0.1:{port}/streams/api/streams/{key(stream)}/sse/"
        async with client.stream("GET", url, timeout=None) as response:
            response.raise_for_status()
            answered.release()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    received.take(json.loads(line.removeprefix("data: "))["event"]["data"])

    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(limits=limits) as client:
        following = asyncio.gather(*(follow_one(client, stream) for stream in range(STREAMS)))
        for _ in range(STREAMS):
            await answered.acquire()
        received.following.set()
        await following
