"""The producers: append through `StreamWriter` until the time is over, and check each offset.

A line asks for a case: `name`, `producers`, `in_flight`, `threads`, `seconds`. It says the streams' keys,
each with a first chunk, which shows a reader that it follows. After another line it appends, and says for
each stream how many were acknowledged (the first chunk too), how many in all but the first, in which time,
with which cores, and the spread of the milliseconds from call to acknowledgement. Then it ends the streams.

Each stream's numbers count from 0 in the order of the calls, and so must its offsets.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import django

django.setup()

from benchmarks.shared.checking import spread  # noqa: E402
from benchmarks.shared.errors import BenchmarkError  # noqa: E402
from benchmarks.shared.talking import hear, say, settle  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402
from django_pgstreams.writer import StreamWriter  # noqa: E402

TEXT = "about a token"


class Producer:
    """Appends to one stream; its calls in flight share the numbers."""

    def __init__(self, place: int, stream: Stream) -> None:
        self.stream = stream
        self.writer = StreamWriter(stream)
        self.place = place
        self.numbers: Iterator[int] = itertools.count()
        self.acknowledged = 0
        self.nanoseconds = array("q")

    def begin(self) -> Future[int]:
        """Append the chunk that shows a reader that it follows."""
        return self.writer.append_nowait(self._chunk(next(self.numbers), time.monotonic_ns()))

    def append(self, until: int) -> None:
        """Append one after the other until that time (monotonic nanoseconds)."""
        while (at := time.monotonic_ns()) < until:
            number = next(self.numbers)
            self.take(number, self.writer.append(self._chunk(number, at)))
            self.nanoseconds.append(time.monotonic_ns() - at)

    async def aappend(self, until: int) -> None:
        """Async twin of `append`."""
        while (at := time.monotonic_ns()) < until:
            number = next(self.numbers)
            self.take(number, await self.writer.aappend(self._chunk(number, at)))
            self.nanoseconds.append(time.monotonic_ns() - at)

    def _chunk(self, number: int, at: int) -> dict[str, Any]:
        return {"stream": self.place, "number": number, "at": at, "text": TEXT}

    def take(self, number: int, offset: int) -> None:
        """Count an acknowledgement. Raises `BenchmarkError` for the offset of another append."""
        if offset != number:
            raise BenchmarkError(f"Append {number} to {self.stream} was acknowledged as offset {offset}.")
        self.acknowledged += 1


def main() -> None:
    case = hear()
    keys = [f"{case['name']}/{place}" for place in range(case["producers"])]
    streams = Stream.objects.bulk_create(Stream(key=key) for key in keys)
    producers = [Producer(place, stream) for place, stream in enumerate(streams)]
    for producer, begun in [(producer, producer.begin()) for producer in producers]:
        producer.take(0, begun.result())
    say({"keys": keys})
    hear()
    settle()
    cpu, began = time.process_time(), time.monotonic_ns()
    until = began + int(case["seconds"] * 1e9)
    if case["threads"]:
        append_in_threads(producers, until)
    else:
        asyncio.run(append_in_tasks(producers, case["in_flight"], until))
    seconds = (time.monotonic_ns() - began) / 1e9
    say(
        {
            "acknowledged": {producer.stream.key: producer.acknowledged for producer in producers},
            "count": sum(len(producer.nanoseconds) for producer in producers),
            "seconds": seconds,
            "cores": (time.process_time() - cpu) / seconds,
            "milliseconds": spread(took / 1e6 for producer in producers for took in producer.nanoseconds),
        }
    )
    for stream in streams:
        stream.close()


def append_in_threads(producers: list[Producer], until: int) -> None:
    """A thread for each producer."""
    with ExitStack() as stack, ThreadPoolExecutor(len(producers)) as threads:
        for producer in producers:
            stack.enter_context(producer.writer)
        for done in [threads.submit(producer.append, until) for producer in producers]:
            done.result()


async def append_in_tasks(producers: list[Producer], in_flight: int, until: int) -> None:
    """So many tasks for each producer."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        for producer in producers:
            await stack.enter_async_context(producer.writer)
            for _ in range(in_flight):
                tasks.create_task(producer.aappend(until))


if __name__ == "__main__":
    main()
