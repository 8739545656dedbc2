"""The reader of `seed`: follows every stream, by the hub or by polling, and checks what it received.

Arguments: the number of streams, then nothing for the hub, or the number of pollers and their interval in
seconds. One poller asks for all streams; of several, each follows one stream, as a viewer does. The program
makes the streams, and says when a first chunk of each, which the parent appends, is everywhere. Told how many
chunks were acknowledged, it waits for the last one, compares everything with the table, and says how long the
chunks after the first ones took: from `created_at`, when the server received the append's statement, until
they were here. That holds the append's own waits, its commit, the announcement and the read.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import django

django.setup()

import psycopg  # noqa: E402

from benchmarks.shared.checking import Ledger, check, spread  # noqa: E402
from benchmarks.shared.errors import BenchmarkError  # noqa: E402
from benchmarks.shared.talking import settle  # noqa: E402
from django_pgstreams.hub import subscribe  # noqa: E402
from django_pgstreams.models import Chunk, Stream  # noqa: E402

DRAIN_SECONDS = 60.0
POLL_CHUNKS = 1000

POLL = """
SELECT want.stream_id, chunk."offset", chunk.payload
FROM unnest(%(stream_ids)s::bigint[], %(positions)s::bigint[]) AS want (stream_id, position)
JOIN pgstreams_chunk AS chunk
  ON chunk.stream_id = want.stream_id
 AND chunk."offset" >= want.position AND chunk."offset" < want.position + %(chunks)s
ORDER BY want.stream_id, chunk."offset"
"""


class Received:
    """Every chunk that arrived at each follower of each stream: `(offset, payload, at)`, `at` since 1970."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[int, int], list[tuple[int, bytes, float]]] = {}
        self.count = 0
        self.polls = 0
        self._arrived = asyncio.Event()

    def follower(self, follower: int, stream_id: int) -> list[tuple[int, bytes, float]]:
        """What a follower receives of a stream, to be filled."""
        return self.chunks.setdefault((follower, stream_id), [])

    def counted(self, chunks: int) -> None:
        """Note that so many more have arrived."""
        self.count += chunks
        self._arrived.set()

    async def wait_for(self, count: int) -> None:
        """Wait until so many have arrived. Raises `BenchmarkError` past a deadline."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self.count < count:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise BenchmarkError(f"Of {count:,} chunks {self.count:,} arrived.") from None


async def follow(stream: Stream, received: Received) -> None:
    """Receive a stream through the hub."""
    chunks = received.follower(0, stream.pk)
    async for batch in subscribe(stream).batches():
        at = time.time()
        chunks += [(chunk.offset, bytes(chunk.payload), at) for chunk in batch]
        received.counted(len(batch))


async def poll(follower: int, streams: Sequence[Stream], interval_seconds: float, received: Received) -> None:
    """Receive streams by asking the table every so often, on a connection of its own."""
    chunks = {stream.pk: received.follower(follower, stream.pk) for stream in streams}
    positions = dict.fromkeys(chunks, 0)
    async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True) as own:
        due = time.monotonic()
        while True:
            given = {"stream_ids": list(positions), "positions": [*positions.values()], "chunks": POLL_CHUNKS}
            rows = await (await own.execute(POLL, given, binary=True)).fetchall()
            at = time.time()
            for stream_id, offset, payload in rows:
                chunks[stream_id].append((offset, payload, at))
                positions[stream_id] = offset + 1
            received.polls += 1
            received.counted(len(rows))
            # Whoever is late goes on at once.
            due = max(due + interval_seconds * (len(rows) < POLL_CHUNKS), time.monotonic())
            await asyncio.sleep(due - time.monotonic())


def followers(
    streams: Sequence[Stream], polling: Sequence[str], received: Received
) -> Iterator[Coroutine[Any, Any, None]]:
    """The coroutines that receive."""
    if not polling:
        yield from (follow(stream, received) for stream in streams)
        return
    pollers, interval_seconds = int(polling[0]), float(polling[1])
    if pollers == 1:
        yield poll(0, streams, interval_seconds, received)
        return
    for number in range(pollers):
        yield poll(number, [streams[number % len(streams)]], interval_seconds, received)


def stored() -> dict[int, list[tuple[int, bytes, float]]]:
    """The table: of each stream `(offset, payload, created_at)`."""
    chunks: dict[int, list[tuple[int, bytes, float]]] = {}
    rows = Chunk._base_manager.order_by("stream_id", "offset")
    for stream_id, offset, payload, at in rows.values_list("stream_id", "offset", "payload", "created_at"):
        chunks.setdefault(stream_id, []).append((offset, bytes(payload), at.timestamp()))
    return chunks


async def receive(streams: Sequence[Stream], polling: Sequence[str]) -> tuple[Ledger, Received]:
    """Follow the streams until all that is stored is here: what each follower is due, and what it got."""
    received = Received()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in followers(streams, polling, received)]
        await received.wait_for(max(len(tasks), len(streams)))
        settle()
        say(following=len(tasks))
        acknowledged = json.loads(await asyncio.to_thread(sys.stdin.readline))["acknowledged"]
        table = await asyncio.to_thread(stored)
        if (count := sum(map(len, table.values()))) != acknowledged:
            raise BenchmarkError(f"{acknowledged:,} chunks were acknowledged, {count:,} are stored.")
        due = {(follower, stream_id): table[stream_id] for follower, stream_id in received.chunks}
        await received.wait_for(sum(map(len, due.values())))
        for task in tasks:
            task.cancel()
    return due, received


def latencies_ms(due: Ledger, received: Ledger) -> Iterator[float]:
    """The milliseconds that each chunk took but the first of each stream, after `check`."""
    for follower, chunks in due.items():
        for (_, _, created_at), (_, _, at) in zip(chunks[1:], received[follower][1:], strict=True):
            yield (at - created_at) * 1000


def main(streams: int, *polling: str) -> None:
    made = Stream.objects.bulk_create([Stream(key=f"seed/{number}") for number in range(streams)])
    say(streams=streams)
    due, received = asyncio.run(receive(made, polling))
    check(due, received.chunks)
    say(latencies=spread(latencies_ms(due, received.chunks)), polls=received.polls)


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
