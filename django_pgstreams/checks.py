"""System checks: what would go wrong later is said at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from . import conf, permissions
from .models import Stream


@register
def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """`PGSTREAMS` holds known names with sound values, and its permission hook exists."""
    problems = conf.problems()
    if problems:
        return [Error(problem, id="pgstreams.E001") for problem in problems]
    try:
        permissions.hook()
    except ImproperlyConfigured as error:
        return [
            Error(
                str(error),
                hint="Name a function (user, stream, action) -> bool by its dotted path.",
                id="pgstreams.E002",
            )
        ]
    return []


@register
def check_database(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Streams are written to a Postgres database (known from the settings: nothing connects here)."""
    using = router.db_for_write(Stream)
    vendor = connections[using].vendor
    if vendor == "postgresql":
        return []
    return [
        Error(
            f"Streams are written to the database alias {using!r}, which is {vendor}, not Postgres.",
            hint="Use django.db.backends.postgresql there, or route the app 'pgstreams' to a Postgres alias.",
            id="pgstreams.E003",
        )
    ]
