"""The keeper of `chaos`: begins streams and ends them, so that there are always about as many that are open.

What it does it does to the end, through any outage: a stream is on the list once it is committed, and is
marked there once it takes no more. At the end of the run it ends all that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from django.db import close_old_connections

from benchmarks.chaos_author import LOST
from benchmarks.chaos_ledger import Kind, Lane, Ledger, Streams, data_of, key_of
from benchmarks.chaos_program import Program, Retry, stopping
from django_pgstreams.exceptions import AppendFailed, AppendUnknown, StreamBusy, StreamClosed
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter

_LOOK_SECONDS = 0.1


class Keeper:
    """The streams of the run, seen from where they are made."""

    def __init__(self, program: Program, ledger: Ledger) -> None:
        self._streams = Streams(program.directory)
        self._ledger = ledger
        self._lane = Lane(program.life, 0)
        self._random = program.random
        entries = self._streams.news()  # of its earlier lives
        self._last = max(entries, default=0)
        self.open = sorted({entry for entry in entries if entry > 0} - {-entry for entry in entries})

    def begin(self) -> None:
        """Begin a stream."""
        self._last += 1
        self._persist(self._create, self._last)
        self._streams.begun(self._last)
        self.open.append(self._last)

    def end(self) -> None:
        """End one of the streams, in one of the ways that there are."""
        stream = self.open.pop(self._random.randrange(len(self.open)))
        way = self._random.choice((self._close, self._append_and_close, self._pipe))
        self._persist(way, stream)
        self._streams.ended(stream)

    def _persist(self, work: Callable[[int], None], stream: int) -> None:
        retry = Retry()
        while True:
            try:
                return work(stream)
            except StreamClosed:
                return None  # in an attempt whose outcome was unknown, or in an earlier life
            except (*LOST, AppendFailed, AppendUnknown, StreamBusy):
                close_old_connections()
                time.sleep(retry.pause_seconds())

    def _create(self, stream: int) -> None:
        Stream.objects.get_or_create(key=key_of(stream))

    def _close(self, stream: int) -> None:
        row = Stream.objects.get(key=key_of(stream))
        row.close()
        self._note(Kind.CLOSED, stream, row.next_offset, -1)

    def _append_and_close(self, stream: int) -> None:
        row = Stream.objects.get(key=key_of(stream))
        [token] = self._lane.take(1)
        self._note(Kind.ATTEMPT, stream, -1, token)
        chunk = row.append(data_of(token), close=True)
        self._note(Kind.STORED, stream, chunk.offset, token)
        self._note(Kind.CLOSED, stream, chunk.offset + 1, -1)

    def _pipe(self, stream: int) -> None:
        row = Stream.objects.get(key=key_of(stream))
        tokens = self._lane.take(self._random.randint(1, 50))
        self._ledger.write(Kind.ATTEMPT, stream, [(-1, token) for token in tokens])
        StreamWriter(row).pipe(map(data_of, tokens))
        self._ledger.write(Kind.STORED, stream, [(-1, token) for token in tokens])
        self._note(Kind.CLOSED, stream, row.next_offset, -1)

    def _note(self, kind: Kind, stream: int, offset: int, token: int) -> None:
        self._ledger.write(kind, stream, [(offset, token)])


def keep(program: Program, ledger: Ledger) -> None:
    """Keep `streams` open, of which one ends and another begins every `turn_seconds`, until asked to stop."""
    keeper = Keeper(program, ledger)
    turn_at = time.monotonic()
    while not stopping.is_set():
        if len(keeper.open) < program.options["streams"]:
            keeper.begin()
        elif time.monotonic() > turn_at:
            turn_at = time.monotonic() + program.options["turn_seconds"]
            keeper.end()
        else:
            stopping.wait(_LOOK_SECONDS)
    while keeper.open:
        keeper.end()
