"""What is open and on its way when a process forks stays the parent's alone (the program is `tests.forking`).

Over TLS, where any byte that a child wrote to an inherited connection, be it a farewell, would break it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.debian_postgres import migrate
from tests.following import PROJECT_ROOT, environment
from tests.forking import APPENDS, CHILDREN, MARKS

if TYPE_CHECKING:
    from tests.debian_postgres import DebianPostgres

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork"),
]
_BROKEN = re.compile(r"SSL error.*|invalid.*")


@pytest.fixture(scope="module")
def database(debian_postgres: DebianPostgres) -> str:
    name = debian_postgres.new_database()
    migrate(debian_postgres.url(name))
    return name


def make_stream(own: psycopg.Connection[Any], key: str) -> int:
    """A new stream of a database that Django does not know here; its id."""
    [(stream_id,)] = own.execute(
        "INSERT INTO pgstreams_stream (key, epoch, content_type, metadata, state, reason, next_offset, "
        "first_offset, created_at) VALUES (%s, 'once', 'application/json', '{}', 'open', '', 0, 0, now()) "
        "RETURNING id",
        [key],
    )
    return int(stream_id)


def values(own: psycopg.Connection[Any], stream_id: int) -> list[Any]:
    """What a stream holds, in order; fails unless its offsets have no hole."""
    rows = own.execute(
        'SELECT "offset", payload FROM pgstreams_chunk WHERE stream_id = %s ORDER BY 1', [stream_id]
    ).fetchall()
    assert [offset for offset, _ in rows] == list(range(len(rows)))
    return [json.loads(payload) for _, payload in rows]


@pytest.mark.parametrize("ending", ["at once", "sys.exit", "multiprocessing"])
def test_forks_in_the_middle_of_everything_disturb_nothing(debian_postgres, database, ending):
    """The children end without a word, by the interpreter's whole shutdown, or by multiprocessing's."""
    with debian_postgres.connect(database) as own:
        own.execute("LISTEN pgstreams")
        followed, written = (make_stream(own, f"{ending}/{name}") for name in ("followed", "written"))
        before = len(debian_postgres.log)
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-m", "tests.forking", str(followed), str(written), ending],
            env=environment(DATABASE_URL=debian_postgres.url(database)),
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.stderr == ""
        assert ended.returncode == 0
        children = {f"child {number}" for number in range(CHILDREN)}
        assert sorted(values(own, followed)) == sorted({"parent", *children, "parent again"})
        stored = values(own, written)
        assert {value: stored.count(value) for value in children} == dict.fromkeys(children, APPENDS)
        assert len(stored) > 100 + CHILDREN * APPENDS
        words = [word for note in own.notifies(timeout=0.5) for word in note.payload.split()]
        marks = [word for word in words if int(word.split(":")[0]) >= MARKS]
        # What waited in the parent's buffer at a fork is announced by the parent, and by nobody else.
        assert sorted(marks) == [f"{MARKS + number}:1" for number in range(CHILDREN)]
    assert _BROKEN.findall(debian_postgres.log[before:]) == []
