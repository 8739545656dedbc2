"""What the writers of `django_pgstreams.writer` leave in the database to settle commits without a reply.

A plain table: no part of a project should query it, dump it or show it.
"""

from __future__ import annotations

from django.db import migrations

from django_pgstreams.migrations._operations import OnPostgres

# Each batch rewrites its writer's row: room on the page, and no index but the key, keep that in place.
WRITER_TABLE = """
CREATE TABLE pgstreams_writer (
    id uuid PRIMARY KEY,
    seq bigint NOT NULL DEFAULT 0,
    batch bigint NOT NULL DEFAULT 0,
    streams bigint[] NOT NULL DEFAULT '{}',
    bases bigint[] NOT NULL DEFAULT '{}',
    used_at timestamp with time zone NOT NULL DEFAULT statement_timestamp()
) WITH (fillfactor = 10)
"""

DROP_WRITER_TABLE = "DROP TABLE pgstreams_writer"


class Migration(migrations.Migration):
    dependencies = [("pgstreams", "0001_initial")]

    operations = [OnPostgres(database_operations=[migrations.RunSQL(WRITER_TABLE, DROP_WRITER_TABLE)])]
