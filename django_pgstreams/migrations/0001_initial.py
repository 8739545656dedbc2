"""Streams, and their chunks in a table that is partitioned by ranges of stream ids.

Stream ids grow with time, so old partitions can be dropped instead of deleted from. Partitions are few and
large; the default one should stay empty.
"""

from __future__ import annotations

import django.db.models.deletion
import django.db.models.functions.datetime
from django.conf import settings
from django.db import migrations, models

import django_pgstreams.codec
import django_pgstreams.keys
import django_pgstreams.metadata
import django_pgstreams.models
from django_pgstreams.migrations._operations import OnPostgres

STREAM = migrations.CreateModel(
    name="Stream",
    fields=[
        (
            "id",
            models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID"),
        ),
        (
            "key",
            models.CharField(
                help_text="A unique name, such as chat/17/answer/3.",
                max_length=255,
                unique=True,
                validators=[django_pgstreams.keys.check_key],
                verbose_name="key",
            ),
        ),
        (
            "epoch",
            models.CharField(default=django_pgstreams.models.new_epoch, editable=False, max_length=36),
        ),
        (
            "content_type",
            models.CharField(
                db_default="application/json",
                default="application/json",
                help_text="application/json, text/…, or anything else for bytes.",
                max_length=127,
                validators=[django_pgstreams.codec.check_content_type],
                verbose_name="content type",
            ),
        ),
        (
            "metadata",
            django_pgstreams.metadata.MetadataField(blank=True, default=dict, verbose_name="metadata"),
        ),
        (
            "state",
            models.CharField(
                choices=[
                    ("open", "open"),
                    ("completed", "completed"),
                    ("failed", "failed"),
                    ("cancelled", "cancelled"),
                ],
                db_default="open",
                default="open",
                editable=False,
                max_length=9,
                verbose_name="state",
            ),
        ),
        (
            "reason",
            models.TextField(db_default="", default="", editable=False, verbose_name="reason"),
        ),
        (
            "next_offset",
            models.BigIntegerField(db_default=0, default=0, editable=False, verbose_name="tail"),
        ),
        (
            "first_offset",
            models.BigIntegerField(db_default=0, default=0, editable=False, verbose_name="first offset"),
        ),
        (
            "created_at",
            models.DateTimeField(
                db_default=django.db.models.functions.datetime.Now(),
                editable=False,
                verbose_name="created",
            ),
        ),
        (
            "appended_at",
            models.DateTimeField(editable=False, null=True, verbose_name="last append"),
        ),
        ("closed_at", models.DateTimeField(editable=False, null=True, verbose_name="closed")),
        ("expires_at", models.DateTimeField(blank=True, null=True, verbose_name="expires")),
        (
            "owner",
            models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="+",
                to=settings.AUTH_USER_MODEL,
                verbose_name="owner",
            ),
        ),
    ],
    options={"verbose_name": "stream", "verbose_name_plural": "streams"},
)

CHUNK = migrations.CreateModel(
    name="Chunk",
    fields=[
        (
            "pk",
            models.CompositePrimaryKey(
                "stream_id",
                "offset",
                blank=True,
                editable=False,
                primary_key=True,
                serialize=False,
            ),
        ),
        (
            "stream",
            models.ForeignKey(
                db_constraint=False,
                db_index=False,
                on_delete=django.db.models.deletion.DO_NOTHING,
                related_name="chunks",
                to="pgstreams.stream",
            ),
        ),
        ("offset", models.BigIntegerField()),
        ("payload", models.BinaryField()),
        (
            "created_at",
            models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False),
        ),
    ],
    options={"base_manager_name": "objects", "verbose_name": "chunk", "verbose_name_plural": "chunks"},
)

OPEN_STREAMS = migrations.AddIndex(
    model_name="stream",
    index=models.Index(condition=models.Q(("state", "open")), fields=["id"], name="pgstreams_stream_open"),
)

# Half of each page stays free, so that counter updates stay on it and touch no index.
STREAM_FILLFACTOR = "ALTER TABLE pgstreams_stream SET (fillfactor = 50)"

CHUNK_TABLE = """
CREATE TABLE pgstreams_chunk (
    stream_id bigint NOT NULL,
    "offset" bigint NOT NULL,
    payload bytea NOT NULL,
    created_at timestamp with time zone NOT NULL DEFAULT statement_timestamp(),
    CONSTRAINT pgstreams_chunk_pkey PRIMARY KEY (stream_id, "offset")
) PARTITION BY RANGE (stream_id);
CREATE TABLE pgstreams_chunk_p0 PARTITION OF pgstreams_chunk
    FOR VALUES FROM (MINVALUE) TO (1000000);
CREATE TABLE pgstreams_chunk_default PARTITION OF pgstreams_chunk DEFAULT;
"""

DROP_CHUNK_TABLE = "DROP TABLE pgstreams_chunk"


class Migration(migrations.Migration):
    initial = True

    dependencies = [migrations.swappable_dependency(settings.AUTH_USER_MODEL)]

    operations = [
        OnPostgres(
            database_operations=[
                STREAM,
                migrations.RunSQL(STREAM_FILLFACTOR, migrations.RunSQL.noop),
            ],
            state_operations=[STREAM],
        ),
        OnPostgres(
            database_operations=[migrations.RunSQL(CHUNK_TABLE, DROP_CHUNK_TABLE)],
            state_operations=[CHUNK],
        ),
        OnPostgres(database_operations=[OPEN_STREAMS], state_operations=[OPEN_STREAMS]),
    ]
