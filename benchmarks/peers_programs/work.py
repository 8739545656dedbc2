"""What writers do, the same for every peer: distinct payloads, appended in turn to the streams they own.

Invariant: a stream has one writer, which waits for the acknowledgement of what it appended, one chunk or the
few of a turn, before it goes on. So the order of a stream is known, whatever the peer promises.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.shared.talking import hear, say

STREAMS = 64
TEXT = "a chunk of an answer"


def payload(stream: int, number: int) -> dict[str, Any]:
    """The chunk of that number: over 40 bytes of JSON, with the time (`CLOCK_MONOTONIC`) of its append."""
    return {"stream": stream, "number": number, "at": time.monotonic(), "text": TEXT}


Turn = tuple[int, list[dict[str, Any]]]
"""A stream, and the chunks of it that a writer has in flight at once."""


def key(stream: int) -> str:
    """The name of a stream, for peers that give streams names."""
    return f"answer-{stream}"


class Work:
    """The work of one process: some of the writers, each with every n-th stream."""

    def __init__(self, mine: range, writers: int, in_flight: int = 1) -> None:
        self.mine = mine
        """The numbers of this process's writers."""
        self._writers = writers
        self._in_flight = in_flight
        self._next = dict.fromkeys(range(STREAMS), 0)
        self._deadline = 0.0
        self._started = 0.0

    def streams(self, writer: int) -> range:
        """The streams of a writer."""
        return range(writer, STREAMS, self._writers)

    def first(self, writer: int) -> Iterator[Turn]:
        """One chunk for each stream of a writer, by which readers show that they follow."""
        for stream in self.streams(writer):
            yield stream, [payload(stream, 0)]
            self._next[stream] = 1

    def turns(self, writer: int) -> Iterator[Turn]:
        """What to append, until time is up. Asking for the next turn acknowledges the last."""
        while True:
            for stream in self.streams(writer):
                if time.monotonic() >= self._deadline:
                    return
                numbers = range(self._next[stream], self._next[stream] + self._in_flight)
                yield stream, [payload(stream, number) for number in numbers]
                self._next[stream] = numbers.stop

    def wait_for_readers(self) -> None:
        """Say that the streams are there to be followed, and return when they are. Blocks."""
        say("ready")
        hear()

    def wait_for_go(self) -> None:
        """Say that the first chunks are written, and return when the time begins. Blocks."""
        say("warm")
        seconds = hear()["seconds"]
        self._started = time.monotonic()
        self._deadline = self._started + seconds

    def done(self) -> None:
        """Say how many chunks of each stream are acknowledged, the first ones included."""
        owned = {stream: self._next[stream] for writer in self.mine for stream in self.streams(writer)}
        say({"acknowledged": owned, "started": self._started, "ended": time.monotonic()})


def run_threads(work: Work, append: Callable[[int, dict[str, Any]], object]) -> None:
    """Run the writers as threads."""

    def run(turns: Iterator[Turn]) -> None:
        for stream, chunks in turns:
            for data in chunks:
                append(stream, data)

    work.wait_for_readers()
    with ThreadPoolExecutor(len(work.mine)) as pool:
        list(pool.map(run, [work.first(writer) for writer in work.mine]))
        work.wait_for_go()
        list(pool.map(run, [work.turns(writer) for writer in work.mine]))
    work.done()


async def run_tasks(work: Work, append: Callable[[int, list[dict[str, Any]]], Awaitable[object]]) -> None:
    """Run the writers as tasks of one event loop; `append` is given a turn's chunks."""

    async def run(turns: Iterator[Turn]) -> None:
        for stream, chunks in turns:
            await append(stream, chunks)

    await asyncio.to_thread(work.wait_for_readers)
    await asyncio.gather(*(run(work.first(writer)) for writer in work.mine))
    await asyncio.to_thread(work.wait_for_go)
    await asyncio.gather(*(run(work.turns(writer)) for writer in work.mine))
    work.done()
