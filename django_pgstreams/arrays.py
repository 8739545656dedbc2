"""Arrays in Postgres's binary form, for statements with thousands of values; pure.

The form is that of `array_recv` in Postgres: dimensions, whether there are nulls, the elements' type; the
size and lower bound of the dimension; then each element's length (-1: null) and bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

_HEADER = struct.Struct(">iiIii")
_LENGTH = struct.Struct(">i").pack
_NULL = _LENGTH(-1)

# Object ids of built-in types never change (src/include/catalog/pg_type.dat).
_BYTEA, _BIGINT, _INTEGER, _TEXT = 17, 20, 23, 25
_ARRAY_OF = {_BYTEA: 1001, _BIGINT: 1016, _INTEGER: 1007, _TEXT: 1009}


class Array(NamedTuple):
    """A parameter in binary form, and its type's object id."""

    oid: int
    data: bytes


def _array(element: int, count: int, elements: Sequence[bytes]) -> Array:
    if not count:
        return Array(_ARRAY_OF[element], struct.pack(">iiI", 0, 0, element))
    return Array(_ARRAY_OF[element], _HEADER.pack(1, 1, element, count, 1) + b"".join(elements))


def byteas(values: Sequence[bytes]) -> Array:
    """A `bytea[]`."""
    elements = [b""] * (2 * len(values))
    elements[::2] = [_LENGTH(len(value)) for value in values]
    elements[1::2] = values
    return _array(_BYTEA, len(values), elements)


def integers(values: Sequence[int]) -> Array:
    """An `integer[]`."""
    numbers = [4] * (2 * len(values))
    numbers[1::2] = values
    return _array(_INTEGER, len(values), [struct.pack(f">{len(numbers)}i", *numbers)])


def bigints(values: Sequence[int | None]) -> Array:
    """A `bigint[]`; None is null."""
    pack = struct.Struct(">iq").pack
    return _array(_BIGINT, len(values), [_NULL if value is None else pack(8, value) for value in values])


def texts(values: Sequence[str | None]) -> Array:
    """A `text[]`; None is null."""
    elements = [
        _NULL if value is None else _LENGTH(len(encoded := value.encode())) + encoded for value in values
    ]
    return _array(_TEXT, len(values), elements)


def numbers(text: str) -> list[int]:
    """The elements of an array of integers that Postgres has sent as text, such as `{1,2}`."""
    return [int(number) for number in text.strip("{}").split(",") if number]
