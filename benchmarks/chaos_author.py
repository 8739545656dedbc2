"""What a writer of `chaos` is made of: its attempts, and the ledger of what became of them.

Each thread or task has a lane of tokens and uses each but once, in growing order. An attempt is recorded
before it is made; then its outcome, as the product told it. A killed writer leaves attempts without an
outcome. Nothing is tried again: what failed stays failed, what is unknown stays unknown.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import psycopg
from channels.db import database_sync_to_async
from django.db import close_old_connections
from django.db.utils import InterfaceError, InternalError, OperationalError

import benchmarks.chaos_setup  # noqa: F401 - before any model
from benchmarks.chaos_ledger import Kind, Lane, Ledger, Streams, key_of
from benchmarks.chaos_program import Pace, Program, Retry, stopping
from django_pgstreams.exceptions import AppendFailed, AppendUnknown, StreamBusy, StreamClosed
from django_pgstreams.models import Stream

LOST = (
    *(OperationalError, InterfaceError, InternalError),
    *(psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError),
)
"""The database went away, or was not (or no more) one to write to."""
_LOOK_SECONDS = 0.2


def outcome_of(error: BaseException) -> Kind:
    """What an append's error says about its chunks. Raises it when it says that something is broken."""
    match error:
        case StreamClosed():
            return Kind.ENDED
        case AppendFailed() | StreamBusy():
            return Kind.FAILED
        case AppendUnknown():
            return Kind.UNKNOWN
    if isinstance(error, LOST):
        return Kind.UNKNOWN
    raise error


class OpenStreams:
    """The streams that take chunks, as far as this process knows; for all its threads."""

    def __init__(self, program: Program) -> None:
        self._streams = Streams(program.directory)
        self._lock = threading.Lock()
        self._open: dict[int, None] = {}
        self._looked_at = 0.0

    def some(self, chance: random.Random, count: int) -> list[int]:
        """So many different streams, by chance, in order; fewer if there are not so many."""
        with self._lock:
            if time.monotonic() - self._looked_at > _LOOK_SECONDS:
                self._looked_at = time.monotonic()
                for entry in self._streams.news():
                    if entry > 0:
                        self._open[entry] = None
                    else:
                        self._open.pop(-entry, None)
            return sorted(chance.sample(list(self._open), min(count, len(self._open))))

    def drop(self, stream: int) -> None:
        """Forget a stream that has ended."""
        with self._lock:
            self._open.pop(stream, None)


class Author:
    """One thread or task: a lane, a pace, and what it tells the ledger."""

    def __init__(
        self, program: Program, ledger: Ledger, streams: OpenStreams, place: int, per_second: float
    ) -> None:
        self.random = random.Random(f"{program.random.random()}")
        self._ledger = ledger
        self._streams = streams
        self._lane = Lane(program.life, place)
        self._pace = Pace(per_second)
        self._retry = Retry()
        self._wait_seconds = 0.0
        self._rows: dict[int, Stream] = {}

    def run(self, append: Callable[[Author], int]) -> None:
        """Append over and over; `append` says how many chunks it tried to store."""
        while not stopping.is_set():
            pause_seconds = self.pause_seconds(append(self))
            close_old_connections()  # as Django does between requests
            stopping.wait(pause_seconds)

    def pause_seconds(self, count: int) -> float:
        """How long to wait after trying so many chunks."""
        wait_seconds, self._wait_seconds = self._wait_seconds, 0.0
        return max(wait_seconds, self._pace.pause_seconds(count))

    def some_streams(self, count: int) -> list[int]:
        """So many open streams, in order."""
        return self._streams.some(self.random, count)

    # Streams' rows -----------------------------------------------------------------------------------

    def row(self, stream: int) -> Stream | None:
        """The stream, or None if the database cannot be asked for it now."""
        try:
            if stream not in self._rows:
                self._rows[stream] = Stream.objects.get(key=key_of(stream))
        except LOST:
            self._wait_seconds = self._retry.pause_seconds()
        return self._rows.get(stream)

    async def arow(self, stream: int) -> Stream | None:
        """Async twin of `row`."""
        try:
            if stream not in self._rows:
                self._rows[stream] = await database_sync_to_async(Stream.objects.get)(key=key_of(stream))
        except LOST:
            self._wait_seconds = self._retry.pause_seconds()
        return self._rows.get(stream)

    # The ledger --------------------------------------------------------------------------------------

    def attempt(self, stream: int, count: int) -> list[int]:
        """Tokens for chunks that are about to be appended."""
        tokens = self._lane.take(count)
        self._note(Kind.ATTEMPT, stream, tokens)
        return tokens

    def stored(self, stream: int, chunks: list[tuple[int, int]]) -> None:
        """What was acknowledged: `(offset, token)`."""
        self._ledger.write(Kind.STORED, stream, chunks)
        self._retry.succeeded()

    def ended(self, stream: int, tokens: list[int]) -> None:
        """What was refused because the stream has ended."""
        self._note(Kind.ENDED, stream, tokens)
        self._streams.drop(stream)
        self._rows.pop(stream, None)

    def rolled_back(self, stream: int, tokens: list[int]) -> None:
        """What was taken back."""
        self._note(Kind.ROLLED_BACK, stream, tokens)

    def failed(self, stream: int, tokens: list[int], error: BaseException) -> None:
        """What an error says of all these. Raises it when it says that something is broken."""
        outcome = outcome_of(error)
        if outcome is Kind.ENDED:
            self.ended(stream, tokens)
        else:
            self._note(outcome, stream, tokens)
            self._wait_seconds = self._wait_seconds or self._retry.pause_seconds()

    def take(self, stream: int, tokens: list[int], outcomes: Sequence[int | BaseException]) -> None:
        """What became of each: an offset, or an error."""
        pairs = list(zip(outcomes, tokens, strict=True))
        if stored := [(outcome, token) for outcome, token in pairs if isinstance(outcome, int)]:
            self.stored(stream, stored)
        for outcome, token in pairs:
            if isinstance(outcome, BaseException):
                self.failed(stream, [token], outcome)

    def _note(self, kind: Kind, stream: int, tokens: list[int]) -> None:
        self._ledger.write(kind, stream, [(-1, token) for token in tokens])
