"""What happens when chunks are stored and streams end: an announcement after the commit.

Invariant: nothing is announced before its transaction has committed, nor when it rolls back (savepoints
included), and always on the alias that the transaction ran on.
"""

from __future__ import annotations

from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import NO_DB_ALIAS

from . import committer, hub, listener, notifier, store
from .buffer import Batch, WakeUp
from .models import Chunk, Stream


def chunk_saved(
    sender: type[Chunk], instance: Chunk, created: bool, raw: bool, using: str, **kwargs: Any
) -> None:
    """`post_save` of a chunk. Fixtures (`raw`) announce nothing; the poll finds them."""
    if created and not raw:
        _announce(using, instance.stream_id, instance.offset + 1)


def chunks_appended(
    sender: type[Stream], stream: Stream, chunks: list[Chunk], using: str, **kwargs: Any
) -> None:
    """The bulk paths: one announcement for the whole run."""
    _announce(using, stream.pk, chunks[-1].offset + 1)


def stream_closed(sender: type[Stream], stream: Stream, using: str, **kwargs: Any) -> None:
    """The tail of a stream does not move when it ends, so the wake-up is marked."""
    _announce(using, stream.pk, stream.next_offset, changed=True)


def stream_deleting(sender: type[Stream], instance: Stream, using: str, **kwargs: Any) -> None:
    """`pre_delete`, sent on every path: remove the chunks, with appends locked out until the commit."""
    store.delete_chunks(using, instance.pk)
    _announce(using, instance.pk, instance.next_offset, changed=True)


def maintenance_connected(sender: Any, connection: Any, **kwargs: Any) -> None:
    """Django, outside its aliases, creates or drops a database: let go of ours, or the drop would fail."""
    if connection.alias == NO_DB_ALIAS:
        release()


def celery_child_ends(**kwargs: Any) -> None:
    """`worker_process_shutdown` of Celery, which ends a worker's child without Python's exit hooks."""
    release()


def release() -> None:
    """Disconnect everything that the app keeps open in this process; all of it comes back when needed."""
    committer.close_all()
    notifier.close_all()
    hub.close_all()
    listener.close_all()


def _announce(using: str, stream_id: int, tail: int, *, changed: bool = False) -> None:
    wake_up = WakeUp(stream_id, tail, changed)

    def announce() -> None:
        hub.wake(using, Batch((wake_up,), everything=False))
        notifier.announce(using, (wake_up,))

    if connections[using].connection is None:
        announce()  # no transaction can be open, and none is worth a session: a `StreamWriter` was here
        return
    # Robust: an announcement that fails must not keep the project's own hooks from running.
    transaction.on_commit(announce, using=using, robust=True)
