"""Makes one of `chaos_defects`, in this process's product or in the product's functions in the database."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import psycopg
from django.conf import settings
from django.db import connection, transaction

from benchmarks.chaos_defects import VARIABLE
from django_pgstreams import committer, hub, notifier, receivers, store
from django_pgstreams.buffer import Batch, WakeUp
from django_pgstreams.follower import Chunks, Event, Follower
from django_pgstreams.hub import Hub
from django_pgstreams.models import Stream
from django_pgstreams.settling import Outcome, Session

_NEVER_SECONDS = 86400.0
_BEFORE_COMMIT_SECONDS = 0.05
"""A reader has read by then."""
_SKIPPED_NEAR = 50
_FORGOTTEN_EVERY = 20
_REPEATED_EVERY = 50


def install() -> None:
    """Make the defect that the environment names, if it names one. After `django.setup()`."""
    name = os.environ.get(VARIABLE)
    if name:
        _MAKE[name]()


# Readers ---------------------------------------------------------------------------------------------


def _do_not_poll() -> None:
    settings.PGSTREAMS = {**settings.PGSTREAMS, "POLL_INTERVAL_SECONDS": _NEVER_SECONDS}


def _drop_last_wake_up() -> None:
    """What a stream's wake-ups say last is never taken: each is, when the next that says more has come."""
    _do_not_poll()
    _take_instead(lambda before, hint: before)


def _believe_hints_once() -> None:
    """A hint that says nothing new is not looked after."""
    _take_instead(lambda before, hint: hint)


def _take_instead(choose: Callable[[WakeUp | None, WakeUp], WakeUp | None]) -> None:
    """Of each hint that says more than the last of its stream, a hub takes what `choose` makes of both."""
    take = Hub.wake_from_thread
    known: dict[tuple[Hub, int], WakeUp] = {}

    def take_chosen(self: Hub, batch: Batch) -> None:
        chosen = []
        for hint in batch.wake_ups:
            place = (self, hint.stream_id)
            before = known.get(place)
            if before is None or hint > before:
                known[place] = hint
                chosen.append(choose(before, hint))
        take(self, Batch(tuple(filter(None, chosen)), batch.everything))

    Hub.wake_from_thread = take_chosen  # type: ignore[method-assign]


def _deliver_twice() -> None:
    give = Follower._from_window
    numbers = itertools.count(1)

    def give_again(self: Follower) -> Event | None:
        event = give(self)
        if isinstance(event, Chunks) and next(numbers) % _REPEATED_EVERY == 0:
            self.position -= 1
        return event

    Follower._from_window = give_again  # type: ignore[method-assign]


# Writers ---------------------------------------------------------------------------------------------


def _announce_early() -> None:
    _do_not_poll()
    _believe_hints_once()

    def announce(using: str, wake_ups: list[WakeUp]) -> None:
        hub.wake(using, Batch(tuple(wake_ups), everything=False))
        notifier.announce(using, wake_ups)
        time.sleep(_BEFORE_COMMIT_SECONDS)

    def early(change: Callable[..., store.Counters]) -> Callable[..., store.Counters]:
        def announce_and_commit(using: str, stream_id: int, *args: Any, **kwargs: Any) -> store.Counters:
            with transaction.atomic(using=using):
                counters = change(using, stream_id, *args, **kwargs)
                has_ended = counters.state != Stream.State.OPEN
                announce(using, [WakeUp(stream_id, counters.next_offset, has_ended)])
            return counters

        return announce_and_commit

    store.append, store.close = early(store.append), early(store.close)
    receivers._announce = lambda *args, **kwargs: None  # type: ignore[assignment]
    send = Session._send

    def send_early(self: Session, connection: Any, segments: Any, *args: Any) -> list[Outcome]:
        def end(outcomes: list[Outcome]) -> str:
            announce(
                self._using,
                [
                    WakeUp(segment.lane.stream_id, outcome.base + len(segment.payloads), bool(segment.end))
                    for segment, outcome in zip(segments, outcomes, strict=True)
                    if outcome.kind == "stored"
                ],
            )
            return "COMMIT"

        return _in_transaction(self, connection, lambda: send(self, connection, segments, *args), end)

    Session._send = send_early  # type: ignore[method-assign]
    committer.Committer._announce = lambda *args: None  # type: ignore[method-assign]


def _forget() -> None:
    send = Session._send
    numbers = itertools.count(1)

    def send_or_forget(self: Session, connection: Any, *args: Any) -> list[Outcome]:
        if next(numbers) % _FORGOTTEN_EVERY:
            return send(self, connection, *args)
        outcomes = _in_transaction(
            self, connection, lambda: send(self, connection, *args), lambda _: "ROLLBACK"
        )
        self._seq -= 1
        return outcomes

    Session._send = send_or_forget  # type: ignore[method-assign]


def _in_transaction(
    session: Session,
    connection: Any,
    send: Callable[[], list[Outcome]],
    end: Callable[[list[Outcome]], str],
) -> list[Outcome]:
    session._execute(connection, "BEGIN")
    try:
        outcomes = send()
    except psycopg.Error:
        session._execute(connection, "ROLLBACK")
        raise
    session._execute(connection, end(outcomes))
    return outcomes


def _store_twice() -> None:
    settle = Session._settle

    def look_and_forget(self: Session, *args: Any) -> None:
        settle(self, *args)

    Session._settle = look_and_forget  # type: ignore[assignment]


# The database ----------------------------------------------------------------------------------------


def _skip_offset() -> None:
    count = "s.next_offset + want.count"
    near = f"(s.next_offset < {_SKIPPED_NEAR} AND {count} >= {_SKIPPED_NEAR})::int"
    _rewrite("pgstreams_store", f"SET next_offset = {count},", f"SET next_offset = {count} + {near},")


def _drop_fence() -> None:
    _rewrite("pgstreams_store", "w.id <= writer AND w.seq = number - 1", "w.id <= writer AND true")


def _rewrite(function: str, old: str, new: str) -> None:
    """Change the text of a function in the database, once for all processes."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [VARIABLE])
        cursor.execute("SELECT pg_get_functiondef(%s::regproc)", [function])
        [(definition,)] = cursor.fetchall()
        if new not in definition:
            if old not in definition:
                raise RuntimeError(f"{function} no longer holds {old!r}, which the defect changes.")
            cursor.execute(definition.replace(old, new))
    connection.close()


_MAKE: dict[str, Callable[[], None]] = {
    "wake-up-dropped": _drop_last_wake_up,
    "announced-early": _announce_early,
    "offset-skipped": _skip_offset,
    "no-fence": _drop_fence,
    "stored-twice": _store_twice,
    "forgotten": _forget,
    "delivered-twice": _deliver_twice,
}
