"""`pgstreams_store(…)`: how a `StreamWriter` stores a batch; no other program should call it.

A function, so that the server keeps the plans of its statements, also behind a pooler: as one statement of
the client's, a batch of fifty takes twice as long.
"""

from __future__ import annotations

from django.db import migrations

from django_pgstreams.migrations import _functions
from django_pgstreams.migrations._operations import OnPostgres


class Migration(migrations.Migration):
    dependencies = [("pgstreams", "0003_append_function")]

    operations = [
        OnPostgres(
            database_operations=[
                _functions.make("pgstreams_store", _functions.STORE, _functions.DROP_STORE),
            ]
        )
    ]
