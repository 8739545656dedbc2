"""Turns DATABASE_URL into Django's database settings."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

EXAMPLE = "postgresql://user:password@localhost:5432/name"

# libpq's names → Django's. Every other parameter of libpq goes to OPTIONS.
DJANGO_NAMES = {
    "dbname": "NAME",
    "user": "USER",
    "password": "PASSWORD",
    "host": "HOST",
    "port": "PORT",
}


def database_settings(url: str | None) -> dict[str, Any]:
    """Return the entry of DATABASES: that server if `url` is given, else the embedded one.

    Raises ImproperlyConfigured for a URL that libpq cannot read or that names no database.
    """
    if not url:
        return {"ENGINE": "example_project.embedded", "NAME": "postgres"}
    try:
        parameters = conninfo_to_dict(url)
    except ProgrammingError:
        # libpq's message may quote the URL, hence the password: neither is shown.
        raise ImproperlyConfigured(
            f"DATABASE_URL is not the address of a Postgres database, such as {EXAMPLE}"
        ) from None
    settings: dict[str, Any] = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {}}
    for name, value in parameters.items():
        if name in DJANGO_NAMES:
            settings[DJANGO_NAMES[name]] = value
        else:
            settings["OPTIONS"][name] = value
    port = settings.get("PORT", "")
    if port.strip("0123456789,"):
        raise ImproperlyConfigured(f"DATABASE_URL: the port {port!r} is not a number")
    if not settings.get("NAME") and "service" not in settings["OPTIONS"]:
        raise ImproperlyConfigured(f"DATABASE_URL names no database; write one such as {EXAMPLE}")
    return settings
