"""The Django backend: Postgres as usual, but each new connection first makes sure that it runs."""

from __future__ import annotations

import os
from typing import Any

from django.db.backends.postgresql import base, client

from example_project.embedded.cluster import PORT, Cluster, package_binaries
from example_project.embedded.postgres import SUPERUSER
from example_project.embedded.server import ensure_running


class DatabaseClient(client.DatabaseClient):
    """`manage.py dbshell`, with the package's own psql."""

    executable_name = os.fspath(package_binaries() / "psql")

    def runshell(self, parameters: list[str]) -> None:
        ensure_running(self.connection.cluster)
        super().runshell(parameters)


class DatabaseWrapper(base.DatabaseWrapper):
    """ENGINE "example_project.embedded". HOST, PORT and USER are the embedded server's."""

    client_class = DatabaseClient

    def __init__(self, settings_dict: dict[str, Any], alias: str = "default") -> None:
        self.cluster = Cluster.of_this_checkout()
        settings_dict.update(HOST=os.fspath(self.cluster.data), PORT=str(PORT), USER=SUPERUSER)
        super().__init__(settings_dict, alias)

    def get_connection_params(self) -> dict[str, Any]:
        ensure_running(self.cluster)
        return super().get_connection_params()
