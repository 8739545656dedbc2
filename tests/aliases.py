"""Django aliases that tests make."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from django.db import connections
from psycopg.conninfo import conninfo_to_dict

from django_pgstreams import receivers

if TYPE_CHECKING:
    from collections.abc import Iterator

_numbers = itertools.count(1)


def settings_of(address: str) -> dict[str, Any]:
    """The settings that lead to a server's address, of a superuser without a password."""
    given = conninfo_to_dict(address)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": given["host"],
        "PORT": str(given["port"]),
        "NAME": given["dbname"],
        "USER": given["user"],
        "PASSWORD": "",
        "OPTIONS": {},
    }


@contextlib.contextmanager
def alias(name: str, **settings: Any) -> Iterator[str]:
    """An alias with these settings, otherwise those of the test database.

    Its name has a number, so that it is a new one each time: Django keeps what it knows of an alias in each
    thread, and the app's threads outlive a test.
    """
    made = f"{name}_{next(_numbers)}"
    connections.settings[made] = connections.settings["default"] | settings
    try:
        yield made
    finally:
        receivers.release()
        connections[made].close()
        del connections[made]
        del connections.settings[made]
