"""What goes over the wire: packed wake-ups for `NOTIFY`, and the frames of `pgstreams.v1`; pure.

Invariant: a frame holds stored JSON as it was stored (spliced, never parsed), and is no larger than its bound
unless a single chunk is; a notification never exceeds Postgres's 8,000 bytes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from . import codec, keys
from .buffer import Batch, WakeUp
from .exceptions import PGStreamsError
from .pages import Run

SUBPROTOCOL = "pgstreams.v1"

# Wake-ups ------------------------------------------------------------------------------------------

EVERYTHING = "*"
_MAX_NOTIFICATION_BYTES = 7900
_CHANGED = "!"
_PROBE = "0:"


def pack(batch: Batch) -> list[str]:
    """The notification payloads for a batch: `"17:204 18:3! …"`, and `"*"` for everything."""
    payloads = [EVERYTHING] if batch.everything else []
    line: list[str] = []
    size = 0
    for stream_id, tail, changed in batch.wake_ups:
        word = f"{stream_id}:{tail}{_CHANGED if changed else ''}"
        if line and size + 1 + len(word) > _MAX_NOTIFICATION_BYTES:
            payloads.append(" ".join(line))
            line, size = [], 0
        size += len(word) + (1 if line else 0)
        line.append(word)
    if line:
        payloads.append(" ".join(line))
    return payloads


def unpack(payload: str) -> Batch:
    """The batch that a notification stands for; words that are not wake-ups stand for everything."""
    wake_ups: list[WakeUp] = []
    everything = False
    for word in payload.split():
        stream_id, _, tail = word.removesuffix(_CHANGED).partition(":")
        if _is_number(stream_id) and _is_number(tail):
            wake_ups.append(WakeUp(int(stream_id), int(tail), word.endswith(_CHANGED)))
        else:
            everything = True
    return Batch(tuple(wake_ups), everything)


def probe() -> str:
    """A payload that no other equals, about a stream that never is, so that nobody reads anything for it."""
    return f"{_PROBE}{secrets.randbelow(2**63)}"


def is_probe(payload: str) -> bool:
    """Whether some process's listener sent this to see whether it hears."""
    return payload.startswith(_PROBE)


def _is_number(text: str) -> bool:
    """Whether this can be an id or a tail, 64 bits at the most: anybody may notify the channel."""
    return len(text) <= 19 and text.isdecimal()


# Frames from the client ----------------------------------------------------------------------------

_MAX_CLIENT_FRAME_CHARACTERS = 64 * 1024
_MAX_OFFSET = 2**63 - 1
_URL_NUMBER = re.compile(r"-?[0-9]{1,19}")
TAIL = "tail"


class BadFrame(PGStreamsError):
    """A client's frame cannot be understood; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ClientFrame:
    """A frame from a client. `offset` is a position, `"tail"`, or minus the number of last chunks."""

    type: str
    stream: str
    offset: int | str = 0
    epoch: str | None = None


def parse(text: str | None) -> ClientFrame:
    """A client's frame (None: a binary one). Raises `BadFrame`; `InvalidKey` when only the key is wrong."""
    if text is None:
        raise BadFrame("Frames are JSON text; this one is binary.")
    if len(text) > _MAX_CLIENT_FRAME_CHARACTERS:
        raise BadFrame(f"A frame has at most {_MAX_CLIENT_FRAME_CHARACTERS:,} characters.")
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"The frame is not JSON: {error}.") from error
    if not isinstance(frame, dict):
        raise BadFrame(f"A frame is a JSON object, not {_json_name(frame)}.")
    kind = frame.get("type")
    if not isinstance(kind, str) or kind not in ("subscribe", "ack", "unsubscribe", "cancel"):
        raise BadFrame(
            f"The frame's type is {keys.shown(kind)}; it is one of subscribe, ack, unsubscribe, cancel."
        )
    if "stream" not in frame:
        raise BadFrame(f'A frame of type {kind} names its stream: "stream" is missing.')
    keys.check_key(frame["stream"])
    epoch = frame.get("epoch")
    if epoch is not None and not isinstance(epoch, str):
        raise BadFrame(f"epoch is a string, not {keys.shown(epoch)}.")
    if kind == "subscribe":
        return ClientFrame(kind, frame["stream"], check_start(frame.get("offset", 0)), epoch)
    if kind == "ack":
        offset = check_start(frame.get("offset"))
        if not isinstance(offset, int) or offset < 0:
            raise BadFrame(f"The offset of an ack is a position, 0 or more, not {keys.shown(offset)}.")
        return ClientFrame(kind, frame["stream"], offset)
    return ClientFrame(kind, frame["stream"])


def parse_url(key: str, query_string: bytes) -> ClientFrame:
    """The subscription that a one-stream URL asks for. Raises `BadFrame`, `InvalidKey`."""
    keys.check_key(key)
    try:
        query = parse_qs(query_string.decode("ascii"), keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise BadFrame(f"The query string cannot be read: {error}.") from error
    given = query.get("offset", ["0"])[-1]
    # Not int() alone, which also takes "1_000", " 5" and the digits of other scripts.
    offset = int(given) if _URL_NUMBER.fullmatch(given) else given
    return ClientFrame("subscribe", key, check_start(offset), query.get("epoch", [None])[-1])


def check_start(offset: object) -> int | str:
    """Where a subscription starts: a position, `"tail"`, or minus n for the last n. Raises `BadFrame`."""
    if offset == TAIL:
        return TAIL
    if isinstance(offset, int) and not isinstance(offset, bool) and -_MAX_OFFSET <= offset <= _MAX_OFFSET:
        return offset
    raise BadFrame(
        'An offset is a position, 0 or more; "tail"; or a negative number for the last chunks; '
        f"not {keys.shown(offset)}."
    )


def _json_name(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# Frames from the server ----------------------------------------------------------------------------

_MAX_CHARACTER_BYTES = 4
_FRAME_HEAD_BYTES = 100
"""What a `chunks` frame has around its data, besides the stream's name: 93 bytes with the longest numbers."""


# Made once: `json.dumps` would make one for each frame.
_as_json = json.JSONEncoder(separators=(",", ":")).encode


def frame(kind: str, stream: str | None = None, **fields: Any) -> str:
    """A frame without payload. `None` for the stream leaves it out."""
    about = {} if stream is None else {"stream": stream}
    return _as_json({"type": kind, **about, **fields})


class Unreadable(NamedTuple):
    """Why a chunk has no place in a frame, for the client, and the position after it."""

    message: str
    next: int


class RunFrames(NamedTuple):
    """A run of chunks as frames, and what is wrong with the chunk after them, if anything is.

    `frames` has of each its text, the position after it, and its bytes.
    """

    stream: str
    frames: list[tuple[str, int, int]]
    unreadable: Unreadable | None


def run_frames(stream: str, content_type: str, run: Run, max_bytes: int) -> RunFrames:
    """The frames of a run, up to a chunk that has no place in a frame. For `max_bytes` see `chunk_frames`."""
    texts = []
    unreadable = None
    for offset, payload in enumerate(run.payloads, run.first):
        try:
            texts.append(codec.splice(content_type, payload))
        except UnicodeDecodeError as error:
            after = offset + 1
            unreadable = Unreadable(
                f"Chunk {offset} is not UTF-8 text, as {content_type} has to be ({error.reason}); "
                f"subscribe from {after} to leave it out.",
                after,
            )
            break
    frames = [
        (text, position, _utf8_bytes(text))
        for text, position in chunk_frames(stream, run.first, texts, max_bytes)
    ]
    return RunFrames(stream, frames, unreadable)


def chunk_frames(stream: str, offset: int, data: Sequence[str], max_bytes: int) -> list[tuple[str, int]]:
    """`chunks` frames for consecutive chunks from `offset` on, each with the position after it.

    `data` is each chunk's JSON text (`codec.splice`). A frame has at most `max_bytes`, or a single chunk.
    """
    name = _as_json(stream)
    max_bytes -= len(name) + _FRAME_HEAD_BYTES
    fits = sum(map(len, data)) * _MAX_CHARACTER_BYTES + len(data) <= max_bytes  # as nearly always
    frames = []
    for run in [data] if fits and data else _runs(data, max_bytes):
        position = offset + len(run)
        head = f'{{"type":"chunks","stream":{name},"offset":{offset},"next":{position},"data":['
        frames.append((f"{head}{','.join(run)}]}}", position))
        offset = position
    return frames


def _runs(texts: Iterable[str], max_bytes: int) -> Iterator[Sequence[str]]:
    """The texts in runs of at most `max_bytes` UTF-8 bytes, commas between them included, or of one text."""
    run: list[str] = []
    size = 0
    for text in texts:
        text_bytes = _utf8_bytes(text) + 1
        if run and size + text_bytes > max_bytes:
            yield run
            run, size = [], 0
        run.append(text)
        size += text_bytes
    if run:
        yield run


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
