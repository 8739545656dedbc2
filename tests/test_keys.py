"""One rule for keys, whichever way a key comes in."""

from __future__ import annotations

import json

import pytest
from django.forms import modelform_factory

from django_pgstreams import wire
from django_pgstreams.exceptions import InvalidKey
from django_pgstreams.keys import MAX_KEY_CHARACTERS, check_key
from django_pgstreams.models import Stream

VALID = {
    "one letter": "a",
    "words": "chat",
    "segments": "chat/17/answer/3",
    "longest": "x" * 255,
    "longest, astral": "😀" * 255,
    "inner spaces": "a b / c",
    "dots within a segment": "a.b/.hidden/.../v1.",
    "punctuation": "a:b;c,d-e_f~g!h?i#j%k&l=m+n@o'p\"q\\r|s<t>u{v}",
    "percent escape stays text": "a%2Fb%00",
    "German": "größe",
    "Russian": "поток/семнадцать",
    "Chinese": "流/十七",
    "Arabic": "مجرى/١٧",
    "Hindi with a joiner": "क्\u200dष",
    "Thai": "สตรีม",
    "emoji with a joiner": "👩\u200d🚀/🏳️\u200d🌈",
    "decomposed accent": "e\u0301",
    "composed accent": "\u00e9",
}

INVALID = {
    "empty": ("", "must not be empty"),
    "too long": ("x" * 256, "has 256"),
    "too long, astral": ("😀" * 256, "has 256"),
    "NUL": ("a\x00b", r"U\+0000 at index 1"),
    "newline": ("a\nb", r"U\+000A at index 1"),
    "trailing newline": ("a\n", r"U\+000A at index 1"),
    "tab": ("\ta", r"U\+0009 at index 0"),
    "delete": ("a\x7f", r"U\+007F"),
    "C1 control": ("a\x85b", r"U\+0085"),
    "lone surrogate": ("a\ud83d", r"U\+D83D"),
    "leading space": (" a", "space"),
    "trailing space": ("a ", "space"),
    "only a space": (" ", "space"),
    "no-break space": ("\u00a0a", "space"),
    "ideographic space": ("a\u3000", "space"),
    "leading slash": ("/a", "slash"),
    "trailing slash": ("a/", "slash"),
    "only a slash": ("/", "slash"),
    "empty segment": ("a//b", "segment"),
    "dot": (".", "segment"),
    "two dots": ("..", "segment"),
    "dot segment": ("a/./b", "segment"),
    "dots segment": ("a/../b", "segment"),
    "dots at the end": ("a/..", "segment"),
}

valid = pytest.mark.parametrize("key", VALID.values(), ids=VALID)
invalid = pytest.mark.parametrize(("key", "message"), INVALID.values(), ids=INVALID)

StreamForm = modelform_factory(Stream, fields=["key", "content_type"])


def test_the_limit_is_255():
    assert MAX_KEY_CHARACTERS == 255


@valid
def test_a_valid_key_passes(key):
    check_key(key)


@invalid
def test_an_invalid_key_is_refused_and_shown(key, message):
    with pytest.raises(InvalidKey, match=message):
        check_key(key)


@pytest.mark.parametrize(
    "key", ["😀" * 254 + " ", "😀" * 255 + "/", "\ud83d" * 255, "😀" * 60_000, "😀//" * 80]
)
def test_little_of_an_invalid_key_is_shown(key):
    with pytest.raises(InvalidKey) as caught:
        check_key(key)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("key", [None, 17, b"a", ["a"]])
def test_only_text_is_a_key(key):
    with pytest.raises(InvalidKey, match=f"must be text, not {type(key).__name__}"):
        check_key(key)


@valid
@pytest.mark.django_db
def test_a_valid_key_is_stored_as_it_is(key):
    Stream.objects.create(key=key)
    assert Stream.objects.get(key=key).key == key


@valid
def test_a_valid_key_passes_in_a_frame(key):
    assert wire.parse(json.dumps({"type": "subscribe", "stream": key})).stream == key


@valid
@pytest.mark.django_db
def test_a_valid_key_passes_in_a_form(key):
    form = StreamForm({"key": key, "content_type": "text/plain"})
    assert form.is_valid(), form.errors
    assert form.save().key == key


@invalid
@pytest.mark.django_db
def test_an_invalid_key_is_refused_on_every_way_into_the_table(key, message):
    stream = Stream.objects.create(key="before")
    stream.key = key
    with pytest.raises(InvalidKey, match=message):
        stream.save()
    with pytest.raises(InvalidKey, match=message):
        stream.save(update_fields=["key"])
    with pytest.raises(InvalidKey, match=message):
        Stream(key=key).save()
    with pytest.raises(InvalidKey, match=message):
        Stream.objects.create(key=key)
    with pytest.raises(InvalidKey, match=message):
        Stream.objects.bulk_create([Stream(key="fine"), Stream(key=key)])
    with pytest.raises(InvalidKey, match=message):
        Stream.objects.update(key=key)
    with pytest.raises(InvalidKey, match=message):
        Stream.objects.update_or_create(key="before", defaults={"key": key})
    assert list(Stream.objects.values_list("key", flat=True)) == ["before"]


@invalid
def test_an_invalid_key_is_refused_in_a_frame(key, message):
    with pytest.raises(InvalidKey, match=message):
        wire.parse(json.dumps({"type": "subscribe", "stream": key}))


# A form strips what a person typed before it checks.
@pytest.mark.parametrize("key", [key for key, _ in INVALID.values() if key == key.strip()])
@pytest.mark.django_db
def test_an_invalid_key_is_refused_in_a_form(key):
    form = StreamForm({"key": key, "content_type": "text/plain"})
    assert not form.is_valid()
    assert set(form.errors) == {"key"}


@pytest.mark.django_db
def test_a_computed_key_cannot_be_checked_and_is_refused():
    stream = Stream.objects.create(key="before")
    stream.key = "after"
    with pytest.raises(InvalidKey, match=r"use save\(\)"):
        Stream.objects.bulk_update([stream], ["key"])
    stream.save()
    assert Stream.objects.get().key == "after"
