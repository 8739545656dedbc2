"""A reader of `chaos` in process: follows its streams by `subscribe`, to their ends.

The option `kind` is `blocking` (a thread for each stream) or `async` (a task for each).
"""

from __future__ import annotations

import asyncio
import time

from django.db.utils import InterfaceError, OperationalError

import benchmarks.chaos_setup  # noqa: F401 - before any model
from benchmarks.chaos_book import LOOK_SECONDS, Book
from benchmarks.chaos_ledger import key_of
from benchmarks.chaos_program import Program, Retry, start_thread
from django_pgstreams.exceptions import StreamGap, StreamReset
from django_pgstreams.hub import Subscription, subscribe
from django_pgstreams.models import Chunk

LOST = (OperationalError, InterfaceError)
"""Beginning to follow needs the database; following waits for it."""


def subscription(book: Book, stream: int) -> Subscription:
    """The rest of a stream."""
    position, epoch = book.start(stream)
    return subscribe(key_of(stream), position, epoch=epoch)


def take(book: Book, stream: int, reader: Subscription, chunks: list[Chunk]) -> None:
    """Record a batch."""
    book.epoch(stream, str(reader.epoch))
    book.read(stream, [(chunk.offset, chunk.data) for chunk in chunks])


def follow(book: Book, stream: int) -> None:
    """Read a stream to its end."""
    retry = Retry()
    while True:
        reader = subscription(book, stream)
        try:
            for chunks in reader.batches():
                take(book, stream, reader, chunks)
                retry.succeeded()
            return book.ended(stream, int(reader.position))
        except StreamReset:
            return book.reset(stream)
        except StreamGap:
            return book.gap(stream)
        except LOST:
            time.sleep(retry.pause_seconds())


async def afollow(book: Book, stream: int) -> None:
    """Async twin of `follow`."""
    retry = Retry()
    while True:
        reader = subscription(book, stream)
        try:
            async for chunks in reader.batches():
                take(book, stream, reader, chunks)
                retry.succeeded()
            return book.ended(stream, int(reader.position))
        except StreamReset:
            return book.reset(stream)
        except StreamGap:
            return book.gap(stream)
        except LOST:
            await asyncio.sleep(retry.pause_seconds())


def follow_all(book: Book) -> None:
    """A thread for each stream."""
    while not book.is_done:
        for stream in book.new():
            start_thread(lambda own=stream: follow(book, own))
        time.sleep(LOOK_SECONDS)


async def afollow_all(book: Book) -> None:
    """A task for each stream."""
    async with asyncio.TaskGroup() as group:
        while not book.is_done:
            for stream in book.new():
                group.create_task(afollow(book, stream))
            await asyncio.sleep(LOOK_SECONDS)


def main(program: Program) -> None:
    """Read until all streams have ended."""
    book = Book(program)
    program.begin()
    if program.options["kind"] == "blocking":
        follow_all(book)
    else:
        asyncio.run(afollow_all(book))


if __name__ == "__main__":
    main(Program.of_this_process())
