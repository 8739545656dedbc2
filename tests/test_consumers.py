"""`StreamConsumer` in this process: the whole protocol, with the right values."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json

import pytest
from asgiref.sync import sync_to_async
from channels.layers import BaseChannelLayer
from django.db import transaction

from django_pgstreams.consumers import MAX_BAD_FRAMES, StreamConsumer
from django_pgstreams.models import Stream
from tests.visits import Visit, append, execute, followers, tasks, trim, wait_until

pytestmark = pytest.mark.usefixtures("visited")


# Following -----------------------------------------------------------------------------------------


async def test_a_stream_is_replayed_followed_and_ended(owner, stream):
    await append(stream, {"n": 0}, "one", 2)
    async with Visit(user=owner) as visit:
        await visit.send("subscribe", "a/b")
        assert await visit.frames("live") == [
            {
                "type": "subscribed",
                "stream": "a/b",
                "epoch": stream.epoch,
                "offset": 0,
                "first": 0,
                "tail": 3,
                "state": "open",
                "content_type": "application/json",
            },
            {"type": "chunks", "stream": "a/b", "offset": 0, "next": 3, "data": [{"n": 0}, "one", 2]},
            {"type": "live", "stream": "a/b", "offset": 3},
        ]
        await append(stream, None, [True])
        assert await visit.frame() == {
            "type": "chunks",
            "stream": "a/b",
            "offset": 3,
            "next": 5,
            "data": [None, [True]],
        }
        await stream.aclose()
        assert await visit.frame() == {
            "type": "closed",
            "stream": "a/b",
            "offset": 5,
            "state": "completed",
            "reason": "",
        }
        assert followers() == 0
        # The socket is for other streams too, and stays.
        await visit.send("subscribe", "a/b", offset=4)
        assert [frame["type"] for frame in await visit.frames("closed")] == ["subscribed", "chunks", "closed"]


async def test_the_socket_of_a_one_stream_url_ends_with_its_stream(owner, stream):
    await append(stream, 0, 1, 2)
    async with Visit("/ws/streams/a/b/?offset=1", owner) as visit:
        frames = await visit.frames("live")
        assert frames[0]["offset"] == 1
        assert frames[1]["data"] == [1, 2]
        await append(stream, "last", close=True)
        assert (await visit.frame())["data"] == ["last"]
        assert (await visit.frame())["type"] == "closed"
        assert await visit.close_code() == 1000


async def test_an_ended_stream_is_replayed_and_ends(owner, stream):
    await append(stream, 0, close=True)
    async with Visit("/ws/streams/a/b/", owner) as visit:
        assert [frame["type"] for frame in await visit.frames("closed")] == ["subscribed", "chunks", "closed"]
        assert await visit.close_code() == 1000


async def test_an_empty_stream_is_live_at_once(owner, stream):
    async with Visit("/ws/streams/a/b/", owner) as visit:
        frames = await visit.frames("live")
        assert [frame["type"] for frame in frames] == ["subscribed", "live"]
        assert frames[1]["offset"] == 0


@pytest.mark.parametrize(
    ("offset", "first"),
    [(0, 0), (3, 3), (9, 9), (10, 10), ("tail", 10), (-1, 9), (-4, 6), (-10, 0), (-11, 0), (1 - 2**63, 0)],
)
async def test_a_subscription_starts_where_it_says(owner, stream, offset, first):
    await append(stream, *range(10))
    async with Visit(user=owner) as visit, Visit(f"/ws/streams/a/b/?offset={offset}", owner) as url_visit:
        await visit.send("subscribe", "a/b", offset=offset)
        for each in (visit, url_visit):
            frames = await each.frames("live")
            assert frames[0]["offset"] == first
            assert [value for frame in frames[1:-1] for value in frame["data"]] == list(range(first, 10))
            assert frames[-1]["offset"] == 10


async def test_viewers_of_one_stream_share_its_frames_but_not_their_names_for_it(owner, stream):
    class Aliased(StreamConsumer):
        async def get_stream(self, key):
            return await super().get_stream("a/b")

    async with contextlib.AsyncExitStack() as stack:
        visits = {}
        for key in ("one", "two", "one/too"):
            visits[key] = await stack.enter_async_context(
                Visit(f"/ws/streams/{key}/", owner, consumer=Aliased)
            )
            await visits[key].frames("live")
        for number in range(3):
            await append(stream, number)
            for key, visit in visits.items():
                frame = await visit.frame()
                assert (frame["stream"], frame["offset"], frame["data"]) == (key, number, [number])


async def test_many_streams_share_a_socket(owner):
    streams = [await Stream.objects.acreate(key=f"many/{number}", owner=owner) for number in range(20)]
    async with Visit(user=owner) as visit:
        for stream in streams:
            await visit.send("subscribe", stream.key)
        for _ in range(20 * 2):
            assert (await visit.frame())["type"] in ("subscribed", "live")
        for stream in streams:
            await append(stream, f"{stream.key}-0", f"{stream.key}-1")
        for stream in streams:
            await append(stream, f"{stream.key}-2", close=True)
        found = {stream.key: [] for stream in streams}
        ended = set()
        while len(ended) < len(streams):
            frame = await visit.frame()
            assert frame["stream"] not in ended
            if frame["type"] == "closed":
                ended.add(frame["stream"])
            else:
                found[frame["stream"]] += frame["data"]
        assert found == {stream.key: [f"{stream.key}-{n}" for n in range(3)] for stream in streams}
        assert followers() == 0


@pytest.mark.parametrize("end", ["close", "fail", "cancel", "delete"])
async def test_every_end_is_told_after_the_last_chunk(owner, stream, end, settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 300}
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frames("live")
        if end == "close":
            await append(stream, "last", close=True)
        elif end == "delete":
            await stream.adelete()
        else:
            await append(stream, "last")
            await (stream.afail if end == "fail" else stream.acancel)("because 😀")
        frames = await visit.frames("closed")
        assert [frame["data"] for frame in frames[:-1]] == ([] if end == "delete" else [["last"]])
        state = {"close": "completed", "fail": "failed", "cancel": "cancelled", "delete": "deleted"}[end]
        reason = "because 😀" if end in ("fail", "cancel") else ""
        offset = 0 if end == "delete" else 1
        assert frames[-1] == {
            "type": "closed",
            "stream": "a/b",
            "offset": offset,
            "state": state,
            "reason": reason,
        }
        assert await visit.close_code() == 1000


async def test_an_endless_reason_is_cut(owner, stream):
    await stream.afail("x" * 5_000_000)
    async with Visit("/ws/streams/a/b/", owner) as visit:
        assert (await visit.frames("closed"))[-1]["reason"] == "x" * 4000


async def test_a_visitor_who_leaves_does_not_end_the_stream(owner, stream):
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frames("live")
    await append(stream, "still open")
    await stream.arefresh_from_db()
    assert stream.state == "open"


# Where a position leads nowhere ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "gap"), [(101, True), (500, True), (501, False), (502, False), (0, True)]
)
async def test_a_position_that_was_trimmed_away_gets_a_gap(owner, stream, position, gap):
    await append(stream, *range(510))
    await trim(stream, 501)
    async with Visit(f"/ws/streams/a/b/?offset={position}", owner) as visit:
        frames = await visit.frames("live")
        assert (frames[0]["offset"], frames[0]["first"], frames[0]["tail"]) == (position, 501, 510)
        gaps = [frame for frame in frames if frame["type"] == "gap"]
        assert gaps == (
            [{"type": "gap", "stream": "a/b", "requested": position, "first": 501}] if gap else []
        )
        assert frames.index(gaps[0]) == 1 if gap else True
        values = [value for frame in frames if frame["type"] == "chunks" for value in frame["data"]]
        assert values == list(range(max(position, 501), 510))


async def test_the_last_chunks_begin_after_a_gap_without_one(owner, stream):
    await append(stream, *range(10))
    await trim(stream, 8)
    async with Visit("/ws/streams/a/b/?offset=-5", owner) as visit:
        frames = await visit.frames("live")
        assert frames[0]["offset"] == 8
        assert [frame["type"] for frame in frames] == ["subscribed", "chunks", "live"]


async def test_a_stream_with_nothing_left_has_a_gap_up_to_its_tail(owner, stream):
    await append(stream, *range(10))
    await trim(stream, 10)
    async with Visit("/ws/streams/a/b/?offset=4", owner) as visit:
        frames = await visit.frames("live")
        assert frames[1:] == [
            {"type": "gap", "stream": "a/b", "requested": 4, "first": 10},
            {"type": "live", "stream": "a/b", "offset": 10},
        ]
        await append(stream, "next")
        assert (await visit.frame())["offset"] == 10


async def test_what_is_trimmed_between_two_pages_is_a_gap_and_no_silent_jump(owner, stream, settings):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 10}
    await append(stream, *range(100))
    halted, go_on = asyncio.Event(), asyncio.Event()

    class Halting(StreamConsumer):
        async def send(self, text_data=None, bytes_data=None, close=False):
            if '"chunks"' in text_data:
                halted.set()
                await go_on.wait()
            await super().send(text_data)

    async with Visit("/ws/streams/a/b/", owner, consumer=Halting) as visit:
        await halted.wait()  # with the first page in hand
        await trim(stream, 20)
        go_on.set()
        frames = (await visit.frames("live"))[1:-1]
        assert frames[0]["data"] == list(range(10))
        assert frames[1] == {"type": "gap", "stream": "a/b", "requested": 10, "first": 20}
        assert [value for frame in frames[2:] for value in frame["data"]] == list(range(20, 100))


async def test_another_life_of_the_key_is_a_reset(owner, stream):
    await append(stream, "old", "old")
    await stream.adelete()
    again = await Stream.objects.acreate(key="a/b", owner=owner)
    await append(again, "new")
    async with Visit(user=owner) as visit:
        await visit.send("subscribe", "a/b", offset=1, epoch=stream.epoch)
        frames = await visit.frames("live")
        assert [frame["type"] for frame in frames] == ["subscribed", "reset", "chunks", "live"]
        assert frames[0]["epoch"] == frames[1]["epoch"] == again.epoch
        assert (frames[2]["offset"], frames[2]["data"]) == (0, ["new"])


async def test_a_position_beyond_the_tail_is_a_reset(owner, stream):
    await append(stream, 0, 1)
    async with Visit("/ws/streams/a/b/?offset=3", owner) as visit:
        frames = await visit.frames("live")
        assert [frame["type"] for frame in frames] == ["subscribed", "reset", "chunks", "live"]
        assert frames[2]["data"] == [0, 1]


@pytest.mark.parametrize(("offset", "data"), [("tail", []), (-1, [1])])
async def test_the_tail_is_that_of_the_present_life(owner, stream, offset, data):
    await append(stream, 0, 1)
    async with Visit(f"/ws/streams/a/b/?offset={offset}&epoch=of-another-life", owner) as visit:
        frames = await visit.frames("live")
        assert [value for frame in frames[1:-1] for value in frame["data"]] == data


async def test_the_right_epoch_changes_nothing(owner, stream):
    await append(stream, 0, 1)
    async with Visit(f"/ws/streams/a/b/?offset=1&epoch={stream.epoch}", owner) as visit:
        assert [frame["type"] for frame in await visit.frames("live")] == ["subscribed", "chunks", "live"]


# Bursts, whatever channel layer is configured --------------------------------------------------------


class BrokenLayer(BaseChannelLayer):
    """A layer that can do nothing, as one whose server is away."""

    def __getattribute__(self, name):
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise ConnectionError(f"{name}: the layer's server is away")


LAYERS = {
    "none": {},
    "in-memory": {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer", "CONFIG": {"capacity": 1}}},
    "broken": {"default": {"BACKEND": f"{__name__}.BrokenLayer"}},
    "missing": {"default": {"BACKEND": "no.such.Layer"}},
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("restless", [False, True])
async def test_a_burst_arrives_whole_whatever_the_channel_layer(owner, stream, settings, layer, restless):
    settings.CHANNEL_LAYERS = LAYERS[layer]
    over = asyncio.Event()

    async def reconnect():
        while not over.is_set():
            async with Visit("/ws/streams/a/b/", owner) as visitor:
                await visitor.frame()

    others = [asyncio.create_task(reconnect()) for _ in range(20 if restless else 0)]
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frames("live")
        await append_one_by_one(stream, 1000)
        assert await visit.data(1000) == list(range(1000))
        await stream.aclose()
        assert (await visit.frame())["offset"] == 1000
    over.set()
    await asyncio.gather(*others)
    assert followers() == 0


@sync_to_async
def append_one_by_one(stream, count):
    with transaction.atomic():
        for number in range(count):
            stream.append(number)


# What frames hold ------------------------------------------------------------------------------------

AWKWARD_TEXTS = [
    "",
    "\x00",
    "😀",
    'quote " and \\',
    "\r\n\t",
    "\u2028\u2029",
    "\x7f\x80\ufeff\uffff",
    "</script>",
]


async def test_json_goes_out_byte_for_byte_as_it_was_stored(owner, stream):
    for payload in (
        b'{ "b":1.10 ,"a":1E2}',
        b'"\\u0000"',
        '"😀\u2028"'.encode(),
        b"123456789012345678901234567890",
    ):
        await execute(
            """WITH taken AS (
                   UPDATE pgstreams_stream SET next_offset = next_offset + 1 WHERE id = %s
                   RETURNING id, next_offset - 1 AS "offset"
               ) INSERT INTO pgstreams_chunk (stream_id, "offset", payload)
               SELECT id, "offset", %s FROM taken""",
            stream.pk,
            payload,
        )
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frame()
        text = await visit.text()
    spliced = '{ "b":1.10 ,"a":1E2},"\\u0000","😀\u2028",123456789012345678901234567890'
    assert text == f'{{"type":"chunks","stream":"a/b","offset":0,"next":4,"data":[{spliced}]}}'


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/ld+json; charset=utf-8", "text/plain"]
)
async def test_awkward_text_arrives_unchanged(owner, content_type):
    stream = await Stream.objects.acreate(key="a", owner=owner, content_type=content_type)
    await append(stream, *AWKWARD_TEXTS)
    async with Visit("/ws/streams/a/", owner) as visit:
        frames = await visit.frames("live")
    assert frames[0]["content_type"] == content_type
    assert [value for frame in frames[1:-1] for value in frame["data"]] == AWKWARD_TEXTS


@pytest.mark.parametrize("content_type", ["application/octet-stream", "image/png"])
async def test_bytes_arrive_as_base64(owner, content_type):
    stream = await Stream.objects.acreate(key="a", owner=owner, content_type=content_type)
    payloads = [b"", b"\x00", bytes(range(256)), b'"]}']
    await append(stream, *payloads)
    async with Visit("/ws/streams/a/", owner) as visit:
        frames = await visit.frames("live")
    assert [base64.b64decode(value) for frame in frames[1:-1] for value in frame["data"]] == payloads


async def test_catching_up_keeps_every_frame_within_its_bound(owner, stream):
    await append(stream, *("x" * 10 * 1024 for _ in range(300)))
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frame()
        offset = 0
        sizes = []
        while offset < 300:
            text = await visit.text()
            frame = json.loads(text)
            assert frame["offset"] == offset
            assert frame["data"] == ["x" * 10 * 1024] * (frame["next"] - offset)
            offset = frame["next"]
            await visit.send("ack", "a/b", offset=offset)
            sizes.append(len(text.encode()))
    assert max(sizes) <= 262_144
    assert len(sizes) <= 20


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
async def test_stored_bytes_that_are_no_text_are_named_after_what_precedes_them(owner, content_type, log):
    stream = await Stream.objects.acreate(key="a", owner=owner, content_type=content_type)
    await append(stream, "zero", "one", "two", "three")
    await execute(
        'UPDATE pgstreams_chunk SET payload = %s WHERE stream_id = %s AND "offset" = 2',
        b"\xff\xfe",
        stream.pk,
    )
    async with Visit("/ws/streams/a/", owner) as visit:
        frames = await visit.frames("error")
        assert [frame["type"] for frame in frames] == ["subscribed", "chunks", "error"]
        assert frames[1]["data"] == ["zero", "one"]
        assert (frames[2]["code"], frames[2]["request"]) == ("unreadable", "subscribe")
        assert "Chunk 2 " in frames[2]["message"]
        assert "from 3 " in frames[2]["message"]
        # Not for another try: it would end here again.
        assert await visit.close_code() == 4422
    (record,) = log()
    assert record.exc_info is None
    # The way round it that the frame names.
    assert frames[2]["next"] == 3
    async with Visit(f"/ws/streams/a/?offset={frames[2]['next']}", owner) as visit:
        assert (await visit.frames("live"))[1]["data"] == ["three"]
    assert followers() == 0


# Frames from the client -----------------------------------------------------------------------------

MALFORMED = [
    ("not json", "bad_frame"),
    ("[]", "bad_frame"),
    ('{"type":"publish","stream":"a"}', "bad_frame"),
    ('{"type":"subscribe"}', "bad_frame"),
    ('{"type":"subscribe","stream":"a","offset":1.5}', "bad_frame"),
    ('{"type":"subscribe","stream":"a","offset":"first"}', "bad_frame"),
    ('{"type":"subscribe","stream":"a","offset":9223372036854775808}', "bad_frame"),
    ('{"type":"subscribe","stream":"a","epoch":1}', "bad_frame"),
    ('{"type":"subscribe","stream":5}', "bad_key"),
    ('{"type":"subscribe","stream":""}', "bad_key"),
    ('{"type":"subscribe","stream":"a\\u0000b"}', "bad_key"),
    ('{"type":"subscribe","stream":"\\ud83d"}', "bad_key"),
    ('{"type":"subscribe","stream":"../a"}', "bad_key"),
    ('{"type":"ack","stream":"a"}', "bad_frame"),
    ('{"type":"ack","stream":"a","offset":-1}', "bad_frame"),
    ('{"type":"cancel","stream":{"a":1}}', "bad_key"),
    ("[" * 60_000, "bad_frame"),
    ('"' + "x" * 70_000 + '"', "bad_frame"),
]


async def test_malformed_frames_get_an_error_each_and_the_socket_lives_on(owner, stream):
    await append(stream, 0)
    async with Visit(user=owner) as visit:
        for text, code in MALFORMED:
            await visit.send_text(text)
            error = await visit.frame()
            assert (error["type"], error["code"]) == ("error", code), text
            assert error.keys() == {"type", "code", "message"}
        await visit.send_bytes(b'{"type":"subscribe","stream":"a/b"}')
        assert (await visit.frame())["code"] == "bad_frame"
        await visit.send("subscribe", "a/b")
        assert (await visit.frames("live"))[1]["data"] == [0]


async def test_too_many_malformed_frames_in_a_row_end_the_socket(owner, stream):
    async with Visit(user=owner) as visit:
        for _ in range(2):
            for _ in range(MAX_BAD_FRAMES // 2 - 1):
                for text, code in [("?", "bad_frame"), ('{"type":"cancel","stream":"/"}', "bad_key")]:
                    await visit.send_text(text)
                    assert (await visit.frame())["code"] == code
            await visit.send("ack", "a/b", offset=0)  # understood: it begins anew
        for _ in range(MAX_BAD_FRAMES):
            await visit.send_text("?")
            assert (await visit.frame())["code"] == "bad_frame"
        assert await visit.close_code() == 4400


async def test_subscribing_twice_brings_one_replay(owner, stream):
    await append(stream, *range(5))
    async with Visit(user=owner) as visit:
        await visit.send("subscribe", "a/b", offset=2)
        await visit.send("subscribe", "a/b", offset=2)
        frames = await visit.frames("live")
        await visit.send("subscribe", "a/b", offset=0)
        frames += await visit.frames("error")
        await append(stream, 5)
        frames.append(await visit.frame())
        assert [frame["code"] for frame in frames if frame["type"] == "error"] == ["already_subscribed"] * 2
        assert [value for frame in frames if frame["type"] == "chunks" for value in frame["data"]] == [
            2,
            3,
            4,
            5,
        ]
        assert followers() == 1


async def test_two_sockets_of_one_user_each_get_every_chunk_once(owner, stream):
    await append(stream, 0, 1)
    async with Visit("/ws/streams/a/b/", owner) as one, Visit("/ws/streams/a/b/", owner) as two:
        await append(stream, 2, 3)
        await append(stream, 4)
        for visit in (one, two):
            assert await visit.data(5) == [0, 1, 2, 3, 4]


async def test_acknowledging_is_accepted_ignored_or_refused(owner, stream):
    await append(stream, 0, 1, 2)
    async with Visit(user=owner) as visit:
        await visit.send("ack", "a/b", offset=7)  # not followed: ignored
        await visit.send("subscribe", "a/b", offset=1)
        await visit.send("ack", "a/b", offset=1)  # where it starts, at once
        await visit.frames("live")
        for position in (2, 3, 1, 0, 3):
            await visit.send("ack", "a/b", offset=position)
        await visit.send("ack", "a/b", offset=4)
        error = await visit.frame()
        assert (error["code"], error["stream"], error["request"]) == ("bad_ack", "a/b", "ack")
        assert "only 3" in error["message"]
        await append(stream, 3, close=True)
        await visit.frames("closed")
        await visit.send("ack", "a/b", offset=4)  # after the end: ignored
        await visit.send_text("?")
        assert (await visit.frame())["code"] == "bad_frame"


async def test_unsubscribing_ends_a_stream_and_one_may_read_on_from_elsewhere(owner, stream):
    await append(stream, *range(5))
    async with Visit(user=owner) as visit:
        await visit.send("unsubscribe", "a/b")  # nothing to end
        await visit.send("subscribe", "a/b", offset=3)
        await visit.frames("live")
        await visit.send("unsubscribe", "a/b")
        await wait_until(lambda: followers() == 0, "the subscription ends")
        await append(stream, 5)
        await visit.send("subscribe", "a/b", offset=1)
        frames = await visit.frames("live")
        assert frames[0]["offset"] == 1
        assert [value for frame in frames[1:-1] for value in frame["data"]] == [1, 2, 3, 4, 5]


async def test_unsubscribing_and_subscribing_in_a_row_mixes_nothing_up(owner, stream):
    await append(stream, *range(50))
    async with Visit(user=owner) as visit:
        for offset in range(50):
            await visit.send("subscribe", "a/b", offset=offset)
            if offset < 49:
                await visit.send("unsubscribe", "a/b")
        position = None
        while True:
            frame = await visit.frame()
            if frame["type"] == "subscribed":
                position = frame["offset"]
            elif frame["type"] == "chunks":
                assert frame["offset"] == position
                assert frame["data"] == list(range(position, frame["next"]))
                position = frame["next"]
            elif frame["type"] == "live" and frame["offset"] == 50 and position == 50:
                break
        assert followers() <= 1


async def test_a_socket_follows_a_limited_number_of_streams(owner, settings):
    settings.PGSTREAMS = {"MAX_SUBSCRIPTIONS": 3}
    for number in range(4):
        await Stream.objects.acreate(key=f"s{number}", owner=owner)
    async with Visit(user=owner) as visit:
        for number in range(3):
            await visit.send("subscribe", f"s{number}")
            await visit.frames("live")
        await visit.send("subscribe", "s3")
        error = await visit.frame()
        assert (error["stream"], error["code"]) == ("s3", "too_many")
        await visit.send("unsubscribe", "s0")
        await visit.send("subscribe", "s3")
        assert {frame["stream"] for frame in await visit.frames("live")} == {"s3"}


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (None, None),
        (["pgstreams.v1"], "pgstreams.v1"),
        (["pgstreams.v1", "a-secret-token"], "pgstreams.v1"),
        (["a-secret-token", "pgstreams.v1"], "pgstreams.v1"),
        (["a-secret-token", "pgstreams.v2", "PGSTREAMS.V1"], None),
    ],
)
async def test_only_the_protocol_is_echoed(owner, offered, chosen):
    async with Visit(user=owner, subprotocols=offered) as visit:
        assert visit.subprotocol == chosen


async def test_pings_come_and_move_no_position(owner, stream, settings):
    settings.PGSTREAMS = {"HEARTBEAT_SECONDS": 0.05}
    await append(stream, 0)
    async with Visit("/ws/streams/a/b/", owner) as visit:
        frames = [await visit.frame() for _ in range(8)]
        assert frames.count({"type": "ping"}) >= 4
        await append(stream, 1)
        frames += await visit.frames("chunks")
        chunks = [frame for frame in frames if frame["type"] == "chunks"]
        assert [(frame["offset"], frame["next"]) for frame in chunks] == [(0, 1), (1, 2)]


# URLs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["a//b/", "..%2Fa/", "a%00b/", "a%0Ab/", "%20a/", "/", "a//"]
    + [f"a/?offset={offset}" for offset in ("", "x", "1.5", "%2B1", "1_000", "99999999999999999999", "%FF")],
)
async def test_a_url_that_makes_no_sense_is_closed_with_its_code(owner, path):
    async with Visit(f"/ws/streams/{path}", owner) as visit:
        error = await visit.frame()
        assert (error["type"], error["code"]) == ("error", "bad_request")
        assert await visit.close_code() == 4400
    assert followers() == 0


async def test_only_the_stream_of_the_url_ends_its_socket(owner, stream):
    other = await Stream.objects.acreate(key="other", owner=owner)
    await append(other, 0, close=True)
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frames("live")
        await visit.send("subscribe", "unknown")
        assert (await visit.frame())["code"] == "forbidden"
        await visit.send("subscribe", "other")
        assert (await visit.frames("closed"))[-1]["stream"] == "other"
        await append(stream, "still here", close=True)
        assert [frame["stream"] for frame in await visit.frames("closed")] == ["a/b", "a/b"]
        assert await visit.close_code() == 1000


async def test_nothing_follows_a_close(owner, stream, settings):
    settings.PGSTREAMS = {"HEARTBEAT_SECONDS": 0.01}
    other = await Stream.objects.acreate(key="other", owner=owner)
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.send("subscribe", "other")
        await visit.frames("live")
        await visit.frames("live")
        await append(stream, close=True)
        message = await visit.message()
        while message["type"] != "websocket.close":
            message = await visit.message()
        await append(other, "late")
        await visit.send("subscribe", "a/b")
        await visit.send_text("?")
        await wait_until(lambda: tasks() == set(), "the socket's tasks end with the close")
        assert followers() == 0
        await wait_until(visit.communicator.input_queue.empty, "the late frames are read")
        assert await visit.communicator.receive_nothing()
