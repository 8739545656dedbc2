"""Flow control by `ack`: a client gets so much ahead of what it acknowledges, then waits, then is closed."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest

from django_pgstreams import hub
from django_pgstreams.models import Stream
from django_pgstreams.pages import Run
from tests.visits import Visit, append, execute, followers, tasks, trim, wait_until

pytestmark = pytest.mark.usefixtures("visited")

BOUND = 10_000
CHUNK = "x" * 1000


@pytest.fixture(autouse=True)
def bounded(settings):
    """Nine frames of a chunk may be unacknowledged, and nothing stalls before a test wants it."""
    settings.PGSTREAMS = {
        "MAX_UNACKED_BYTES": BOUND,
        "MAX_FRAME_BYTES": 2000,
        "PAGE_CHUNKS": 20,
        "STALL_SECONDS": 300,
    }
    return settings


def visit_of(owner, path="/ws/streams/a/b/"):
    return Visit(path, owner, acknowledges=False)


async def waits():
    """Wait until a subscription waits for its client."""

    def waiting():
        return any(
            frame.f_code.co_name == "room"
            for task in asyncio.all_tasks()
            if task.get_name() == "pgstreams-subscription"
            for frame in coroutine_frames(task.get_coro())
        )

    await wait_until(waiting, "the subscription waits for room")


def coroutine_frames(coroutine):
    while coroutine is not None and hasattr(coroutine, "cr_frame"):
        if coroutine.cr_frame is not None:
            yield coroutine.cr_frame
        coroutine = coroutine.cr_await


async def full(visit):
    """The frames that come until the subscription waits."""
    await waits()
    frames = []
    while not visit.communicator.output_queue.empty():
        frames.append(await visit.frame())
    return frames


def values(frames):
    return [value for frame in frames if frame["type"] == "chunks" for value in frame["data"]]


def sent_bytes(frames):
    """The size of the `chunks` frames, as they were sent."""
    chunks = (frame for frame in frames if frame["type"] == "chunks")
    return sum(len(json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode()) for frame in chunks)


# How much is sent -------------------------------------------------------------------------------------


async def test_a_client_that_never_acknowledges_gets_the_bound_and_no_more(owner, stream):
    await append(stream, *[CHUNK] * 100)
    async with visit_of(owner) as visit:
        frames = await full(visit)
        assert [frame["type"] for frame in frames] == ["subscribed"] + ["chunks"] * (len(frames) - 1)
        assert BOUND - 1200 < sent_bytes(frames) <= BOUND
        assert await visit.communicator.receive_nothing(0.2)


def runs():
    """The ids of all runs of chunks that are in memory."""
    gc.collect()
    return {id(run) for run in gc.get_objects() if isinstance(run, Run) and len(run)}


async def test_whoever_waits_reads_nothing_and_holds_nothing(owner, stream):
    await append(stream, *[CHUNK] * 100)
    of_other_tests = runs()
    async with visit_of(owner) as visit:
        await full(visit)
        assert not runs() - of_other_tests
        before = hub.get("default").queries
        await append(stream, *[CHUNK] * 10)
        assert await visit.communicator.receive_nothing(0.2)
        assert hub.get("default").queries == before


@pytest.mark.parametrize("size", [100, 1000, 2500, 30_000])
async def test_everything_arrives_once_and_in_order_as_it_is_acknowledged(owner, stream, size):
    for number in range(40):
        await append(stream, f"{number} {'é' * (size // 2)}")
    async with visit_of(owner) as visit:
        received = 0
        while received < 40:
            chunks = await settled(visit)
            assert len(chunks) == 1 or sent_bytes(chunks) <= BOUND
            for frame in chunks:
                assert frame["offset"] == received
                assert [value.split()[0] for value in frame["data"]] == [
                    str(number) for number in range(received, frame["next"])
                ]
                received = frame["next"]
            await visit.send("ack", "a/b", offset=received)


async def settled(visit):
    """The `chunks` frames that come until none comes any more."""
    frames = [await visit.frame()]
    while not await visit.communicator.receive_nothing(0.05):
        frames.append(await visit.frame())
    return [frame for frame in frames if frame["type"] == "chunks"]


async def test_a_live_stream_waits_and_goes_on_too(owner, stream):
    async with visit_of(owner) as visit:
        await visit.frames("live")
        for number in range(20):
            await append(stream, f"{number:1000}")
        frames = await full(visit)
        assert sent_bytes(frames) <= BOUND
        assert frames[-1]["next"] < 20
        while frames[-1]["next"] < 20:
            await visit.send("ack", "a/b", offset=frames[-1]["next"])
            frames.append(await visit.frame())
        assert [int(value) for value in values(frames)] == list(range(20))


async def test_a_chunk_larger_than_the_bound_goes_alone(owner, stream):
    await append(stream, "small", "x" * 50_000, "y" * 50_000, "last")
    async with visit_of(owner) as visit:
        frames = await full(visit)
        assert values(frames) == ["small"]
        for position, data in ((1, ["x" * 50_000]), (2, ["y" * 50_000]), (3, ["last"])):
            await visit.send("ack", "a/b", offset=position)
            assert (await visit.frame())["data"] == data


async def test_one_stream_that_waits_hinders_no_other_of_its_socket(owner, stream):
    other = await Stream.objects.acreate(key="other", owner=owner)
    await append(stream, *[CHUNK] * 100)
    async with visit_of(owner, "/ws/streams/") as visit:
        await visit.send("subscribe", "a/b")
        await full(visit)
        await visit.send("subscribe", "other")
        await visit.frames("live")
        await append(other, "not hindered")
        frame = await visit.frame()
        assert (frame["stream"], frame["data"]) == ("other", ["not hindered"])


async def test_a_socket_that_acknowledges_hinders_no_other_and_is_hindered_by_none(owner, stream):
    async with visit_of(owner) as slow, Visit("/ws/streams/a/b/", owner) as healthy:
        await slow.frames("live")
        await healthy.frames("live")
        for number in range(50):
            await append(stream, f"{number:1000}")
            assert (await healthy.frame())["data"] == [f"{number:1000}"]
        assert sent_bytes(await full(slow)) <= BOUND


# What comes meanwhile --------------------------------------------------------------------------------


async def test_the_end_comes_after_the_chunks_that_wait(owner, stream):
    await append(stream, *[CHUNK] * 20, close=True)
    async with visit_of(owner) as visit:
        frames = await full(visit)
        assert "closed" not in [frame["type"] for frame in frames]
        while frames[-1]["type"] != "closed":
            if frames[-1]["type"] == "chunks":
                await visit.send("ack", "a/b", offset=frames[-1]["next"])
            frames.append(await visit.frame())
        assert values(frames) == [CHUNK] * 20
        assert frames[-1]["offset"] == 20
        assert await visit.close_code() == 1000


async def test_the_end_waits_for_no_acknowledgement_of_its_own(owner, stream):
    await append(stream, "all that there is", close=True)
    async with visit_of(owner) as visit:
        assert [frame["type"] for frame in await visit.frames("closed")] == ["subscribed", "chunks", "closed"]


async def test_what_is_trimmed_meanwhile_is_a_gap(owner, stream):
    await append(stream, *(f"{number:1000}" for number in range(30)))
    async with visit_of(owner) as visit:
        position = (await full(visit))[-1]["next"]
        await trim(stream, 25)
        await visit.send("ack", "a/b", offset=position)
        assert await visit.frame() == {"type": "gap", "stream": "a/b", "requested": position, "first": 25}
        await visit.send("ack", "a/b", offset=25)
        frames = await visit.frames("live")
        assert [int(value) for value in values(frames)] == list(range(25, 30))


async def test_another_life_of_the_key_meanwhile_ends_the_old_one(owner, stream):
    await append(stream, *[CHUNK] * 30)
    async with visit_of(owner) as visit:
        position = (await full(visit))[-1]["next"]
        await stream.adelete()
        await visit.send("ack", "a/b", offset=position)
        closed = await visit.frame()
        assert (closed["type"], closed["state"]) == ("closed", "deleted")


async def test_a_reset_owes_nothing_for_the_life_before(owner, stream):
    """As after Postgres was restored from a backup: the stream is the same row, in another life."""
    await append(stream, *[CHUNK] * 30)
    async with visit_of(owner) as visit:
        position = (await full(visit))[-1]["next"]
        await execute(
            """WITH restored AS (
                   UPDATE pgstreams_stream SET epoch = 'restored', next_offset = 1 WHERE id = %s RETURNING id
               ), kept AS (
                   UPDATE pgstreams_chunk AS c SET payload = %s FROM restored
                   WHERE c.stream_id = restored.id AND c."offset" = 0
               ) DELETE FROM pgstreams_chunk AS c USING restored
               WHERE c.stream_id = restored.id AND c."offset" > 0""",
            stream.pk,
            b'"restored"',
        )
        await visit.send("ack", "a/b", offset=position)
        frames = await visit.frames("live")
        assert [frame["type"] for frame in frames] == ["reset", "chunks", "live"]
        assert frames[1]["data"] == ["restored"]
        await visit.send("ack", "a/b", offset=position)  # of the life before: it was on its way
        await visit.send("ack", "a/b", offset=1)
        await append(stream, "next")
        assert (await visit.frame())["data"] == ["next"]


async def test_what_is_acknowledged_of_the_life_before_makes_no_room_in_this_one(owner, stream):
    """The acknowledgement was on its way when the reset was sent."""
    await append(stream, *[CHUNK] * 30)
    async with visit_of(owner) as visit:
        position = (await full(visit))[-1]["next"]
        await execute(
            """WITH restored AS (UPDATE pgstreams_stream SET epoch = 'restored' WHERE id = %s RETURNING id)
               UPDATE pgstreams_chunk AS c SET payload = %s FROM restored WHERE c.stream_id = restored.id""",
            stream.pk,
            json.dumps(3 * CHUNK).encode(),
        )
        await visit.send("ack", "a/b", offset=position - 1)
        assert (await visit.frame())["type"] == "reset"
        frames = await full(visit)
        assert frames[-1]["next"] < position
        await visit.send("ack", "a/b", offset=position)
        assert await visit.communicator.receive_nothing(0.2)
        await visit.send("ack", "a/b", offset=frames[-1]["next"])
        assert (await visit.frame())["offset"] == frames[-1]["next"]


async def test_unsubscribing_while_it_waits_ends_it(owner, stream):
    await append(stream, *(f"{number:1000}" for number in range(30)))
    async with visit_of(owner, "/ws/streams/") as visit:
        await visit.send("subscribe", "a/b")
        position = (await full(visit))[-1]["next"]
        await visit.send("unsubscribe", "a/b")
        await wait_until(lambda: followers() == 0, "the subscription ends")
        await visit.send("subscribe", "a/b", offset=position)
        frames = await full(visit)
        assert frames[0]["offset"] == position
        assert int(values(frames)[0]) == position


# Stalls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/ws/streams/a/b/", "/ws/streams/"])
async def test_a_stalled_socket_is_closed_with_its_code(owner, stream, bounded, path):
    bounded.PGSTREAMS |= {"STALL_SECONDS": 0.2}
    other = await Stream.objects.acreate(key="other", owner=owner)
    await append(stream, *[CHUNK] * 30)
    async with visit_of(owner, path) as visit:
        if path == "/ws/streams/":
            await visit.send("subscribe", "a/b")
            await visit.send("subscribe", "other")
        frames = await visit.frames("error")
        assert (frames[-1]["code"], frames[-1]["stream"]) == ("stalled", "a/b")
        assert await visit.close_code() == 4408
        await append(other, "late")
        await wait_until(lambda: tasks() == set(), "the socket's tasks end")
        assert followers() == 0
    position = [frame for frame in frames if frame["type"] == "chunks"][-1]["next"]
    async with Visit(f"/ws/streams/a/b/?offset={position}", owner) as visit:
        assert values(frames) + values(await visit.frames("live")) == [CHUNK] * 30


async def test_a_client_that_gets_on_however_slowly_is_not_stalled(owner, stream, bounded):
    bounded.PGSTREAMS |= {"STALL_SECONDS": 1.0, "MAX_FRAME_BYTES": 5000}
    await append(stream, *[CHUNK] * 100)
    async with visit_of(owner) as visit:
        await full(visit)
        # In the middle of its first frame: no room yet, but it moves.
        for position in (1, 2, 3):
            await asyncio.sleep(0.6)
            await visit.send("ack", "a/b", offset=position)
        assert visit.communicator.output_queue.empty()
        assert followers() == 1


async def test_a_stream_with_nothing_to_send_is_never_stalled(owner, stream, bounded):
    bounded.PGSTREAMS |= {"STALL_SECONDS": 0.1}
    await append(stream, *[CHUNK] * 5)
    async with visit_of(owner) as visit:
        await visit.frames("live")
        assert await visit.communicator.receive_nothing(0.5)
        await append(stream, "still here")
        assert (await visit.frame())["data"] == ["still here"]


async def test_a_server_that_waits_for_a_client_that_does_not_read_is_not_kept(owner, stream, bounded):
    bounded.PGSTREAMS |= {"STALL_SECONDS": 0.2, "HEARTBEAT_SECONDS": 0.1}
    await append(stream, *[CHUNK] * 30)
    visit = visit_of(owner)
    visit.communicator._output_queue = asyncio.Queue(maxsize=1)
    async with visit:
        await visit.frame()
        await wait_until(lambda: tasks() <= {"pgstreams-heartbeat"}, "the subscription is given up")
        assert followers() == 0
        message = await visit.message()
        while message["type"] != "websocket.close":
            message = await visit.message()
        assert message["code"] == 4408
