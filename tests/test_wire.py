"""Packed wake-ups, frames from clients, and frames for them; nothing here needs a database."""

from __future__ import annotations

import json
import random

import pytest

from django_pgstreams import wire
from django_pgstreams.buffer import Batch, WakeUp
from django_pgstreams.exceptions import InvalidKey
from django_pgstreams.wire import BadFrame, ClientFrame

MAX_OFFSET = 2**63 - 1

# Wake-ups ------------------------------------------------------------------------------------------


def test_wake_ups_are_packed_as_documented():
    batch = Batch((WakeUp(17, 204), WakeUp(18, 3, changed=True)), everything=False)
    assert wire.pack(batch) == ["17:204 18:3!"]


def test_everything_is_a_payload_of_its_own():
    assert wire.pack(Batch((WakeUp(1, 2),), everything=True)) == ["*", "1:2"]


def test_nothing_to_announce_makes_no_payload():
    assert wire.pack(Batch((), everything=False)) == []


@pytest.mark.parametrize("count", [1, 300, 301, 1000, 50_000])
def test_packing_loses_nothing_and_keeps_within_a_notification(count):
    numbers = random.Random(count)
    batch = Batch(
        tuple(
            WakeUp(numbers.randrange(2**63), numbers.randrange(2**63), numbers.random() < 0.5)
            for _ in range(count)
        ),
        everything=False,
    )
    payloads = wire.pack(batch)
    assert max(len(payload.encode()) for payload in payloads) < 8000
    # Full but for the one that did not fit any more.
    assert all(len(payload) > 7800 for payload in payloads[:-1])
    unpacked = [wire.unpack(payload) for payload in payloads]
    assert tuple(wake_up for part in unpacked for wake_up in part.wake_ups) == batch.wake_ups
    assert not any(part.everything for part in unpacked)


@pytest.mark.parametrize(
    "payload",
    [
        "*",
        "17",
        "17:",
        ":3",
        "17:x",
        "x:3",
        "17:-3",
        "17:3?",
        "17:3!!",
        "hello",
        "9" * 5000 + ":1",
        "1:" + "9" * 20,
    ],
)
def test_a_payload_that_is_no_wake_up_stands_for_everything(payload):
    assert wire.unpack(payload) == Batch((), everything=True)


def test_a_probe_wakes_nobody_also_not_in_processes_that_know_of_none():
    payload = wire.probe()
    assert wire.is_probe(payload)
    assert payload != wire.probe()
    [wake_up], everything = wire.unpack(payload)
    assert (wake_up.stream_id, everything) == (0, False)
    assert not any(
        wire.is_probe(other) for other in ["*", "17:0", "10:3", "", *wire.pack(Batch((WakeUp(1, 2),), True))]
    )


def test_a_foreign_word_spoils_no_wake_up_beside_it():
    assert wire.unpack("1:2 nonsense 3:4!") == Batch(
        (WakeUp(1, 2), WakeUp(3, 4, changed=True)), everything=True
    )


def test_an_empty_payload_says_nothing():
    assert wire.unpack("") == Batch((), everything=False)


# Frames from clients -------------------------------------------------------------------------------

GOOD_FRAMES = [
    ({"type": "subscribe", "stream": "a"}, ClientFrame("subscribe", "a", 0)),
    ({"type": "subscribe", "stream": "a/b", "offset": 58}, ClientFrame("subscribe", "a/b", 58)),
    ({"type": "subscribe", "stream": "a", "offset": -3}, ClientFrame("subscribe", "a", -3)),
    ({"type": "subscribe", "stream": "a", "offset": "tail"}, ClientFrame("subscribe", "a", "tail")),
    ({"type": "subscribe", "stream": "a", "offset": MAX_OFFSET}, ClientFrame("subscribe", "a", MAX_OFFSET)),
    ({"type": "subscribe", "stream": "a", "epoch": "e"}, ClientFrame("subscribe", "a", 0, "e")),
    ({"type": "subscribe", "stream": "a", "epoch": None}, ClientFrame("subscribe", "a", 0)),
    ({"type": "subscribe", "stream": "流/😀", "future": [1]}, ClientFrame("subscribe", "流/😀", 0)),
    ({"type": "ack", "stream": "a", "offset": 0}, ClientFrame("ack", "a", 0)),
    ({"type": "unsubscribe", "stream": "a"}, ClientFrame("unsubscribe", "a")),
    ({"type": "cancel", "stream": "a"}, ClientFrame("cancel", "a")),
]


@pytest.mark.parametrize(("frame", "expected"), GOOD_FRAMES)
def test_a_good_frame_is_understood(frame, expected):
    assert wire.parse(json.dumps(frame)) == expected
    assert wire.parse(json.dumps(frame, ensure_ascii=False, indent=2)) == expected


SUBSCRIBE = '{"type":"subscribe","stream":"a","offset":%s}'

BAD_FRAMES = [
    (None, "binary"),
    ("", "not JSON"),
    ("{", "not JSON"),
    ("\x00", "not JSON"),
    ("[" * 60_000, "not JSON"),
    ("9" * 5000, "not JSON"),
    ('{"type":"subscribe","stream":"a"} {}', "not JSON"),
    ("[]", "an array"),
    ('"subscribe"', "a string"),
    ("null", "null"),
    ("true", "true or false"),
    ("1", "a number"),
    ("{}", "type is None"),
    ('{"stream":"a"}', "type is None"),
    ('{"type":"publish","stream":"a"}', "'publish'"),
    ('{"type":["subscribe"],"stream":"a"}', "subscribe, ack, unsubscribe, cancel"),
    ('{"type":{},"stream":"a"}', "subscribe, ack, unsubscribe, cancel"),
    ('{"type":"subscribe"}', '"stream" is missing'),
    ('{"type":"cancel"}', '"stream" is missing'),
    ('{"type":"subscribe","stream":"a","epoch":7}', "epoch is a string, not 7"),
    (SUBSCRIBE % "null", "not None"),
    (SUBSCRIBE % "true", "not True"),
    (SUBSCRIBE % "1.0", "not 1.0"),
    (SUBSCRIBE % '"5"', "not '5'"),
    (SUBSCRIBE % '"Tail"', "not 'Tail'"),
    (SUBSCRIBE % "NaN", "not nan"),
    (SUBSCRIBE % "[]", "not []"),
    (SUBSCRIBE % (MAX_OFFSET + 1), str(MAX_OFFSET + 1)),
    (SUBSCRIBE % (-MAX_OFFSET - 1), str(-MAX_OFFSET - 1)),
    (SUBSCRIBE % f'"{"x" * 1000}"', "…"),
    ('{"type":"ack","stream":"a"}', "not None"),
    ('{"type":"ack","stream":"a","offset":-1}', "0 or more, not -1"),
    ('{"type":"ack","stream":"a","offset":"tail"}', "0 or more, not 'tail'"),
    (" " * 65_537, "65,536"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FRAMES, ids=range(len(BAD_FRAMES)))
def test_a_bad_frame_is_refused_with_a_reason_of_modest_length(text, message):
    with pytest.raises(BadFrame) as caught:
        wire.parse(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250
    assert str(caught.value).isascii() or "…" in str(caught.value)


BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "a/./b",
    "..",
    " a",
    "a ",
    "a\x00",
    "a\nb",
    "\ud800",
    "x" * 256,
    5,
    None,
    [],
    {},
]


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
def test_a_bad_key_is_refused_as_such(key):
    for kind in ("subscribe", "unsubscribe", "cancel", "ack"):
        with pytest.raises(InvalidKey):
            wire.parse(json.dumps({"type": kind, "stream": key, "offset": 1}))


# One-stream URLs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query_string", "offset", "epoch"),
    [
        (b"", 0, None),
        (b"offset=0", 0, None),
        (b"offset=58", 58, None),
        (b"offset=-20", -20, None),
        (b"offset=tail", "tail", None),
        (b"offset=9223372036854775807", MAX_OFFSET, None),
        (b"offset=3&epoch=a-b_c&later=1", 3, "a-b_c"),
        (b"offset=1&offset=2", 2, None),
        (b"epoch=%E2%98%83", 0, "☃"),
        (b"&&", 0, None),
    ],
)
def test_a_url_says_where_to_start(query_string, offset, epoch):
    assert wire.parse_url("a/b", query_string) == ClientFrame("subscribe", "a/b", offset, epoch)


BAD_OFFSETS = [
    *("", "%20", "5%20", "+5", "%2B5", "5.0", "1e3", "1_000", "0x10", "--5", "-", "TAIL", "null"),
    *("9223372036854775808", "-9223372036854775808", "9" * 5000, "%D9%A3", "%00", "%FF", "\xff"),
]


@pytest.mark.parametrize("value", BAD_OFFSETS, ids=range(len(BAD_OFFSETS)))
def test_a_url_with_a_bad_offset_is_refused(value):
    with pytest.raises(BadFrame):
        wire.parse_url("a", b"offset=" + value.encode("latin-1"))


@pytest.mark.parametrize("key", ["", "a//b", "../a", "a\n", "a/", "x" * 256])
def test_a_url_with_a_bad_key_is_refused(key):
    with pytest.raises(InvalidKey):
        wire.parse_url(key, b"")


# Frames for clients --------------------------------------------------------------------------------


def frames(stream, offset, data, max_bytes):
    """The frames as `(bytes, position after, decoded)`."""
    return [
        (len(text.encode()), position, json.loads(text))
        for text, position in wire.chunk_frames(stream, offset, data, max_bytes)
    ]


def test_chunks_are_framed_with_their_positions():
    ((_, position, frame),) = frames("a/b", 57, ["1", '"x"', "{}"], 1000)
    assert frame == {"type": "chunks", "stream": "a/b", "offset": 57, "next": 60, "data": [1, "x", {}]}
    assert position == 60


def test_stored_json_goes_out_as_it_was_stored():
    stored = [
        '{"b": 1.10,\t"a":1e2}',
        "[ 1 ]",
        '"\\u0000\\u00e9"',
        '"é\u2028\u2029\U0001f600"',
        "123456789012345678901234567890",
    ]
    ((text, _),) = wire.chunk_frames("a", 0, stored, 10_000)
    assert text.endswith(f',"data":[{",".join(stored)}]}}')
    assert json.loads(text)["data"][2] == "\x00é"


def test_no_chunks_make_no_frame():
    assert frames("a", 0, [], 1000) == []


@pytest.mark.parametrize("key", ["a", "流" * 255, "😀" * 255, '"\\'])
@pytest.mark.parametrize("character", ["x", "é", "😀"])
def test_no_frame_is_larger_than_its_bound(key, character):
    numbers = random.Random(7)
    data = [json.dumps(character * numbers.randrange(1000), ensure_ascii=False) for _ in range(500)]
    for max_bytes in (8192, 20_000, 262_144):
        made = frames(key, MAX_OFFSET - 501, data, max_bytes)
        assert max(size for size, _, _ in made) <= max_bytes
        assert [text for _, _, frame in made for text in frame["data"]] == [json.loads(text) for text in data]
        ends = [frame["next"] for _, _, frame in made]
        assert [frame["offset"] for _, _, frame in made] == [MAX_OFFSET - 501, *ends[:-1]]
        assert ends == [position for _, position, _ in made]
        assert ends[-1] == MAX_OFFSET - 1
        # Not one chunk per frame either: what fits goes together.
        assert all(size > max_bytes - 5000 for size, _, _ in made[:-1])


def test_a_chunk_larger_than_the_bound_has_a_frame_of_its_own():
    made = frames("a", 0, ["1", json.dumps("x" * 5000), "2", "3"], 1000)
    assert [(frame["offset"], frame["next"]) for _, _, frame in made] == [(0, 1), (1, 2), (2, 4)]


def test_a_bound_smaller_than_a_frame_without_data_still_brings_everything():
    made = frames("a" * 255, 5, ["1", "2"], 1)
    assert [(frame["offset"], frame["data"]) for _, _, frame in made] == [(5, [1]), (6, [2])]


def test_frames_without_payload_are_ascii_and_leave_out_a_missing_stream():
    assert wire.frame("ping") == '{"type":"ping"}'
    text = wire.frame("error", "流", code="forbidden", message="nö")
    assert text.isascii()
    assert json.loads(text) == {"type": "error", "stream": "流", "code": "forbidden", "message": "nö"}
