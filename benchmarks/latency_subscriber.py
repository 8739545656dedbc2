"""The reader in Python: notes when `subscribe()` yields each chunk.

Arguments: the keys as JSON. It says when all streams are followed, and at the end of the last one, for each
stream, each chunk's offset, number and time (`CLOCK_MONOTONIC`, seconds).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import django

django.setup()

from benchmarks.shared.talking import say, settle  # noqa: E402
from django_pgstreams.hub import subscribe  # noqa: E402


async def main(keys: list[str]) -> None:
    """Follow the streams to their ends."""
    started = asyncio.Barrier(len(keys) + 1)
    async with asyncio.TaskGroup() as group:
        tasks = {key: group.create_task(follow(key, started)) for key in keys}
        await started.wait()
        settle()
        say({"live": True})
    say({"received": {key: task.result() for key, task in tasks.items()}})


async def follow(key: str, started: asyncio.Barrier) -> list[tuple[int, int, float]]:
    """What arrives until the stream has ended. Its first chunk, there already, says that it is followed."""
    received = []
    async for chunks in subscribe(key).batches():
        at = time.monotonic()
        if not received:
            await started.wait()
        received += [(chunk.offset, chunk.data["number"], at) for chunk in chunks]
    return received


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
