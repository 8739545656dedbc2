"""Writers for tests, each a process: `python -m tests.writers MODE [STREAM_ID ARGUMENTS]`.

Prints "ready" once connected, then writes when it reads a line; the value of each chunk is its offset.

    quiet    SECONDS PER_SECOND BYTES   raw SQL that advances the counter itself and announces nothing
    appends  PAUSE_SECONDS              Stream.append, one commit each, until another line comes
    commands                            each line is [stream id, Python]; runs it with `stream`, says "done"
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import django
import psycopg

from django_pgstreams import notifier

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
    django.setup()
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


def commands() -> None:
    """Run what is read, line by line."""
    django.setup()
    say("ready")
    for line in sys.stdin:
        stream_id, code = json.loads(line)
        exec(code, {"stream": stream_by_id(stream_id)})
        notifier.close_all()  # what was written is announced, and no session stays
        say("done")


def stream_by_id(stream_id: int) -> Any:
    """The stream, by a Django that is set up."""
    return django.apps.apps.get_model("pgstreams", "Stream").objects.get(pk=stream_id)


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    match mode:
        case "quiet":
            say(quiet(int(rest[0]), float(rest[1]), float(rest[2]), int(rest[3])))
        case "appends":
            say(appends(int(rest[0]), float(rest[1])))
        case "commands":
            commands()
