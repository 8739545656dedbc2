"""A writer of `chaos`: appends at its pace, in one of the ways there are, until it is asked to stop.

The option `kind` names the way, `per_second` how many chunks it aims at. See `chaos_author` for its ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import psycopg
from django.db import connection, transaction
from psycopg.conninfo import make_conninfo

from benchmarks.chaos_author import LOST, Author, OpenStreams
from benchmarks.chaos_keeper import keep
from benchmarks.chaos_ledger import Ledger, data_of, key_of
from benchmarks.chaos_program import Program, in_threads, stop_when_asked, stopping
from django_pgstreams.codec import encode
from django_pgstreams.models import Chunk
from django_pgstreams.writer import StreamWriter

BURST = (1, 40)
"""Chunks that are in flight together."""


def append_one(author: Author) -> int:
    """By `append` or `create`; alone, in a transaction, or in one that is rolled back."""
    for number in author.some_streams(1):
        if (stream := author.row(number)) is None:
            return 0
        tokens = author.attempt(number, 1)
        data = data_of(tokens[0])
        way = author.random.random()
        try:
            with transaction.atomic() if way < 0.4 else contextlib.nullcontext():
                chunk = stream.append(data) if way < 0.7 else Chunk.objects.create(stream=stream, data=data)
                if way < 0.1:
                    transaction.set_rollback(True)
            if way < 0.1:
                author.rolled_back(number, tokens)
            else:
                author.stored(number, [(chunk.offset, tokens[0])])
        except Exception as error:  # noqa: BLE001 - `failed` raises what it does not know
            author.failed(number, tokens, error)
    return 1


def append_many(author: Author) -> int:
    """By `append_many` to one stream, or by `bulk_create` to several: all or nothing."""
    numbers = author.some_streams(author.random.choice((1, 1, 3)))
    streams = [author.row(number) for number in numbers]
    if None in streams:
        return 0
    count = author.random.randint(*BURST)
    tokens = {number: author.attempt(number, count) for number in numbers}
    try:
        if len(streams) == 1:
            chunks = streams[0].append_many([data_of(token) for token in tokens[numbers[0]]])
            stored = {numbers[0]: [chunk.offset for chunk in chunks]}
        else:
            stored = _create(dict(zip(numbers, streams, strict=True)), tokens)
        for number, offsets in stored.items():
            author.stored(number, list(zip(offsets, tokens[number], strict=True)))
    except Exception as error:  # noqa: BLE001
        for number in numbers:
            author.failed(number, tokens[number], error)
    return count * len(numbers)


def _create(streams: dict[int, Any], tokens: dict[int, list[int]]) -> dict[int, list[int]]:
    chunks = {
        number: [Chunk(stream=stream, data=data_of(token)) for token in tokens[number]]
        for number, stream in streams.items()
    }
    Chunk.objects.bulk_create([chunk for own in chunks.values() for chunk in own])
    return {number: [chunk.offset for chunk in own] for number, own in chunks.items()}


def append_burst(author: Author) -> int:
    """By `StreamWriter` from a thread: all of a burst in flight, then each one's outcome."""
    for number in author.some_streams(1):
        if (stream := author.row(number)) is None:
            return 0
        # A writer whose appends are awaited one by one needs no block.
        writer = StreamWriter(stream)
        count = author.random.randint(*BURST)
        tokens = author.attempt(number, count)
        futures = [writer.append_nowait(data_of(token)) for token in tokens]
        author.take(number, tokens, [future.exception() or future.result() for future in futures])
        return count
    return 1


async def append_in_task(author: Author) -> int:
    """By `StreamWriter` from an event loop: all of a burst in flight, then each one's outcome."""
    for number in author.some_streams(1):
        if (stream := await author.arow(number)) is None:
            return 0
        writer = StreamWriter(stream)
        count = author.random.randint(*BURST)
        tokens = author.attempt(number, count)
        appends = [writer.aappend(data_of(token)) for token in tokens]
        author.take(number, tokens, await asyncio.gather(*appends, return_exceptions=True))
        return count
    return 1


class SqlSession:
    """A plain connection of another program, which knows nothing but `pgstreams_append`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: psycopg.Connection[Any] | None = None

    def append(self, author: Author) -> int:
        """One chunk, in a transaction of its own."""
        for number in author.some_streams(1):
            tokens = author.attempt(number, 1)
            payload = encode("application/json", data_of(tokens[0]))
            try:
                if self._connection is None:
                    self._connection = psycopg.connect(self._address, autocommit=True)
                query = "SELECT pgstreams_append(%s, %s)"
                [(offset,)] = self._connection.execute(query, (key_of(number), payload)).fetchall()
                author.stored(number, [(offset, tokens[0])])
            except psycopg.errors.ObjectNotInPrerequisiteState:
                author.ended(number, tokens)
            except LOST as error:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                author.failed(number, tokens, error)
        return 1


# The program -----------------------------------------------------------------------------------------

THREADS = {"orm": append_one, "many": append_many, "threads": append_burst}
AUTHORS = {"orm": 2, "many": 2, "threads": 4, "tasks": 6, "sql": 2}


def main(program: Program) -> None:
    """Write until asked to stop."""
    kind = program.options["kind"]
    ledger, streams = Ledger(program.ledger), OpenStreams(program)
    stop_when_asked()
    program.begin()
    if kind == "keeper":
        keep(program, ledger)
        return
    count = AUTHORS[kind]
    per_second = program.options["per_second"] / count
    authors = [Author(program, ledger, streams, place, per_second) for place in range(count)]
    match kind:
        case "tasks":
            asyncio.run(run_tasks(authors))
        case "sql":
            address = make_conninfo(
                os.environ["DATABASE_URL"], application_name="chaos-sql", connect_timeout=5
            )
            in_threads(*(lambda own=own: own.run(SqlSession(address).append) for own in authors))
        case _:
            in_threads(*(lambda own=own: own.run(THREADS[kind]) for own in authors))
    connection.close()


async def run_tasks(authors: list[Author]) -> None:
    """A task for each."""
    async with asyncio.TaskGroup() as group:
        for author in authors:
            group.create_task(run_task(author))


async def run_task(author: Author) -> None:
    """Async twin of `Author.run`."""
    while not stopping.is_set():  # noqa: ASYNC110 - it does not wait for that
        await asyncio.sleep(author.pause_seconds(await append_in_task(author)))


if __name__ == "__main__":
    main(Program.of_this_process())
