"""A stream's metadata: what passes a form or `full_clean()` can be stored."""

from __future__ import annotations

import datetime
import math

import pytest
from django.core import serializers
from django.core.exceptions import ValidationError
from django.forms import modelform_factory

from django_pgstreams.metadata import MetadataFormField
from django_pgstreams.models import Stream

pytestmark = pytest.mark.django_db

StreamForm = modelform_factory(Stream, fields=["key", "metadata"])


def nested(depth):
    nest: list = []
    for _ in range(depth):
        nest = [nest]
    return nest


REFUSED = [
    ({"a": ["", {"b": "x\0"}]}, "metadata['a'][1]['b'] cannot be stored as JSON: jsonb holds no NUL"),
    ({"a": {"\\\0": 1}}, r"metadata['a']['\\\x00'] (the key) cannot be stored as JSON: jsonb holds no NUL"),
    ("\0", "metadata cannot be stored as JSON: jsonb holds no NUL"),
    ({"a": math.nan}, "metadata['a'] cannot be stored as JSON: "),
    ([-math.inf], "metadata[0] cannot be stored as JSON: "),
    ({"a": "\ud800"}, "metadata['a'] cannot be stored as JSON: lone surrogate U+D800"),
    ({"\udfff": 1}, r"metadata['\udfff'] (the key) cannot be stored as JSON: lone surrogate"),
    (nested(100_000), "metadata[0][0]"),
    ({"a": datetime.date(2030, 1, 1)}, "Value must be valid JSON."),
    ({"a": object()}, "metadata['a'] cannot be stored as JSON: "),
]


@pytest.mark.parametrize(("metadata", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_stored_is_refused_with_its_place(metadata, message):
    with pytest.raises(ValidationError) as caught:
        Stream(key="a", metadata=metadata).full_clean()
    [error] = caught.value.message_dict["metadata"]
    assert error.startswith(message)


STORED = [
    *({"a": [1, 2.5, None, True, "😀", "\x01\ufffe"]}, {}, [], "", 0, False),
    *(r"\u0000", r"\\u0000", nested(400)),
]


@pytest.mark.parametrize("metadata", STORED)
def test_what_passes_is_stored_as_it_is(metadata):
    stream = Stream(key="a", metadata=metadata)
    stream.full_clean()
    stream.save()
    assert Stream.objects.get().metadata == metadata


def test_null_is_none():
    stream = Stream(key="a", metadata=None)
    stream.full_clean()
    assert stream.metadata == {}
    fixture = [{"model": "pgstreams.stream", "fields": {"key": "b", "metadata": None}}]
    [loaded] = serializers.deserialize("python", fixture)
    assert loaded.object.metadata == {}


@pytest.mark.parametrize("emptied", ["", "null", None])
def test_a_form_that_empties_it_stores_none(emptied):
    stream = Stream.objects.create(key="a", metadata={"a": 1})
    form = StreamForm({"key": "a", "metadata": emptied}, instance=stream)
    form.save()
    stream.refresh_from_db()
    assert stream.metadata == {}


def test_a_form_without_the_field_leaves_it():
    stream = Stream.objects.create(key="a", metadata={"a": 1})
    StreamForm({"key": "b"}, instance=stream).save()
    stream.refresh_from_db()
    assert (stream.key, stream.metadata) == ("b", {"a": 1})


@pytest.mark.parametrize(
    "typed", [r'{"a": "\ud800"}', r'["\u0000"]', "[NaN]", "[" * 100_000, "9" * 5_000, "{"]
)
def test_a_form_with_an_error_shows_what_was_typed(typed):
    form = StreamForm({"key": "a", "metadata": typed})
    assert list(form.errors) == ["metadata"]
    assert form["metadata"].value() == typed
    str(form).encode()


def test_a_form_that_is_not_bound_shows_what_is_stored():
    stream = Stream(key="a", metadata={"a": "ü"})
    shown = StreamForm(instance=stream)["metadata"].value()
    assert shown == '{"a": "ü"}'
    data = {"key": "a", "metadata": shown, "initial-metadata": shown}
    assert StreamForm(data, instance=stream).changed_data == []


def test_a_disabled_field_keeps_its_value():
    class Form(StreamForm):
        metadata = MetadataFormField(disabled=True)

    stream = Stream.objects.create(key="a", metadata={"a": 1})
    form = Form({"key": "b", "metadata": '{"a": 2}'}, instance=stream)
    assert form["metadata"].value() == '{"a": 1}'
    form.save()
    stream.refresh_from_db()
    assert (stream.key, stream.metadata) == ("b", {"a": 1})
