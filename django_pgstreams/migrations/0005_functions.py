"""Functions whose plans are kept, and stay good whatever the statistics say (see `_functions`).

`pgstreams_append_many(…)` is how the ORM appends, `pgstreams_pages(…)` how all readers read; no other program
should call them. The functions of before are replaced where they were made otherwise.
"""

from __future__ import annotations

from django.db import migrations

from django_pgstreams.migrations import _functions
from django_pgstreams.migrations._operations import OnPostgres


class Migration(migrations.Migration):
    dependencies = [("pgstreams", "0004_store_function")]

    operations = [
        OnPostgres(
            database_operations=[
                _functions.make("pgstreams_append", _functions.APPEND),
                _functions.make("pgstreams_store", _functions.STORE),
                _functions.make("pgstreams_append_many", _functions.APPEND_MANY, _functions.DROP_APPEND_MANY),
                _functions.make("pgstreams_pages", _functions.PAGES, _functions.DROP_PAGES),
            ]
        )
    ]
