"""Writers for tests, each a process: `python -m tests.writers MODE STREAM_ID [ARGUMENTS]`.

Prints "ready" once connected, then writes when it reads a line; the value of each chunk is its offset.

    quiet    SECONDS PER_SECOND BYTES   raw SQL that advances the counter itself and announces nothing
    appends  PAUSE_SECONDS              Stream.append, one commit each, until another line comes
    command                             each line read is Python, run with `stream` and Django set up
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import django
import psycopg

APPEND = """
WITH taken AS (
    UPDATE pgstreams_stream SET next_offset = next_offset + %(count)s, appended_at = now()
    WHERE id = %(stream)s AND state = 'open' RETURNING next_offset - %(count)s AS first
)
INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at)
SELECT %(stream)s, "offset", convert_to(rpad("offset"::text, greatest(%(bytes)s, 20)), 'UTF8'), now()
FROM taken, LATERAL (SELECT taken.first + n FROM generate_series(0, %(count)s - 1) AS n) AS new ("offset")
"""


def say(what: Any) -> None:
    """Tell whoever started this process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def quiet(stream_id: int, seconds: float, per_second: float, size: int) -> int:
    """Write at a rate, in at most a hundred commits a second; returns how many chunks."""
    with psycopg.connect(os.environ["WRITER_CONNINFO"], autocommit=True) as connection:
        say("ready")
        sys.stdin.readline()
        written = 0
        began = time.monotonic()
        commits = min(per_second, 100.0)
        while (elapsed := time.monotonic() - began) < seconds:
            due = int(elapsed * per_second) + 1 - written
            if due > 0:
                connection.execute(APPEND, {"stream": stream_id, "count": due, "bytes": size})
                written += due
            time.sleep(max(0, (written / per_second) - (time.monotonic() - began), 0.5 / commits))
        return written


def appends(stream_id: int, pause_seconds: float) -> int:
    """One `append` after the other."""
    stream = stream_by_id(stream_id)
    say("ready")
    sys.stdin.readline()
    os.set_blocking(sys.stdin.fileno(), False)
    written = 0
    while not sys.stdin.read(1):
        stream.append(stream.next_offset)
        written += 1
        time.sleep(pause_seconds)
    return written


def command(stream_id: int) -> None:
    """Run each line that is read, and answer it."""
    names: dict[str, Any] = {"stream": stream_by_id(stream_id)}
    say("ready")
    for line in sys.stdin:
        exec(line, names)
        say("done")


def stream_by_id(stream_id: int) -> Any:
    """The stream, with Django set up."""
    django.setup()
    return django.apps.apps.get_model("pgstreams", "Stream").objects.get(pk=stream_id)


if __name__ == "__main__":
    mode, number, *rest = sys.argv[1:]
    match mode:
        case "quiet":
            say(quiet(int(number), float(rest[0]), float(rest[1]), int(rest[2])))
        case "appends":
            say(appends(int(number), float(rest[0])))
        case "command":
            command(int(number))
