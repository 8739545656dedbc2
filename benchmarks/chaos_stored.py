"""What is stored at the end of a run of `chaos`, read past everything that the product reads by."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import psycopg

from benchmarks.chaos_check import STORED_FIELDS, Tables
from benchmarks.chaos_ledger import stream_of, token_of

_STREAMS = "SELECT id, key, next_offset, state FROM pgstreams_stream"
_CHUNKS = 'SELECT stream_id, "offset", payload FROM pgstreams_chunk ORDER BY stream_id, "offset"'
_ROWS = 10_000


def read_tables(own: psycopg.Connection[Any]) -> Tables:
    """Every stream and every chunk, as they are now."""
    own.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    streams = own.execute(_STREAMS).fetchall()
    numbers = {id_: stream_of(key) for id_, key, _, _ in streams}
    chunks = []
    with own.cursor("chunks", binary=True) as cursor:
        cursor.itersize = _ROWS
        cursor.execute(_CHUNKS)
        while rows := cursor.fetchmany(_ROWS):
            found = [(numbers.get(id_, -1), offset, _token(payload)) for id_, offset, payload in rows]
            chunks.append(np.array(found, STORED_FIELDS))
    own.execute("COMMIT")
    stored = np.concatenate(chunks) if chunks else np.empty(0, STORED_FIELDS)
    return Tables(
        chunks=stored[np.lexsort((stored["offset"], stored["stream"]))],
        tails={numbers[id_]: tail for id_, _, tail, _ in streams},
        states={numbers[id_]: state for id_, _, _, state in streams},
    )


def _token(payload: bytes) -> int:
    try:
        return token_of(json.loads(payload))
    except ValueError:
        return -1
