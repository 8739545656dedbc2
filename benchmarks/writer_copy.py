"""What Postgres takes in through psycopg at the most: `COPY … FROM STDIN`, one connection.

Arguments: the database, and the seconds. The table has the chunks' columns and key, and the rows their
payloads, each encoded as it is sent. It says how many rows were committed, in which time, with which cores.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count

import psycopg

from benchmarks.shared.talking import say

STREAMS = 50
ROWS = 500
"""In each commit."""
TABLE = """
CREATE TABLE copied (
    stream_id bigint NOT NULL,
    "offset" bigint NOT NULL,
    payload bytea NOT NULL,
    created_at timestamp with time zone NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (stream_id, "offset")
)
"""
COPY = 'COPY copied (stream_id, "offset", payload) FROM STDIN (FORMAT BINARY)'
TEXT = "about a token"


def main(database: str, seconds: float) -> None:
    with psycopg.connect(database) as connection:
        connection.execute(TABLE)
        connection.commit()
        cpu, began = time.process_time(), time.monotonic()
        rows = copy(connection, began + seconds)
        took = time.monotonic() - began
        say({"count": rows, "seconds": took, "cores": (time.process_time() - cpu) / took})


def copy(connection: psycopg.Connection, until: float) -> int:
    """Commit rows until that time (monotonic seconds), and return how many."""
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    stored = 0
    numbers = count()
    while time.monotonic() < until:
        with connection.cursor() as cursor, cursor.copy(COPY) as rows:
            rows.set_types(["int8", "int8", "bytea"])
            for _ in range(ROWS):
                number, place = divmod(next(numbers), STREAMS)
                data = {"stream": place, "number": number, "at": time.monotonic_ns(), "text": TEXT}
                rows.write_row((place + 1, number, encode(data).encode()))
        connection.commit()
        stored += ROWS
    return stored


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
