"""The tables as the migrations make them, on Postgres; and nothing at all elsewhere."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connection, connections
from django.db.migrations.recorder import MigrationRecorder

from django_pgstreams.models import Stream
from tests.aliases import alias


def column(statement: str, *parameters: object, using=connection) -> list:
    with using.cursor() as cursor:
        cursor.execute(statement, parameters)
        return [row[0] for row in cursor.fetchall()]


def tables(using=connection) -> list[str]:
    """The app's tables; Django does not list partitions."""
    return sorted(name for name in using.introspection.table_names() if name.startswith("pgstreams_"))


def test_the_migrations_are_in_step_with_the_models(db):
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_chunks_are_partitioned_by_ranges_of_stream_ids(db):
    [key] = column("SELECT pg_get_partkeydef('pgstreams_chunk'::regclass)")
    assert key == "RANGE (stream_id)"
    bounds = column(
        """
        SELECT c.relname || ' ' || pg_get_expr(c.relpartbound, c.oid)
        FROM pg_inherits JOIN pg_class AS c ON c.oid = inhrelid
        WHERE inhparent = 'pgstreams_chunk'::regclass ORDER BY 1
        """
    )
    assert bounds == [
        "pgstreams_chunk_default DEFAULT",
        "pgstreams_chunk_p0 FOR VALUES FROM (MINVALUE) TO ('1000000')",
    ]


def test_the_default_partition_stays_empty(db):
    for key in ("a", "b"):
        Stream.objects.create(key=key).append_many(range(10))
    assert column("SELECT count(*) FROM pgstreams_chunk_p0") == [20]
    assert column("SELECT count(*) FROM pgstreams_chunk_default") == [0]


def test_the_default_partition_takes_what_no_other_does(db):
    """Nothing is refused when nobody has made the next partition in time."""
    stream = Stream.objects.create(id=1_000_000, key="late")
    assert stream.append(1).offset == 0
    assert [chunk.data for chunk in stream.read()] == [1]
    assert column("SELECT count(*) FROM pgstreams_chunk_default") == [1]


def test_chunks_have_one_index_and_no_foreign_key(db):
    indexes = column(
        """
        SELECT tablename || ': ' || indexdef FROM pg_indexes
        WHERE tablename LIKE 'pgstreams_chunk%%' ORDER BY tablename
        """
    )
    assert [index.split(": ")[0] for index in indexes] == [
        "pgstreams_chunk",
        "pgstreams_chunk_default",
        "pgstreams_chunk_p0",
    ]
    assert all('(stream_id, "offset")' in index for index in indexes)
    assert (
        column(
            "SELECT conname FROM pg_constraint WHERE contype = 'f' AND conrelid = 'pgstreams_chunk'::regclass"
        )
        == []
    )


def test_counters_have_room_and_no_index(db):
    assert column("SELECT unnest(reloptions) FROM pg_class WHERE relname = 'pgstreams_stream'") == [
        "fillfactor=50"
    ]
    indexed = column(
        """
        SELECT DISTINCT attname FROM pg_index JOIN pg_attribute AS a
            ON a.attrelid = indrelid AND a.attnum = ANY (indkey)
        WHERE indrelid = 'pgstreams_stream'::regclass ORDER BY 1
        """
    )
    assert indexed == ["id", "key", "owner_id"]


def test_a_row_inserted_by_hand_gets_the_columns_defaults(db):
    column("INSERT INTO pgstreams_stream (key, epoch, metadata) VALUES ('by hand', 'e', '{}') RETURNING id")
    stream = Stream.objects.get(key="by hand")
    assert (stream.state, stream.content_type, stream.next_offset) == ("open", "application/json", 0)
    assert stream.append("hello").offset == 0


@pytest.mark.django_db(transaction=True)
def test_migrating_backwards_removes_the_tables_and_forwards_makes_them_again():
    assert tables() == ["pgstreams_chunk", "pgstreams_stream", "pgstreams_writer"]
    try:
        call_command("migrate", "pgstreams", "zero", verbosity=0)
        assert tables() == []
    finally:
        call_command("migrate", "pgstreams", verbosity=0)
    assert tables() == ["pgstreams_chunk", "pgstreams_stream", "pgstreams_writer"]
    assert Stream.objects.create(key="again").append(1).offset == 0


@pytest.fixture
def sqlite(tmp_path):
    """A second alias, of SQLite, while the test runs."""
    with alias("lite", ENGINE="django.db.backends.sqlite3", NAME=tmp_path / "db.sqlite3") as lite:
        yield connections[lite]


def test_elsewhere_than_on_postgres_migrating_does_nothing(sqlite, django_db_blocker):
    with django_db_blocker.unblock():
        call_command("migrate", database=sqlite.alias, verbosity=0)
        assert ("pgstreams", "0001_initial") in MigrationRecorder(sqlite).applied_migrations()
        assert tables(sqlite) == []
        call_command("migrate", "pgstreams", "zero", database=sqlite.alias, verbosity=0)
        assert ("pgstreams", "0001_initial") not in MigrationRecorder(sqlite).applied_migrations()
