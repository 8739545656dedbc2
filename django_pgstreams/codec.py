"""Content types ↔ Python values; pure.

Invariant: what `encode` returns can always be spliced into a frame as it is. So JSON is checked here, once,
on append: no NaN or Infinity, no lone surrogate; the read path never parses it again.
"""

from __future__ import annotations

import base64
import decimal
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from .exceptions import InvalidPayload

DEFAULT_CONTENT_TYPE = "application/json"
MAX_CONTENT_TYPE_CHARACTERS = 127
_MAX_PATH_CHARACTERS = 200
_WORD = r"[\w!#$%&'*+.^`|~-]+"
_CONTENT_TYPE = re.compile(rf'{_WORD}/{_WORD}( *; *{_WORD}=({_WORD}|"[ !#-\[\]-~]*"))*', re.ASCII)
"""A media type with parameters, as in RFC 9110, section 8.3.1."""


def check_content_type(content_type: object) -> None:
    """Raise `InvalidPayload` unless this is a media type such as `text/plain; charset=utf-8`."""
    if not isinstance(content_type, str) or not _CONTENT_TYPE.fullmatch(content_type):
        raise InvalidPayload(
            f"{content_type!a} is not a content type; give one such as 'application/json' or 'text/plain'."
        )
    if len(content_type) > MAX_CONTENT_TYPE_CHARACTERS:
        raise InvalidPayload(
            f"A content type has at most {MAX_CONTENT_TYPE_CHARACTERS} characters; "
            f"{content_type[:40]!r}… has {len(content_type)}."
        )


@functools.lru_cache(maxsize=256)
def kind(content_type: str) -> str:
    """`"json"`, `"text"` or `"bytes"`: how payloads of this content type are read."""
    essence = content_type.partition(";")[0].strip().lower()
    if essence == "application/json" or essence.endswith("+json"):
        return "json"
    return "text" if essence.startswith("text/") else "bytes"


def encode(content_type: str, data: Any) -> bytes:
    """The payload for a value; raises `InvalidPayload` with the place inside the value that is wrong."""
    match kind(content_type):
        case "json":
            return _encode_json(data)
        case "text":
            return _encode_text(content_type, data)
        case _:
            return _bytes(content_type, data)


def decode(content_type: str, payload: bytes) -> Any:
    """The value that a payload stands for; `InvalidPayload` for bytes that no append could have stored."""
    try:
        match kind(content_type):
            case "json":
                # Not the bytes: json would guess an encoding, and let a byte order mark pass.
                return _decode_json(payload.decode())
            case "text":
                return payload.decode()
            case _:
                return payload
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"The payload is not {content_type}: {_explain(error)}.") from error


def check_payload(content_type: str, payload: Any) -> bytes:
    """The payload as `bytes`; raises `InvalidPayload` unless `encode` could have made it."""
    checked = _bytes(content_type, payload)
    data = decode(content_type, checked)
    if kind(content_type) == "json":
        _encode_json(data)
    return checked


def check_metadata(metadata: Any) -> None:
    """Raise `InvalidPayload` unless a `jsonb` column can hold this: JSON as in a payload, but no NUL."""
    _encode_json(metadata, "metadata", _dump_for_jsonb)


def check_size(payload: bytes | memoryview, max_bytes: int) -> None:
    """Raise `InvalidPayload` for a payload above `MAX_CHUNK_BYTES`."""
    if len(payload) > max_bytes:
        raise InvalidPayload(
            f"The payload has {len(payload):,} bytes; PGSTREAMS['MAX_CHUNK_BYTES'] allows {max_bytes:,}."
        )


def storable_text(text: str) -> str:
    """The text with NUL and lone surrogates, which Postgres cannot store as text, replaced by U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} has no JSON form")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode_json(text: str) -> Any:
    """What `_JSON.decode` returns or raises, in half the time where no whitespace surrounds the value."""
    if text[:1] not in " \t\n\r":
        value, end = _JSON.raw_decode(text)
        if end == len(text):
            return value
    return _JSON.decode(text)


def _bytes(content_type: str, data: Any) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidPayload(f"A payload of {content_type!r} must be bytes, not {type(data).__name__}.")
    return bytes(data)


def splice(content_type: str, payload: bytes) -> str:
    """The payload as JSON text for a frame: JSON as stored, text as a string, else a base64 string."""
    match kind(content_type):
        case "json":
            return payload.decode()
        case "text":
            return json.dumps(payload.decode(), ensure_ascii=False)
        case _:
            return f'"{base64.b64encode(payload).decode()}"'


class _Encoder(DjangoJSONEncoder):
    """Django's encoder, which would turn `Decimal("NaN")` into the string "NaN"."""

    def default(self, o: Any) -> Any:
        if isinstance(o, decimal.Decimal) and not o.is_finite():
            raise ValueError(f"{o} has no JSON form")
        return super().default(o)


_ENCODER = _Encoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))

# CPython's encoder in C, made once: `JSONEncoder.encode` makes one for each value, which takes most of its
# time. It has no record of the containers it is in, so a cycle ends in a RecursionError.
_make_encoder: Any = getattr(json.encoder, "c_make_encoder", None)
_encode_in_c: Callable[[Any, int], Sequence[str]] | None = _make_encoder and _make_encoder(
    None, _ENCODER.default, json.encoder.encode_basestring, None, ":", ",", False, False, False
)


def _dump(data: Any) -> bytes:
    if _encode_in_c is None:
        return _ENCODER.encode(data).encode()
    return "".join(_encode_in_c(data, 0)).encode()


def _dump_for_jsonb(data: Any) -> bytes:
    text = _dump(data)
    # Without the escaped backslashes, what looks like an escape is one.
    if rb"\u0000" in text.replace(rb"\\", b""):
        raise ValueError("jsonb holds no NUL (U+0000)")
    return text


def _encode_json(data: Any, name: str = "data", dump: Callable[[Any], bytes] = _dump) -> bytes:
    try:
        return dump(data)
    except (ValueError, TypeError, RecursionError) as error:
        place = _locate(data, name, dump)
        raise InvalidPayload(f"{place} cannot be stored as JSON: {_explain(error)}.") from error


def _encode_text(content_type: str, data: Any) -> bytes:
    if not isinstance(data, str):
        raise InvalidPayload(f"A stream of {content_type!r} takes str, not {type(data).__name__}.")
    try:
        return data.encode()
    except UnicodeEncodeError as error:
        raise InvalidPayload(f"The text cannot be stored: {_explain(error)}.") from error


def _explain(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"lone surrogate U+{ord(error.object[error.start]):04X} (half of a character)"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).rstrip(".")


def _locate(data: Any, name: str, dump: Callable[[Any], bytes]) -> str:
    """The path of the innermost part that cannot be encoded, such as `data['items'][3]`."""
    path, part = name, data
    while True:
        for step, child in _children(part, dump):
            if not _encodes(child, dump):
                path, part = path + step, child
                break
        else:
            return path
        if len(path) > _MAX_PATH_CHARACTERS:
            return path[:_MAX_PATH_CHARACTERS] + "…"


def _encodes(part: Any, dump: Callable[[Any], bytes]) -> bool:
    try:
        dump(part)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _children(part: Any, dump: Callable[[Any], bytes]) -> Iterator[tuple[str, Any]]:
    if isinstance(part, dict):
        for key, value in part.items():
            # A key that is wrong by itself ends the path: a wrapped empty list has no children.
            good = _encodes({key: None}, dump)
            yield (f"[{key!a}]", value) if good else (f"[{key!a}] (the key)", _BadKey())
    elif isinstance(part, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(part))


class _BadKey:
    """Stands for a key that has no JSON form, so that the search ends there."""
