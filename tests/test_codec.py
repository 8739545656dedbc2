"""Values and payloads: what goes in comes out, and what has no form is refused with its place."""

from __future__ import annotations

import base64
import datetime
import decimal
import enum
import json
import uuid

import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.utils.translation import gettext_lazy

from django_pgstreams import codec
from django_pgstreams.exceptions import InvalidPayload

JSON = "application/json"
TEXT = "text/plain"
BYTES = "application/octet-stream"
NAN = float("nan")
LONE = "\ud83d"


class Float64(float):
    """What numpy's float64 is to Python: a subclass of float."""


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        ("application/json", "json"),
        ("Application/JSON", "json"),
        ("application/json; charset=utf-8", "json"),
        ("application/json ;charset=utf-8", "json"),
        ("application/vnd.api+json", "json"),
        ("application/ld+json;profile=x", "json"),
        ("text/plain", "text"),
        ("TEXT/html; charset=utf-8", "text"),
        ("text/x-log", "text"),
        ("application/octet-stream", "bytes"),
        ("image/png", "bytes"),
        ("application/jsonlines", "bytes"),
        ("application/xml+jsonp", "bytes"),
    ],
)
def test_the_content_type_says_how_to_read_a_payload(content_type, kind):
    codec.check_content_type(content_type)
    assert codec.kind(content_type) == kind


@pytest.mark.parametrize(
    "content_type",
    [
        *["", "json", "text/", "/plain", "text/plain/x", "text plain", " text/plain", "text/plain "],
        *["text/plain;", "text/plain; charset", "text/plain; charset=", "text/plain\n", "text/plain, a/b"],
        *['text/plain; a="\r\nX: y"', "text/plain; a=\x00", 'text/plain; a="\x00"', "text/plain; a=ü"],
        *["text/" + "x" * 123, "text/plain; a=" + "x" * 114, None, 5, b"text/plain"],
    ],
)
def test_what_is_not_a_content_type_is_refused(content_type):
    with pytest.raises(InvalidPayload, match="content type"):
        codec.check_content_type(content_type)


def test_a_content_type_may_be_as_long_as_its_column():
    codec.check_content_type("text/" + "x" * 122)


@pytest.mark.parametrize(
    "data",
    [
        *[
            None,
            True,
            False,
            0,
            -1,
            10**40,
            1.5,
            -0.0,
            5e-324,
            "",
            "a",
            [],
            {},
            [None],
            {"a": {"b": [1, "c"]}},
        ],
        *["\0", {"t": "\0"}, {"a\0": 1}, {"a\0": "\0b"}, "\x1f\x7f\u2028\u2029\ufeff\ufffe\uffff", "\\u0000"],
        *["😀", {"😀": "👩\u200d🚀"}, "\U0010ffff", '"</script>', "\r\n\t", "é", "e\u0301"],
        {"z": 1, "a": 2, "": 3},
    ],
)
def test_json_comes_back_as_it_was(data):
    payload = codec.encode(JSON, data)
    assert codec.decode(JSON, payload) == data
    assert json.loads(codec.splice(JSON, payload)) == data
    assert codec.check_payload(JSON, payload) == payload


def test_json_is_stored_compactly_in_utf8_and_in_the_order_given():
    assert codec.encode(JSON, {"z": [1, 2.50], "a": "😀\0"}) == '{"z":[1,2.5],"a":"😀\\u0000"}'.encode()


def test_nul_and_the_text_of_its_escape_stay_apart():
    assert codec.encode(JSON, "\0") == rb'"\u0000"'
    assert codec.encode(JSON, "\\u0000") == rb'"\\u0000"'


@pytest.mark.parametrize(
    ("data", "stored"),
    [
        (datetime.datetime(2026, 11, 30, 16, 2, 3, 456789, datetime.UTC), "2026-11-30T16:02:03.456Z"),
        (datetime.datetime(2026, 11, 30), "2026-11-30T00:00:00"),  # noqa: DTZ001 - naive is allowed
        (datetime.date(2026, 11, 30), "2026-11-30"),
        (datetime.time(1, 2, 3), "01:02:03"),
        (datetime.timedelta(hours=1), "P0DT01H00M00S"),
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (gettext_lazy("stream"), "stream"),
        (Colour.RED, "red"),
        ((1, 2), [1, 2]),
        ({2: "a", None: "b", True: "c"}, {"2": "a", "null": "b", "true": "c"}),
        (Float64(1.5), 1.5),
    ],
)
def test_what_json_lacks_is_stored_as_django_stores_it(data, stored):
    assert codec.decode(JSON, codec.encode(JSON, [data])) == [stored]


@pytest.mark.parametrize(
    ("data", "place", "why"),
    [
        # No number of JSON
        ({"x": NAN}, "data['x']", "not JSON compliant"),
        ({"x": float("inf")}, "data['x']", "not JSON compliant"),
        ({"x": float("-inf")}, "data['x']", "not JSON compliant"),
        (NAN, "data", "not JSON compliant"),
        ([[0, 1], {"a": [1, {"b": NAN}]}], "data[1]['a'][1]['b']", "not JSON compliant"),
        ({"x": Float64("nan")}, "data['x']", "not JSON compliant"),
        ((1, float("inf")), "data[1]", "not JSON compliant"),
        ({NAN: 1}, "data[nan] (the key)", "not JSON compliant"),
        ({"x": decimal.Decimal("NaN")}, "data['x']", "NaN has no JSON form"),
        ({"x": [decimal.Decimal("sNaN")]}, "data['x'][0]", "sNaN has no JSON form"),
        ({"x": decimal.Decimal("-Infinity")}, "data['x']", "-Infinity has no JSON form"),
        ([1, 10**5000], "data[1]", "4300"),
        # Half of a character
        ({"t": LONE}, "data['t']", "U+D83D"),
        ({"t": "ok \udc00"}, "data['t']", "U+DC00"),
        ({"a": {LONE: 1}}, r"data['a']['\ud83d'] (the key)", "U+D83D"),
        (["\ude00\ud83d"], "data[0]", "U+DE00"),
        (LONE, "data", "U+D83D"),
        # No form at all
        ({"x": [object()]}, "data['x'][0]", "object"),
        ({"x": {1, 2}}, "data['x']", "set"),
        ({"x": b"bytes"}, "data['x']", "bytes"),
        ({(1, 2): 3}, "data[(1, 2)] (the key)", "keys must be"),
        ({"x": datetime.time(1, tzinfo=datetime.UTC)}, "data['x']", "timezone-aware"),
    ],
)
def test_what_has_no_json_form_is_refused_with_its_place(data, place, why):
    with pytest.raises(InvalidPayload) as caught:
        codec.encode(JSON, data)
    assert str(caught.value).startswith(f"{place} cannot be stored as JSON: ")
    assert why in str(caught.value)


def test_a_circle_and_a_bottomless_nest_are_refused_briefly():
    circle: list = []
    circle.append(circle)
    nest: list = []
    for _ in range(100_000):
        nest = [nest]
    for data in (circle, nest):
        with pytest.raises(InvalidPayload) as caught:
            codec.encode(JSON, data)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("data", ["", "plain", "\0", "😀", "\\u0000", "a\r\nb", "\u2028"])
def test_text_comes_back_as_it_was(data):
    payload = codec.encode(TEXT, data)
    assert payload == data.encode()
    assert codec.decode(TEXT, payload) == data
    assert json.loads(codec.splice(TEXT, payload)) == data


@pytest.mark.parametrize("data", [b"", b"\0\xff\xfe", bytearray(b"abc"), memoryview(b"abc")])
def test_bytes_come_back_as_they_were(data):
    payload = codec.encode(BYTES, data)
    assert type(payload) is bytes
    assert codec.decode(BYTES, payload) == bytes(data)
    assert base64.b64decode(json.loads(codec.splice(BYTES, payload))) == bytes(data)


@pytest.mark.parametrize(
    ("content_type", "data", "message"),
    [
        (TEXT, b"bytes", "takes str, not bytes"),
        (TEXT, {"a": 1}, "takes str, not dict"),
        (TEXT, None, "takes str, not NoneType"),
        (TEXT, LONE, r"lone surrogate U\+D83D"),
        (BYTES, "text", "must be bytes, not str"),
        (BYTES, 5, "must be bytes, not int"),
        (BYTES, [1, 2], "must be bytes, not list"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(content_type, data, message):
    with pytest.raises(InvalidPayload, match=message):
        codec.encode(content_type, data)


@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        (JSON, b""),
        (JSON, b"{"),
        (JSON, b"nan"),
        (JSON, b"NaN"),
        (JSON, b'{"a": Infinity}'),
        (JSON, b"[-Infinity]"),
        (JSON, b"1e999"),
        (JSON, b'"\xff"'),
        (JSON, b'\xef\xbb\xbf"byte order mark"'),
        (JSON, '"utf-16"'.encode("utf-16")),
        (JSON, '"utf-16"'.encode("utf-16-le")),
        (JSON, rb'"\ud83d"'),
        (JSON, rb'{"\udc00": 1}'),
        (JSON, b'"raw \x00 nul"'),
        (JSON, b"[" * 100_000),
        (JSON, "text"),
        (JSON, 5),
        (JSON, None),
        (TEXT, b"\xff"),
        (TEXT, "text".encode("utf-16")),
        (TEXT, b"\xed\xa0\xbd"),
        (TEXT, "text"),
        (BYTES, "text"),
    ],
)
def test_a_payload_that_no_value_has_is_refused(content_type, payload):
    with pytest.raises(InvalidPayload):
        codec.check_payload(content_type, payload)


@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        (JSON, b' {"a" : [1, 2.50]} '),
        (JSON, rb'"\ud83d\ude00 \u0000"'),
        (JSON, bytearray(b"1")),
        (TEXT, b""),
        (TEXT, "größe".encode()),
        (BYTES, b"\xff\0"),
        (BYTES, memoryview(b"\xff")),
    ],
)
def test_a_payload_made_elsewhere_is_taken_as_it_is(content_type, payload):
    checked = codec.check_payload(content_type, payload)
    assert type(checked) is bytes
    assert checked == bytes(payload)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("no disk", "no disk"),
        ("a\0b", "a\ufffdb"),
        ("half \ud83d", "half \ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("😀 größe", "😀 größe"),
        ("", ""),
    ],
)
def test_text_for_a_column_loses_only_what_postgres_cannot_store(text, stored):
    assert codec.storable_text(text) == stored


@pytest.mark.parametrize(
    "data",
    [
        {"a": [1, 2.5, {"b": None, "c": True}], "d": "é\u2028\x00"},
        {1: 1, None: 2, False: 3, 1.5: 4},
        [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), decimal.Decimal("1.10"), uuid.UUID(int=1)],
        [[], {}, "", 10**30, -0.0, 1e300],
    ],
)
def test_the_encoder_made_once_writes_what_djangos_would(data):
    plain = json.dumps(
        data, cls=DjangoJSONEncoder, allow_nan=False, ensure_ascii=False, separators=(",", ":")
    )
    assert codec.encode("application/json", data) == plain.encode()


def test_a_cycle_is_refused():
    cycle: list[object] = []
    cycle.append({"again": cycle})
    with pytest.raises(InvalidPayload, match="cannot be stored as JSON"):
        codec.encode("application/json", cycle)
