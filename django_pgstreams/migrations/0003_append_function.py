"""`pgstreams_append(key, payload)`: an append for `psql` and for programs in other languages.

It does what `Stream.append` does, checks of the payload included, in the caller's transaction and with the
caller's rights, and returns the offset. The relay announces it (`manage.py pgstreams relay`).
"""

from __future__ import annotations

from django.db import migrations

from django_pgstreams.migrations import _functions
from django_pgstreams.migrations._operations import OnPostgres


class Migration(migrations.Migration):
    dependencies = [("pgstreams", "0002_writer")]

    operations = [
        OnPostgres(
            database_operations=[
                _functions.make("pgstreams_append", _functions.APPEND, _functions.DROP_APPEND),
            ]
        )
    ]
