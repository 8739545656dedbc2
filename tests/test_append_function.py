"""`pgstreams_append`, for programs without Django: an append like any other."""

from __future__ import annotations

import psycopg
import pytest
from django.core.management import call_command
from django.db import transaction
from psycopg import errors

from django_pgstreams import pages, sql
from django_pgstreams.exceptions import InvalidPayload
from django_pgstreams.models import Chunk, Stream
from tests.concurrency import run_all, start
from tests.following import connect, query
from tests.waiting import wait_until

APPEND = "SELECT pgstreams_append(%s, %s)"

ACCEPTED = [
    ("application/json", b'{"by": "SQL"}'),
    ("application/json", b' [1, 2.50, "a\\u0000b", null, true, "\\ud83d\\ude00"]\n'),
    ("application/json", b'"\\\\ud800"'),
    ("application/json", b'"\\\\\\\\ud800 \\n\\\\u0041 \\uD83D\\uDE00\\\\\\ud83d\\ude00"'),
    ("application/json", '{"π": "ж€😀"}'.encode()),
    ("application/json; charset=utf-8", b"17"),
    ("Application/JSON", b"17"),
    ("application/problem+json", b"{}"),
    ("text/plain", b""),
    ("text/plain", b"NaN"),
    ("text/plain; charset=utf-8", "ж€😀".encode()),
    ("text/plain", "NUL \0 and \\000 and \\x00 ж\0".encode()),
    ("application/octet-stream", b"\x00\xff\x80"),
    ("application/jsonlines", b"\xff"),
    ("image/png", b""),
]
REFUSED = [
    ("application/json", b"NaN", errors.InvalidTextRepresentation),
    ("application/json", b"[Infinity]", errors.InvalidTextRepresentation),
    ("application/json", b"", errors.InvalidTextRepresentation),
    ("application/json", b"{'a': 1}", errors.InvalidTextRepresentation),
    ("application/json", b"1 2", errors.InvalidTextRepresentation),
    ("application/json", b'"\xff"', errors.CharacterNotInRepertoire),
    ("application/json", b'"\x00"', errors.CharacterNotInRepertoire),
    ("application/json", b'"\xed\xa0\x80"', errors.CharacterNotInRepertoire),
    ("application/json", b'"\\ud800"', errors.InvalidTextRepresentation),
    ("application/json", b'"\\uDE00"', errors.InvalidTextRepresentation),
    ("application/json", b'"\\\\\\ud800"', errors.InvalidTextRepresentation),
    ("application/json", b'"\\ud83d\\\\\\ude00"', errors.InvalidTextRepresentation),
    ("application/json", b'"\\ude00\\ud83d"', errors.InvalidTextRepresentation),
    ("application/problem+json ; a=b", b"oops", errors.InvalidTextRepresentation),
    ("text/plain", b"\xff", errors.CharacterNotInRepertoire),
    ("text/plain", b"a\0\xff", errors.CharacterNotInRepertoire),
    ("TEXT/plain", b"\xc3", errors.CharacterNotInRepertoire),
    ("text/plain", b"\xc3\0", errors.CharacterNotInRepertoire),
]


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="sql/1")


def append(key: str | None, payload: bytes | None = b"1") -> int:
    return query(APPEND, key, payload)[0][0]


def test_it_appends_at_the_tail_and_returns_the_offset(stream):
    stream.append("first")
    assert [append("sql/1", b'"second"'), append("sql/1", b'"third"')] == [1, 2]
    assert stream.append("fourth").offset == 3
    assert [chunk.data for chunk in stream.read()] == ["first", "second", "third", "fourth"]


def test_a_chunk_has_the_time_of_the_append(stream):
    append("sql/1")
    stream.refresh_from_db()
    assert stream.appended_at == Chunk.objects.get(stream=stream).created_at
    assert stream.appended_at >= stream.created_at


def test_names_can_be_given(stream):
    assert query("SELECT pgstreams_append(payload => '{}', key => 'sql/1')") == [(0,)]


@pytest.mark.parametrize(("content_type", "payload"), ACCEPTED)
def test_what_the_app_stores_it_stores_unchanged(live, content_type, payload):
    stream = Stream.objects.create(key="accepted", content_type=content_type)
    Chunk.objects.create(stream=stream, payload=payload)
    assert append("accepted", payload) == 1
    assert [bytes(chunk.payload) for chunk in stream.read()] == [payload] * 2


@pytest.mark.parametrize(("content_type", "payload", "error"), REFUSED)
def test_what_the_app_refuses_it_refuses(live, content_type, payload, error):
    stream = Stream.objects.create(key="refused", content_type=content_type)
    with pytest.raises(InvalidPayload):
        Chunk.objects.create(stream=stream, payload=payload)
    with pytest.raises(error):
        append("refused", payload)
    assert Stream.objects.get(key="refused").next_offset == 0


def test_a_missing_stream_is_named(live):
    with pytest.raises(errors.NoDataFound, match="stream 'it''s/not/there' does not exist") as caught:
        append("it's/not/there")
    assert "Create it first" in caught.value.diag.message_hint
    with pytest.raises(errors.NoDataFound, match="stream NULL does not exist"):
        append(None)


def test_no_payload_is_refused(stream):
    with pytest.raises(errors.NotNullViolation):
        append("sql/1", None)


@pytest.mark.parametrize(("reason", "detail"), [("", "No reason was given."), ("out of disk", "out of disk")])
def test_a_stream_that_has_ended_takes_nothing(stream, reason, detail):
    stream.fail(reason)
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="stream 'sql/1' is failed") as caught:
        append("sql/1")
    assert caught.value.diag.message_detail == detail
    assert "create another" in caught.value.diag.message_hint
    assert Stream.objects.get(pk=stream.pk).next_offset == 0


def test_a_stray_row_in_the_way_is_stepped_over(stream):
    stream.append("first")
    for offset in (1, 2, 7):
        query("INSERT INTO pgstreams_chunk VALUES (%s, %s, %s)", stream.pk, offset, b'"stray"')
    assert append("sql/1", b'"later"') == 8
    assert Stream.objects.get(pk=stream.pk).next_offset == 9
    assert stream.append("last").offset == 9


def test_it_is_part_of_the_callers_transaction(stream):
    with connect() as own:
        with own.transaction(force_rollback=True):
            assert own.execute(APPEND, ("sql/1", b"1")).fetchone() == (0,)
            assert own.execute(APPEND, ("sql/1", b"2")).fetchone() == (1,)
        assert Stream.objects.get(pk=stream.pk).next_offset == 0
        assert own.execute(APPEND, ("sql/1", b"3")).fetchone() == (0,)


def test_a_refusal_can_be_rolled_back_to_a_savepoint(stream):
    with connect() as own, own.transaction():
        own.execute(APPEND, ("sql/1", b"1"))
        with pytest.raises(psycopg.DataError), own.transaction():
            own.execute(APPEND, ("sql/1", b"NaN"))
        own.execute(APPEND, ("sql/1", b"2"))
    assert [chunk.data for chunk in stream.read()] == [1, 2]


def test_it_waits_for_whoever_holds_the_stream(stream):
    with transaction.atomic():
        stream.append("first")
        waiting = start(append, "sql/1", b'"second"')
        wait_until(waits_in_sql, "the call waits for the row")
        assert not waiting.done()
    assert waiting.result(30) == 1


def waits_in_sql() -> list:
    return query(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        "AND query LIKE 'SELECT pgstreams_append%%'"
    )


def test_what_ends_while_it_waits_takes_nothing(stream):
    with transaction.atomic():
        stream.close()
        waiting = start(append, "sql/1")
        wait_until(waits_in_sql, "the call waits for the row")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is completed"):
        waiting.result(30)


def test_writers_of_both_kinds_share_a_stream_without_holes_or_doubles(stream):
    def by_sql(name):
        with connect() as own:
            return [own.execute(APPEND, ("sql/1", b'"%s"' % name)).fetchone()[0] for _ in range(100)]

    def by_the_app():
        mine = Stream.objects.get(pk=stream.pk)
        return [mine.append("app").offset for _ in range(100)]

    offsets = run_all(lambda: by_sql(b"a"), lambda: by_sql(b"b"), by_the_app)
    assert sorted(offset for own in offsets for offset in own) == list(range(300))
    assert all(own == sorted(own) for own in offsets)
    stored = list(stream.read())
    assert [chunk.offset for chunk in stored] == list(range(300))
    for own, name in zip(offsets, ("a", "b", "app"), strict=True):
        assert {stored[offset].data for offset in own} == {name}


def test_it_works_whatever_the_callers_search_path(stream):
    with connect() as own:
        schema = own.execute("SELECT current_schema()").fetchone()[0]
        own.execute("CREATE TEMPORARY TABLE pgstreams_stream (LIKE pgstreams_stream INCLUDING ALL)")
        own.execute("INSERT INTO pg_temp.pgstreams_stream (key, epoch, metadata) VALUES ('sql/1', 'e', '{}')")
        for path in ("''", "pg_temp"):
            own.execute(f"SET search_path = {path}")
            own.execute(f"SELECT {schema}.pgstreams_append('sql/1', '1')")
    assert Stream.objects.get(pk=stream.pk).next_offset == 2


@pytest.fixture
def stranger(live):
    """A role that may not touch the app's tables."""
    query("CREATE ROLE pgstreams_stranger LOGIN")
    yield "pgstreams_stranger"
    query("DROP ROLE pgstreams_stranger")


def test_it_gives_its_caller_no_rights(stream, stranger):
    with connect() as own:
        own.execute(f"SET ROLE {stranger}")
        with pytest.raises(errors.InsufficientPrivilege):
            own.execute(APPEND, ("sql/1", b"1"))


@pytest.mark.django_db(transaction=True)
def test_migrating_backwards_removes_it():
    found = "SELECT to_regprocedure('pgstreams_append(text, bytea)')::text"
    assert query(found) == [("pgstreams_append(text,bytea)",)]
    try:
        call_command("migrate", "pgstreams", "0002", verbosity=0)
        assert query(found) == [(None,)]
    finally:
        call_command("migrate", "pgstreams", verbosity=0)
    assert query(found) == [("pgstreams_append(text,bytea)",)]


# All of the app's functions ------------------------------------------------------------------------

STORE = """
SELECT bases FROM pgstreams_store(
    %(writer)s, %(number)s, %(ids)s, %(ones)s, %(nulls)s::bigint[], %(nulls)s::text[], %(nulls)s::text[],
    %(payloads)s, %(places)s, %(zeros)s, NULL
)
"""
ROWS_READ = """
SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0)
FROM pg_stat_xact_user_tables WHERE relname = 'pgstreams_stream'
"""
"""By this session."""


def test_each_reads_the_rows_of_its_streams_alone_also_by_a_plan_that_was_made_for_few(live):
    """A session keeps its plans, and there are more streams by the time that anybody counts them."""

    def make(first, last):
        Stream.objects.bulk_create(Stream(key=f"planned/{number}") for number in range(first, last))

    make(0, 20)
    ids = list(Stream.objects.order_by("pk").values_list("pk", flat=True))
    writer = "00000000-0000-0000-0000-000000000001"
    batch = {"writer": writer, "ids": ids, "ones": [1] * 20, "nulls": [None] * 20, "zeros": [0] * 20}
    batch |= {"payloads": [b"1"] * 20, "places": list(range(1, 21))}
    wanted = pages.parameters(ids, [0] * 20, max_chunks=100, max_bytes=1_000_000)
    with connect() as own:

        def rows_read():
            return own.execute(ROWS_READ).fetchone()[0]

        own.execute("INSERT INTO pgstreams_writer (id) VALUES (%s)", [writer])
        calls = {
            "pgstreams_store": lambda number: own.execute(STORE, batch | {"number": number}),
            "pgstreams_append_many": lambda _: own.execute(
                "SELECT * FROM pgstreams_append_many(%s, %s, NULL, false)", (ids[0], [b"1"])
            ),
            "pgstreams_append": lambda _: own.execute(APPEND, ("planned/0", b"1")),
            "pgstreams_pages": lambda _: own.execute(sql.PAGES, wanted),
        }
        for number in range(1, 11):
            for call in calls.values():
                call(number)
        make(20, 2000)
        read = {}
        for name, call in calls.items():
            with own.transaction():  # its count begins with what has not been reported yet
                before = rows_read()
                call(11)
                read[name] = rows_read() - before
        own.execute("DELETE FROM pgstreams_writer WHERE id = %s", [writer])
    assert read["pgstreams_store"] < 200
    assert read["pgstreams_append_many"] < 20
    assert read["pgstreams_append"] < 20
    assert read["pgstreams_pages"] < 100
