"""Commands that have nothing to do with streams connect to nothing, ask nothing, and end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.following import PROJECT_ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from tests.debian_postgres import DebianPostgres

pytestmark = pytest.mark.once

COMMANDS = [
    # With the connections that Django opens, here and in a project without streams.
    (["check"], 0),
    (["collectstatic", "--noinput"], 0),
    (["makemigrations", "--check", "--dry-run"], 1),
    (["migrate"], 1),
    (["shell", "--no-imports", "--command", "from django_pgstreams.hub import subscribe"], 0),
]


def test_commands_open_no_connection_of_their_own_and_ask_for_no_table_that_is_missing(
    debian_postgres: DebianPostgres, tmp_path: Path
) -> None:
    """In this order, on a database that is empty at first."""
    database = debian_postgres.new_database()
    variables = {
        "DATABASE_URL": debian_postgres.url(database),
        "DJANGO_SETTINGS_MODULE": "tests.served_settings",
        "SERVED_SETTINGS": json.dumps({"STATIC_ROOT": str(tmp_path)}),
    }
    for command, connections in COMMANDS:
        before = len(debian_postgres.log)
        subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=PROJECT_ROOT,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=60,  # a thread that is left over would make it wait for ever
        )
        logged = [line for line in debian_postgres.log[before:].splitlines() if f"[{database} " in line]
        assert sum("connection authorized" in line for line in logged) == connections, command
        assert [line for line in logged if re.search("ERROR|pgstreams-", line)] == [], command
