"""A database for `scale`: filled at the server, in the product's own tables and with right counters; and what
its sessions cost the server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.shared.postgres import fresh_database

NEW_STREAMS = """
WITH made AS (
    INSERT INTO pgstreams_stream (key, epoch, metadata, created_at)
    SELECT format('scale/%%s', number), md5(number::text), '{}', now()
    FROM generate_series(%(had)s::bigint, %(streams)s::bigint - 1) AS number
    RETURNING id
)
SELECT min(id), max(id) FROM made
"""

APPEND = """
WITH taken AS MATERIALIZED (
    UPDATE pgstreams_stream
    SET next_offset = next_offset + %(chunks)s, appended_at = statement_timestamp()
    WHERE id BETWEEN %(first)s AND %(last)s
    RETURNING id, next_offset - %(chunks)s AS base
)
INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
SELECT id, base + nth, convert_to(format('{"number":%%s,"text":"About as many words"}', base + nth), 'UTF8'),
       statement_timestamp()
FROM (SELECT * FROM taken ORDER BY id) AS taken, generate_series(0, %(chunks)s - 1) AS nth
"""
"""The number in each payload is the chunk's offset."""

RANGE = "SELECT min(id), max(id), sum(next_offset)::bigint FROM pgstreams_stream"
ONE = "SELECT id, next_offset FROM pgstreams_stream WHERE key = %s"
BACKENDS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"


class Database:
    """A new database and its contents, which only grow; nobody announces what is added here."""

    def __init__(self, address: str, connection: psycopg.Connection[Any]) -> None:
        self.address = address
        self.connection = connection

    def add_streams(self, streams: int, chunks_each: int) -> None:
        """Have so many streams; the new ones get so many chunks each. The keys are `scale/0` and so on."""
        [(had,)] = self.connection.execute("SELECT count(*) FROM pgstreams_stream").fetchall()
        if had < streams:
            wanted = {"had": had, "streams": streams}
            [(first, last)] = self.connection.execute(NEW_STREAMS, wanted).fetchall()
            self._append(first, last, chunks_each)

    def add_chunks(self, chunks: int) -> None:
        """Have so many chunks, with those that others appended: as many more in each stream."""
        [(first, last, had)] = self.connection.execute(RANGE).fetchall()
        self._append(first, last, (chunks - had) // (last - first + 1))

    def append(self, key: str) -> tuple[int, int]:
        """Append one chunk to a stream; its offset and number."""
        [(stream_id, offset)] = self.connection.execute(ONE, [key]).fetchall()
        self._append(stream_id, stream_id, 1)
        return offset, offset

    def _append(self, first: int, last: int, chunks_each: int) -> None:
        """To the streams with these ids and all between."""
        self.connection.execute(APPEND, {"first": first, "last": last, "chunks": chunks_each})

    def chunks(self) -> int:
        """How many there are."""
        [(_, _, chunks)] = self.connection.execute(RANGE).fetchall()
        return int(chunks)

    def settle(self) -> None:
        """Have the server do now what it would else do while others are measured."""
        for statement in ("VACUUM ANALYZE pgstreams_stream", "VACUUM ANALYZE pgstreams_chunk", "CHECKPOINT"):
            self.connection.execute(statement)

    def backends(self, application_name: str) -> list[int]:
        """The process ids of the sessions with that name."""
        return [pid for (pid,) in self.connection.execute(BACKENDS, [application_name]).fetchall()]


@contextlib.contextmanager
def new_database(server: str) -> Iterator[Database]:
    """A new database on that server, dropped at the end."""
    with fresh_database(server) as address, psycopg.connect(address, autocommit=True) as connection:
        yield Database(address, connection)


class ServerTime:
    """The processor time of the sessions with one application name, where the server is on this machine."""

    def __init__(self, database: Database, application_name: str) -> None:
        self._database = database
        self._name = application_name
        self._seconds: dict[int, float] = {}
        self.spent_ms()

    def spent_ms(self) -> float | None:
        """What those that are there now have taken since the last call; None if the server is elsewhere."""
        before = self._seconds
        try:
            self._seconds = {pid: _processor_seconds(pid) for pid in self._database.backends(self._name)}
        except OSError:
            return None
        return sum(seconds - before.get(pid, 0.0) for pid, seconds in self._seconds.items()) * 1000


def _processor_seconds(pid: int) -> float:
    process = Path("/proc") / str(pid)
    if process.joinpath("comm").read_text().strip() != "postgres":
        raise ProcessLookupError(pid)
    return int(process.joinpath("schedstat").read_text().split()[0]) / 1e9
