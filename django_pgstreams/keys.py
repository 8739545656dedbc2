"""The rule for stream keys, one for `save()`, `bulk_create()`, forms, URLs and frames; pure."""

from __future__ import annotations

import unicodedata

from .exceptions import InvalidKey

MAX_KEY_CHARACTERS = 255
_MAX_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """What somebody gave, as a message shows it: ASCII, and not much however much it was."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "…"


def check_key(key: object) -> None:
    """Raise `InvalidKey` unless `key` is a valid stream key.

    1–255 characters of any script; `/` parts segments; no control characters, no leading or trailing space
    or slash, no empty, `.` or `..` segment.
    """
    if not isinstance(key, str):
        raise InvalidKey(f"A stream key must be text, not {type(key).__name__}.")
    if not key:
        raise InvalidKey("A stream key must not be empty.")
    if len(key) > MAX_KEY_CHARACTERS:
        raise InvalidKey(
            f"A stream key has at most {MAX_KEY_CHARACTERS} characters; {shown(key)} has {len(key)}."
        )
    for index, character in enumerate(key):
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise InvalidKey(
                f"A stream key must not hold control characters or lone surrogates; {shown(key)} has "
                f"U+{ord(character):04X} at index {index}."
            )
    if key != key.strip():
        raise InvalidKey(f"A stream key must not begin or end with a space: {shown(key)}.")
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidKey(
                f"A stream key must not begin or end with a slash or hold an empty, '.' or '..' "
                f"segment: {shown(key)}."
            )
