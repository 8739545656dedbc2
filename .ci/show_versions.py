"""Print the versions of a test run, and fail unless they are the ones it is meant to have.

Arguments: the expected Python, Django and Postgres, each as a prefix such as 3.11.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import django
import psycopg
from django.db import connection


def main(expected_python: str, expected_django: str, expected_postgres: str) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version")
        (server,) = cursor.fetchone()
    psycopg_version = f"{psycopg.__version__} ({psycopg.pq.__impl__})"
    print(f"Python {platform.python_version()}, Django {django.__version__}, ", end="")
    print(f"psycopg {psycopg_version}, ", end="")
    print(f"Channels {importlib.metadata.version('channels')}, Postgres {server}", flush=True)
    for found, expected in [
        (platform.python_version(), expected_python),
        (django.__version__, expected_django),
        (server, expected_postgres),
    ]:
        if not f"{found}.".startswith(f"{expected}."):
            sys.exit(f"This run was to have {expected}, but has {found}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
