"""What the tests of `StreamWriter` share: rows that are held, what is stored, and what a writer leaves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import psycopg

from django_pgstreams.models import Stream
from tests.following import connect, query


def stored(stream: Stream) -> list[Any]:
    """The values of a JSON stream as another session sees them; fails unless they are contiguous."""
    rows = query(
        'SELECT next_offset, "offset", payload FROM pgstreams_stream AS s '
        "LEFT JOIN pgstreams_chunk ON stream_id = s.id WHERE s.id = %s ORDER BY 2",
        stream.pk,
    )
    tail = rows[0][0]
    assert [offset for _, offset, _ in rows] == (list(range(tail)) or [None])
    return [json.loads(bytes(payload)) for _, offset, payload in rows if offset is not None]


@contextlib.contextmanager
def held(*streams: Stream) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that holds the rows of streams; it ends with the block, or before by the test."""
    with connect() as own:
        own.execute("BEGIN")
        for stream in streams:
            own.execute("SELECT FROM pgstreams_stream WHERE id = %s FOR UPDATE", (stream.pk,))
        yield own
        own.execute("ROLLBACK")


def is_stored(stream: Stream, count: int) -> bool:
    """Whether so many chunks are stored."""
    [(tail,)] = query("SELECT next_offset FROM pgstreams_stream WHERE id = %s", stream.pk)
    return bool(tail >= count)


def writer_rows() -> list[tuple[Any, ...]]:
    """The rows of this database's writers: id, seq, batch."""
    return query("SELECT id, seq, batch FROM pgstreams_writer ORDER BY used_at")


def make_streams(count: int, name: str = "stream", **fields: Any) -> list[Stream]:
    """New streams."""
    return [Stream.objects.create(key=f"{name}/{number}", **fields) for number in range(count)]
