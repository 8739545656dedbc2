"""A proxy before the test database, and the Django alias that goes through it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connection

from benchmarks.shared.proxy import Proxy
from tests.aliases import alias

if TYPE_CHECKING:
    from collections.abc import Iterator


class PostgresProxy(Proxy):
    """Before the test database; the Django alias `alias` goes through it."""

    def __init__(self) -> None:
        given = connection.get_connection_params()
        host, port = given.get("host", "localhost"), int(given.get("port", 5432))
        super().__init__(str(Path(host, f".s.PGSQL.{port}")) if host.startswith("/") else (host, port))
        self.alias = ""


P = TypeVar("P", bound=PostgresProxy)


@contextlib.contextmanager
def proxied(proxy: P, **settings: Any) -> Iterator[P]:
    """The proxy, with its alias; as a proxy that works it lets the app go at the end."""
    try:
        with alias("proxied", **through(proxy.port), **settings) as proxy.alias:
            yield proxy
            proxy.come_up()
    finally:
        proxy.close()


def through(port: int) -> dict[str, Any]:
    """Settings of an alias for the test database by way of a port of this machine."""
    return {"ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": str(port)}
