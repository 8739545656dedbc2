"""System checks: what would go wrong later is said at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register
from django.core.checks import Warning as CheckWarning
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


@register
def check_listen_database(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """`PGSTREAMS["LISTEN_DATABASE"]` is an alias that may lead to the streams' database."""
    if conf.problems():
        return []  # said above
    alias, using = conf.get().LISTEN_DATABASE, router.db_for_write(Stream)
    if alias in ("", using):
        return []
    if alias not in connections.settings:
        problem = f"PGSTREAMS['LISTEN_DATABASE'] is {alias!r}, an alias that DATABASES does not have."
        return [Error(problem, hint=f"It has {', '.join(connections.settings)}.", id="pgstreams.E004")]
    if connections[alias].vendor != "postgresql":
        problem = f"PGSTREAMS['LISTEN_DATABASE'] is {alias!r}, which is {connections[alias].vendor}."
        return [Error(problem, hint="Only Postgres can notify.", id="pgstreams.E004")]
    name, own_name = (connections[one].settings_dict["NAME"] for one in (alias, using))
    if name == own_name or not name or not own_name:
        return []
    return [
        CheckWarning(
            f"PGSTREAMS['LISTEN_DATABASE'] is {alias!r}, whose NAME is {name!r}, and streams are written to "
            f"{using!r}, whose NAME is {own_name!r}.",
            hint="Both must lead to the same database. Silence this if it has two names, as poolers can do.",
            id="pgstreams.W001",
        )
    ]
