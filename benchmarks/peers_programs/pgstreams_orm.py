"""This project, through the ORM: `stream.append()`."""

from __future__ import annotations

import asyncio
from typing import Any

from django.core.management import call_command

from benchmarks.shared.errors import BenchmarkError
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream

from .received import Received
from .work import STREAMS, Work, key, run_threads


def prepare(plan: dict[str, Any]) -> None:
    """The tables, and a row per stream."""
    call_command("migrate", verbosity=0, interactive=False)
    for stream in range(STREAMS):
        Stream.objects.create(key=key(stream))


def all_streams() -> list[Stream]:
    """The streams by their numbers."""
    return [Stream.objects.get(key=key(stream)) for stream in range(STREAMS)]


def write(work: Work, plan: dict[str, Any]) -> None:
    """Each thread has Django's connection of that thread."""
    streams = all_streams()
    run_threads(work, lambda stream, data: streams[stream].append(data))


def read(received: Received, plan: dict[str, Any]) -> None:
    """A subscription per stream, in one event loop."""
    asyncio.run(follow(received))


async def follow(received: Received) -> None:
    """Follow all streams for ever."""

    async def follow_one(stream: int) -> None:
        async for chunks in subscribe(key(stream)).batches():
            for chunk in chunks:
                data = chunk.data
                if chunk.offset != data["number"]:
                    raise BenchmarkError(f"Chunk {data['number']} of {key(stream)} is at {chunk.offset}.")
                received.take(data)

    received.following.set()
    await asyncio.gather(*map(follow_one, range(STREAMS)))
