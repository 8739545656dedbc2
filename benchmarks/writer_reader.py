"""The reader: follows the streams to their ends with `subscribe()`, and checks each chunk.

Arguments: the keys as JSON, in the order of the producers' places. It says when all streams are followed, and
at the end for each stream how many chunks have arrived, the spread of the milliseconds from the call of an
append to the chunk here (but of each stream's first chunk), and how many cores it used.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections.abc import Sequence

import django

django.setup()

from benchmarks.shared.checking import spread  # noqa: E402
from benchmarks.shared.errors import BenchmarkError  # noqa: E402
from benchmarks.shared.talking import say, settle  # noqa: E402
from django_pgstreams.hub import subscribe  # noqa: E402
from django_pgstreams.models import Chunk  # noqa: E402


class Checker:
    """What one stream must bring: every offset from 0 on, each with the payload of that number."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.next = 0
        self.nanoseconds = array("q")

    def take(self, chunks: Sequence[Chunk], now: int) -> None:
        """Take chunks that arrived at that time. Raises `BenchmarkError` for one that was not due."""
        due = self.next
        note = self.nanoseconds.append
        for chunk in chunks:
            data = chunk.data
            if chunk.offset != due or data["number"] != due or data["stream"] != self.place:
                raise BenchmarkError(
                    f"Offset {due} of producer {self.place} was due; {chunk.offset} arrived with {data}."
                )
            due += 1
            note(now - data["at"])
        self.next = due


async def main(keys: list[str]) -> None:
    """Follow the streams to their ends."""
    checkers = [Checker(place) for place in range(len(keys))]
    started = asyncio.Barrier(len(keys) + 1)
    async with asyncio.TaskGroup() as group:
        for key, checker in zip(keys, checkers, strict=True):
            group.create_task(follow(key, checker, started))
        await started.wait()
        settle()
        cpu, began = time.process_time(), time.monotonic()
        say({"live": True})
    say(
        {
            "received": {key: checker.next for key, checker in zip(keys, checkers, strict=True)},
            "milliseconds": spread(took / 1e6 for checker in checkers for took in checker.nanoseconds[1:]),
            "cores": (time.process_time() - cpu) / (time.monotonic() - began),
        }
    )


async def follow(key: str, checker: Checker, started: asyncio.Barrier) -> None:
    """Its first chunk, there already, says that the stream is followed."""
    async for chunks in subscribe(key).batches():
        is_first = not checker.next
        checker.take(chunks, time.monotonic_ns())
        if is_first:
            await started.wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
