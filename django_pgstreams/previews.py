"""A page of a stream's chunks for people to look at: payloads cut, then decoded.

Invariant: a page is bounded whatever the chunks hold. Postgres sends the beginning of each payload only, and
pages are found by offset, never by counting.
"""

from __future__ import annotations

import codecs
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from django.db.models import BinaryField
from django.db.models.functions import Length, Substr
from django.utils.translation import gettext as _

from . import codec
from .exceptions import InvalidPayload
from .models import Chunk, Stream

FROM_PARAMETER = "chunks_from"
ORDER_PARAMETER = "chunks_order"
OLDEST_FIRST = "oldest"

_MAX_UTF8_BYTES = 4
# What would not be seen, or would rearrange what is: control characters become their pictures (␀, ␛, …),
# but for tabs and line ends, and marks of writing direction their escapes.
_VISIBLE: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    127: 0x2421,
    **{code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}


class Preview(NamedTuple):
    """One chunk, as much of it as is shown."""

    offset: int
    created_at: datetime.datetime
    size: int
    """Bytes of the whole payload."""
    text: str
    cut: bool
    decoded: bool
    """False when the payload is not what the stream's content type says; the text shows its bytes then."""


@dataclass(frozen=True, slots=True)
class PreviewPage:
    """Neighbouring chunks, and where the pages around them start (None: there is none)."""

    previews: list[Preview]
    newest_first: bool
    previous: int | None
    next: int | None
    notice: str
    """What was wrong with the page that was asked for, in words."""


def page(stream: Stream, query: Mapping[str, str], *, max_chunks: int, max_characters: int) -> PreviewPage:
    """The chunks that a URL's query asks for: from the offset `chunks_from` on, newest or oldest first.

    A query that makes no sense gets the page nearest to it, and a notice.
    """
    newest_first = query.get(ORDER_PARAMETER) != OLDEST_FIRST
    oldest, newest = stream.first_offset, stream.next_offset - 1
    if oldest > newest:
        return PreviewPage([], newest_first, None, None, "")
    default = newest if newest_first else oldest
    start, notice = _start(query.get(FROM_PARAMETER, ""), default, oldest, newest)
    previews = _previews(stream, start, newest_first, max_chunks, max_characters)
    end = previews[-1].offset if previews else start
    if newest_first:
        previous = min(start + max_chunks, newest) if start < newest else None
        following = end - 1 if end > oldest else None
    else:
        previous = max(start - max_chunks, oldest) if start > oldest else None
        following = end + 1 if end < newest else None
    return PreviewPage(previews, newest_first, previous, following, notice)


def _start(wanted: str, default: int, oldest: int, newest: int) -> tuple[int, str]:
    """The offset to start at, and what to say about it."""
    if not wanted.strip():
        return default, ""
    try:
        offset = int(wanted)
    except ValueError:
        return default, _("“%(text)s” is not an offset.") % {"text": wanted[:40]}
    if oldest <= offset <= newest:
        return offset, ""
    return max(oldest, min(offset, newest)), _(
        "No chunk has the offset that was asked for: stored are %(oldest)d to %(newest)d."
    ) % {"oldest": oldest, "newest": newest}


def _previews(
    stream: Stream, start: int, newest_first: bool, max_chunks: int, max_characters: int
) -> list[Preview]:
    chunks = Chunk.objects.using(stream._state.db).filter(stream=stream)
    if newest_first:
        chunks = chunks.filter(offset__lte=start).order_by("-offset")
    else:
        chunks = chunks.filter(offset__gte=start).order_by("offset")
    head = Substr("payload", 1, max_characters * _MAX_UTF8_BYTES, output_field=BinaryField())
    rows = chunks.annotate(head=head, size=Length("payload")).values_list(
        "offset", "created_at", "size", "head"
    )
    return [
        _preview(offset, created_at, size, bytes(head), stream.content_type, max_characters)
        for offset, created_at, size, head in rows[:max_chunks]
    ]


def _preview(
    offset: int,
    created_at: datetime.datetime,
    size: int,
    head: bytes,
    content_type: str,
    max_characters: int,
) -> Preview:
    text, decoded = _text(content_type, head, complete=len(head) == size)
    cut = len(head) < size or len(text) > max_characters
    shown = text[:max_characters].translate(_VISIBLE)
    return Preview(offset, created_at, size, shown, cut, decoded)


def _text(content_type: str, head: bytes, *, complete: bool) -> tuple[str, bool]:
    """The beginning of a payload as text, and whether it is what the content type says.

    JSON stays as it is stored, since its cut form has no value; bytes are shown in hexadecimal.
    """
    if codec.kind(content_type) == "bytes":
        return head.hex(" "), True
    try:
        if complete:
            codec.decode(content_type, head)
        # Incremental: the cut may have gone through a character.
        return codecs.getincrementaldecoder("utf-8")().decode(head, complete), True
    except (InvalidPayload, UnicodeDecodeError, RecursionError):
        return head.decode(errors="backslashreplace"), False
