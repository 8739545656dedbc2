from __future__ import annotations

import itertools
import json

import pytest

from django_pgstreams import arrays, database


@pytest.fixture
def read(committed):
    """What Postgres reads in an array."""
    connection = database.connect("default", "writer")

    def read(array):
        [[text]] = database.execute(connection, "SELECT to_json($1)", [array], timeout_seconds=30)
        return json.loads(text)

    yield read
    connection.close()


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (arrays.byteas, []),
        (arrays.byteas, [b"", b"\0", bytes(range(256)), b"x" * 70_000]),
        (arrays.integers, []),
        (arrays.integers, [0, 1, -1, 2**31 - 1, -(2**31)]),
        (arrays.bigints, []),
        (arrays.bigints, [0, None, -1, 2**63 - 1, -(2**63), None]),
        (arrays.bigints, [None]),
        (arrays.texts, []),
        (arrays.texts, ["", None, "NULL", '"{},\\', "ä€😀", "x" * 70_000]),
    ],
)
def test_postgres_reads_what_was_given(read, make, values):
    def shown(value):
        return "\\x" + value.hex() if isinstance(value, bytes) else value

    assert (read(make(values)) or []) == [shown(value) for value in values]


def test_thousands_of_values_keep_their_order(read):
    values = [str(number).encode() * (number % 7) for number in range(5000)]
    assert read(arrays.byteas(values)) == ["\\x" + value.hex() for value in values]


def test_the_types_are_those_of_postgres(committed):
    connection = database.connect("default", "writer")
    made = [arrays.byteas([]), arrays.integers([]), arrays.bigints([]), arrays.texts([])]
    rows = database.execute(
        connection,
        "SELECT " + ", ".join(f"pg_typeof(${place})" for place in range(1, 5)),
        made,
        timeout_seconds=30,
    )
    connection.close()
    assert list(itertools.chain(*rows)) == ["bytea[]", "integer[]", "bigint[]", "text[]"]
