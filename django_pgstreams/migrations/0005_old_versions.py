"""Appends that stay fast while a snapshot is held, and old versions of the streams' rows with it.

`pgstreams_append_many(…)` is how the ORM appends; no other program should call it. The functions of before
are replaced where they were made without this. With only a tenth of each page given to rows that come from
elsewhere, few streams share a page: the versions of each stay together, and few of them need index entries.
"""

from __future__ import annotations

from django.db import migrations

from django_pgstreams.migrations import _functions
from django_pgstreams.migrations._operations import OnPostgres

FILLFACTOR = "ALTER TABLE pgstreams_stream SET (fillfactor = 10)"
FORMER_FILLFACTOR = "ALTER TABLE pgstreams_stream SET (fillfactor = 50)"


class Migration(migrations.Migration):
    dependencies = [("pgstreams", "0004_store_function")]

    operations = [
        OnPostgres(
            database_operations=[
                migrations.RunSQL(FILLFACTOR, FORMER_FILLFACTOR),
                _functions.make("pgstreams_append", _functions.APPEND),
                _functions.make("pgstreams_store", _functions.STORE),
                _functions.make("pgstreams_append_many", _functions.APPEND_MANY, _functions.DROP_APPEND_MANY),
            ]
        )
    ]
