"""One process that follows all streams, with a subscription for each.

A line names a number of chunks. When so many have arrived in all since the start, and the reads have come
to rest, it says the seconds of processor time and the bytes of memory that it has taken so far; at 0
nothing is followed yet. At `null` it says, for each stream, each chunk's offset and number, and leaves.

Its polls are put off, so that what is measured is what it was woken for. "Look at everything", which a
wake-up asks for when there were too many to be listed, does what a poll does.

Once everything is followed, what there is then is frozen, out of the garbage collector's sight (`gc.freeze`).
Else it is Python's full collections that grow: each visits a million objects at 20,000 subscriptions.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import django
from django.conf import settings

settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 3600}
# Looking up a stream would else open a connection each.
settings.DATABASES["default"]["CONN_MAX_AGE"] = None
django.setup()

from benchmarks.shared.talking import hear, say  # noqa: E402
from django_pgstreams import hub  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402

REST_SECONDS = 0.05


class Followers:
    """The subscriptions, and what has arrived."""

    def __init__(self) -> None:
        # Offset, payload, offset, payload, …: nothing that a garbage collector would have to look at.
        self.received: dict[str, list[Any]] = {}
        self.count = 0
        self._arrived = asyncio.Event()

    async def follow(self, key: str) -> None:
        """Follow a stream until cancelled."""
        received = self.received[key] = []
        async for chunks in hub.subscribe(key).batches():
            for chunk in chunks:
                received += chunk.offset, bytes(chunk.payload)
            self.count += len(chunks)
            self._arrived.set()
            del chunks, chunk

    async def rest_after(self, count: int) -> None:
        """Wait until so many chunks are there and nothing is read any more."""
        while self.count < count:
            self._arrived.clear()
            await self._arrived.wait()
        reads, before = hub.get("default"), -1
        while reads.queries != before:
            before = reads.queries
            await asyncio.sleep(REST_SECONDS)


async def main(keys: list[str]) -> None:
    followers = Followers()
    tasks: list[asyncio.Task[None]] = []
    frozen = False
    while (count := await asyncio.to_thread(hear)) is not None:
        if count and not tasks:
            tasks = [asyncio.create_task(followers.follow(key)) for key in keys]
        await followers.rest_after(count)
        say({"cpu_seconds": time.process_time(), "memory_bytes": resident_bytes()})
        if tasks and not frozen:
            gc.collect()
            gc.freeze()
            frozen = True
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    say({"received": {key: decoded(entries) for key, entries in followers.received.items()}})


def resident_bytes() -> int:
    """The memory that this process holds."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def decoded(entries: list[Any]) -> list[tuple[int, int]]:
    return [
        (offset, json.loads(payload)["number"])
        for offset, payload in zip(entries[::2], entries[1::2], strict=True)
    ]


if __name__ == "__main__":
    asyncio.run(main(list(Stream.objects.order_by("pk").values_list("key", flat=True))))
