"""The relay: finds what nobody announced, such as what raw SQL has stored, and sends batched wake-ups.

It compares the tails of all open streams with those it last announced (`watch`). It does not go by times: a
transaction that commits late brings old ones, but a tail that differs, whenever that is seen.

Invariant: whatever commits is announced after the next look that succeeds, and a look is skipped only when
nothing at all has committed since the last one began. Interleavings that matter:

- a transaction commits during a look: the snapshot, taken first, leaves it out, and the next one differs;
- it commits long after its statements: ids and times are old, but the tail is not the announced one;
- it rolls back: nothing differs, and nothing is announced;
- a stream gets its last chunk and ends, or is deleted, between two looks: it is no longer open, and is
  announced as changed, so that its readers look whatever tail they know;
- a stream is made and ends between two looks: new streams that have ended are looked at too. The poll finds
  what is left: a stream that is made and deleted between two looks, or that was made in a transaction of more
  than ten seconds and ends before the first look after that;
- a look or an announcement fails, or its reply is lost: nothing counts as announced, and the next look finds
  the same and more; what is announced twice is a hint too many;
- the relay starts: it cannot know what was announced, so everything is, once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence

import psycopg

from . import arrays, database, sql, wire
from .buffer import Batch, Buffer, WakeUp
from .watch import Block, Watch

logger = logging.getLogger(__name__)

_ROLE = "relay"
_LONGEST_BACKOFF_SECONDS = 1.0
_REST_PER_LOOK = 0.5
_REST_PER_VAIN_LOOK = 4.0
_MAX_REST_SECONDS = 0.25
_EXPECTED = (psycopg.Error, TimeoutError, OSError)


class Relay:
    """Announces what changes in one database, in a thread of its own, until it is closed."""

    def __init__(
        self,
        using: str,
        *,
        channel: str,
        interval_seconds: float,
        idle_interval_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._using = using
        self._channel = channel
        self._interval_seconds = interval_seconds
        self._idle_interval_seconds = max(interval_seconds, idle_interval_seconds)
        self._timeout_seconds = timeout_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgstreams-relay", daemon=True)
        self._connection: database.Connection | None = None
        self._watch: Watch | None = None
        self._snapshot: str | None = None
        self._moving = False
        self._hot: list[int] = []
        self.flushes = 0

    def start(self) -> None:
        """Begin; also while the server is away."""
        self._thread.start()

    def close(self, timeout_seconds: float) -> bool:
        """Stop and disconnect; False if the server does not let go of it in time."""
        self._stopping.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning("The relay of %r did not stop in %.1f s", self._using, timeout_seconds)
            return False
        logger.info("The relay of %r has stopped", self._using)
        return True

    # The thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        rest = 0.0
        while not self._stopping.wait(rest):
            try:
                rest = self._look_and_pace(rest)
            except Exception as error:  # noqa: BLE001 - whatever it was, the next look finds as much
                failures += 1
                self._moving = False
                self._give_up(failures, error)
                rest = database.backoff_seconds(failures, _LONGEST_BACKOFF_SECONDS)
            else:
                if failures:
                    logger.info("The relay of %r works again", self._using)
                failures = 0
        self._disconnect()

    def _give_up(self, failures: int, error: Exception) -> None:
        self._disconnect()
        if failures == 1 and not self._stopping.is_set():
            logger.warning(
                "The relay of %r cannot look, and tries again: %s",
                self._using,
                error,
                exc_info=not isinstance(error, _EXPECTED),
            )

    def _look_and_pace(self, rested: float) -> float:
        """Look once; how long to rest then, given the last rest: shorter while streams move."""
        began = time.monotonic()
        self._moving = self._look()
        took = time.monotonic() - began
        if self._moving:
            return max(self._interval_seconds, min(_REST_PER_LOOK * took, _MAX_REST_SECONDS))
        slower = min(max(2 * rested, self._interval_seconds), self._idle_interval_seconds)
        return max(slower, min(_REST_PER_VAIN_LOOK * took, _MAX_REST_SECONDS))

    def _look(self) -> bool:
        """Announce what has changed since the last look; whether anything has."""
        # While streams move, to ask whether anything has committed would be in vain.
        snapshot = None if self._moving else self._ask(sql.SNAPSHOT)[0][0]
        if snapshot is not None and snapshot == self._snapshot:
            return False
        watch = self._watch
        if watch is None:
            watch = Watch(int(self._ask(sql.HIGHEST_STREAM)[0][0] or 0), time.monotonic())
        changed, read = self._read(watch)
        batch = self._batch(watch.wake_ups(changed, read))
        if batch is not None:
            self._announce(batch)
        watch.accept(changed, read, time.monotonic())
        if self._watch is None:
            logger.info("The relay of %r watches %d open streams", self._using, watch.streams)
        self._watch, self._snapshot = watch, snapshot
        return batch is not None

    def _read(self, watch: Watch) -> tuple[list[int], dict[int, Block]]:
        """The numbers of the blocks that have changed, and what they hold now, if anything."""
        mark = str(watch.mark)
        # One statement does, as long as the blocks that change are those that changed before.
        rows = self._ask(sql.WATCHED, mark, arrays.bigints(self._hot))
        changed = watch.changed({int(number or 0): digest or "" for number, digest, *_ in rows})
        read = _blocks(row for row in rows if row[2] is not None)
        others = [number for number in changed if number not in read]
        if others:
            first, last = str(others[0]), str(others[-1])
            read |= _blocks(self._ask(sql.WATCHED_BLOCKS, mark, arrays.bigints(others), first, last))
        self._hot = changed or self._hot
        return changed, read

    def _batch(self, wake_ups: Iterable[WakeUp]) -> Batch | None:
        """What to announce; everything at first, and in place of very many."""
        buffer = Buffer()
        if self._watch is None:
            buffer.restore(Batch((), everything=True))
        else:
            buffer.add(wake_ups)
        return buffer.take() if buffer else None

    def _announce(self, batch: Batch) -> None:
        payloads = arrays.texts(wire.pack(batch))
        database.notify(self._connect(), self._channel, payloads, timeout_seconds=self._timeout_seconds)
        self.flushes += 1

    def _ask(self, statement: str, *values: str | arrays.Array) -> list[list[str | None]]:
        return database.execute(self._connect(), statement, values, timeout_seconds=self._timeout_seconds)

    def _connect(self) -> database.Connection:
        if self._connection is None:
            self._snapshot = None  # those of another server, or of another life of it, say nothing
            self._connection = database.connect(self._using, _ROLE, timeout_seconds=self._timeout_seconds)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()


def _blocks(rows: Iterable[Sequence[str | None]]) -> dict[int, Block]:
    """Blocks by number, from the rows of a statement."""
    blocks = {}
    for number, digest, ids, positions in rows:
        streams = dict(zip(arrays.numbers(ids or ""), arrays.numbers(positions or ""), strict=True))
        blocks[int(number or 0)] = Block(digest or "", streams)
    return blocks
