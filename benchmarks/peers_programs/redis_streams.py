"""Redis Streams: XADD, and one blocking XREAD over all streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import redis
import redis.asyncio

from .received import Received
from .work import STREAMS, Work, key, run_tasks

MOST_PER_STREAM = 1000


def prepare(plan: dict[str, Any]) -> None:
    """Nothing: XADD makes the stream."""


def write(work: Work, plan: dict[str, Any]) -> None:
    """Each task has a connection while it waits; several chunks in flight go through a pipeline."""

    async def run() -> None:
        async with redis.asyncio.Redis.from_url(plan["redis"]) as client:

            async def append(stream: int, chunks: list[dict[str, Any]]) -> None:
                if len(chunks) == 1:
                    await client.xadd(key(stream), {"data": json.dumps(chunks[0])})
                    return
                async with client.pipeline(transaction=False) as pipeline:
                    for data in chunks:
                        pipeline.xadd(key(stream), {"data": json.dumps(data)})
                    await pipeline.execute()

            await run_tasks(work, append)

    asyncio.run(run())


def read(received: Received, plan: dict[str, Any]) -> None:
    """One client for all streams, as XREAD takes many."""
    client = redis.Redis.from_url(plan["redis"])
    positions: dict[Any, Any] = {key(stream).encode(): "0" for stream in range(STREAMS)}
    received.following.set()
    while True:
        for stream, entries in client.xread(positions, count=MOST_PER_STREAM, block=1000) or ():
            for _, fields in entries:
                received.take(json.loads(fields[b"data"]))
            positions[stream] = entries[-1][0]
