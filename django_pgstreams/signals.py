"""The app's own signals, for what Django's model signals do not cover.

`chunks_appended` — sent by `append_many()` and `bulk_create()`, once per stream, inside the caller's
transaction; a single append sends Django's `post_save` with `sender=Chunk` instead.
Arguments: `stream`, `chunks` (a list, in order), `using`.

`stream_closed` — sent when a stream ends, inside the caller's transaction. Arguments: `stream` (with its
new state and reason), `using`.

Both have `sender=Stream`. Act on them with `transaction.on_commit`: the transaction may roll back yet.
"""

from __future__ import annotations

from django.dispatch import Signal

chunks_appended = Signal()
stream_closed = Signal()
