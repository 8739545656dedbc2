"""Operations that the app's migrations are made of."""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations.special import SeparateDatabaseAndState


class OnPostgres(SeparateDatabaseAndState):
    """Changes the state everywhere and the database only where it is Postgres.

    A project may keep its streams in a second, Postgres database; `migrate` on its others does nothing.
    """

    def database_forwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_forwards(app_label, schema_editor, *states)

    def database_backwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_backwards(app_label, schema_editor, *states)
