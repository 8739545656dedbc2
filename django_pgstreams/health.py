"""The state of streaming in this process, one small object for each database alias.

Invariant: asking is cheap and changes nothing: no connection is opened, no thread started, nothing awaited.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from django.db import DEFAULT_DB_ALIAS

from . import committer, hub, listener, notifier, polling


@dataclass(frozen=True, slots=True)
class Health:
    """One process's view of one database, at one moment."""

    using: str
    listening: listener.State
    """`"yes"`; `"no"` (nobody follows anything, or the connection is lost); `"deaf"`, as behind a pooler."""
    connected_since: datetime.datetime | None
    """When the present listening connection began to listen."""
    last_wake_up: datetime.datetime | None
    """When a wake-up was last heard from the database."""
    last_poll: datetime.datetime | None
    """When all followed streams were last looked at, wake-up or not."""
    found_only_by_poll: int
    """How often a poll found new chunks of a stream of which no wake-up told, also not late."""
    failed_flushes: int
    """How often wake-ups could not be sent, and were kept for another try."""
    pending_wake_ups: int
    """Streams whose wake-ups wait to be sent."""
    pending_append_bytes: int
    """What `StreamWriter`s hold that is not stored yet: payloads, and some 400 bytes for each append."""
    subscribers: int
    """Readers that follow a stream, each socket's subscriptions counted singly."""


def get(using: str = DEFAULT_DB_ALIAS) -> Health:
    """The state of this process with a database alias; from any thread or event loop."""
    heard = listener.known(using)
    sent = notifier.known(using)
    stores = committer.known(using)
    polls = polling.tally(using)
    return Health(
        using=using,
        listening=heard.listening if heard else "no",
        connected_since=heard.connected_since if heard else None,
        last_wake_up=heard.last_wake_up if heard else None,
        last_poll=polls.last_poll,
        found_only_by_poll=polls.found,
        failed_flushes=sent.failed_flushes if sent else 0,
        pending_wake_ups=sent.pending if sent else 0,
        pending_append_bytes=stores.pending_bytes if stores else 0,
        subscribers=hub.subscribers(using),
    )
