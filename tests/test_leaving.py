"""Whatever a socket was doing when it ended, it leaves nothing behind, and nothing in the log."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from autobahn.exception import Disconnected
from django.db import connections
from uvicorn.protocols.utils import ClientDisconnected

from django_pgstreams.models import Stream
from tests.visits import Visit, append, followers, held, lock_chunks, tasks, wait_until

pytestmark = pytest.mark.usefixtures("visited")


class Gate:
    """Where a permission hook waits, in the database thread, until it is let through."""

    def __init__(self):
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, user, stream, action):
        if stream.key != "free":
            self.reached.set()
            assert self.open.wait(30)
        return True


gate = Gate()


@pytest.fixture
def closed_gate(settings):
    gate.__init__()
    settings.PGSTREAMS = {"PERMISSION": f"{__name__}.gate"}
    yield gate
    gate.open.set()


async def disconnect(visit):
    await visit.leave()


async def kill(visit):
    """What Daphne does at its own end."""
    visit.communicator.future.cancel()
    await asyncio.wait([visit.communicator.future])


endings = pytest.mark.parametrize("end", [disconnect, kill])


async def assert_nothing_left(visit, end):
    """End the socket, at once, with nothing left."""
    started = time.monotonic()
    await end(visit)
    assert time.monotonic() - started < 5
    assert visit.communicator.future.done()
    assert followers() == 0
    assert tasks() == set()


@endings
async def test_before_anything_was_asked(end):
    async with Visit() as visit:
        await assert_nothing_left(visit, end)


@endings
@pytest.mark.parametrize("path", ["/ws/streams/", "/ws/streams/a/b/"])
async def test_before_the_handshake_is_over(owner, stream, end, path):
    visit = Visit(path, owner)
    await visit.communicator.send_input({"type": "websocket.connect"})
    await assert_nothing_left(visit, end)


@endings
async def test_while_the_permission_is_checked(owner, stream, closed_gate, end):
    async with Visit("/ws/streams/a/b/", owner) as visit:
        assert await asyncio.to_thread(closed_gate.reached.wait, 20)
        await assert_nothing_left(visit, end)


def reads_a_page():
    return any(task.get_name() == "pgstreams-page" for task in asyncio.all_tasks())


@endings
async def test_while_a_page_is_read(owner, stream, end):
    await append(stream, *range(10))
    async with held(lock_chunks), Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frame()
        await wait_until(reads_a_page, "the read begins")
        await assert_nothing_left(visit, end)
    # The read that nobody waits for any more disturbs nobody.
    async with Visit("/ws/streams/a/b/", owner) as visit:
        assert (await visit.frames("live"))[1]["data"] == list(range(10))


@endings
async def test_in_the_middle_of_a_replay_that_the_client_does_not_read(owner, stream, settings, end):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 10, "MAX_FRAME_BYTES": 1}
    await append(stream, *range(1000))
    visit = Visit("/ws/streams/a/b/", owner)
    visit.communicator._output_queue = asyncio.Queue(maxsize=1)  # as a server that makes the sender wait
    async with visit:
        assert [await visit.frame() for _ in range(16)][-1]["data"] == [14]
        await wait_until(visit.communicator.output_queue.full, "the consumer waits in its send")
        await assert_nothing_left(visit, end)


@endings
async def test_while_it_waits_for_acknowledgements(owner, stream, settings, end):
    settings.PGSTREAMS = {"PAGE_CHUNKS": 10, "MAX_FRAME_BYTES": 1, "MAX_UNACKED_BYTES": 1}
    await append(stream, *range(100))
    async with Visit("/ws/streams/a/b/", owner, acknowledges=False) as visit:
        assert (await visit.frame())["type"] == "subscribed"
        assert (await visit.frame())["data"] == [0]
        assert await visit.communicator.receive_nothing()
        await assert_nothing_left(visit, end)


@endings
async def test_while_live(owner, stream, end):
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frames("live")
        assert followers() == 1
        await assert_nothing_left(visit, end)


@endings
async def test_with_many_streams_in_every_state(owner, stream, closed_gate, end):
    free = await Stream.objects.acreate(key="free", owner=owner)
    await append(free, *range(10))
    async with Visit(user=owner) as visit:
        await visit.send("subscribe", "free")
        await visit.frames("live")
        await visit.send("subscribe", "a/b")
        await visit.send("cancel", "unknown")
        assert await asyncio.to_thread(closed_gate.reached.wait, 20)
        if end is disconnect:
            closed_gate.open.set()  # a cancellation is carried out first
        await assert_nothing_left(visit, end)


@endings
async def test_after_the_end_of_the_stream(owner, stream, end):
    await append(stream, 0, close=True)
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frames("closed")
        assert await visit.close_code() == 1000
        await assert_nothing_left(visit, end)


@endings
async def test_after_a_refusal(stream, end):
    async with Visit("/ws/streams/a/b/") as visit:
        await visit.frame()
        assert await visit.close_code() == 4403
        await assert_nothing_left(visit, end)


async def test_a_hook_that_blocks_hinders_no_socket_that_needs_none(owner, stream, closed_gate):
    free = await Stream.objects.acreate(key="free", owner=owner)
    async with Visit("/ws/streams/free/", owner) as visit, Visit("/ws/streams/free/", owner) as leaving:
        await visit.frames("live")
        await leaving.frames("live")
        async with Visit("/ws/streams/a/b/", owner) as blocked:
            assert await asyncio.to_thread(closed_gate.reached.wait, 20)
            await visit.send("ack", "free", offset=5)
            assert (await visit.frame())["code"] == "bad_ack"
            await leaving.leave()
            # The database thread is taken: what appends must have one of its own.
            await asyncio.to_thread(append_in_this_thread, free, "on time")
            assert (await visit.frame())["data"] == ["on time"]
            assert blocked.communicator.output_queue.empty()
        closed_gate.open.set()


def append_in_this_thread(stream, value):
    stream.append(value)
    connections.close_all()


class Late:
    """A server whose `send` fails from some moment on, as that of a real one when its client has gone."""

    def __init__(self, error):
        self.error = error
        self.fails = False
        self.failed = 0

    def __call__(self, application):
        async def late(scope, receive, send):
            async def failing_send(message):
                if self.fails:
                    self.failed += 1
                    raise self.error
                await send(message)

            await application(scope, receive, failing_send)

        return late


@pytest.mark.parametrize(
    "error",
    [
        ClientDisconnected(),
        ConnectionResetError(),
        Disconnected("Attempt to send on a closed protocol"),
        RuntimeError("Unexpected ASGI message 'websocket.send', after sending 'websocket.close'"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("path", ["/ws/streams/a/b/", "/ws/streams/"])
async def test_a_client_that_vanished_is_no_error(owner, stream, settings, error, path):
    settings.PGSTREAMS = {"HEARTBEAT_SECONDS": 0.02}
    late = Late(error)
    visit = Visit(path, owner)
    visit.communicator.application = late(visit.communicator.application)
    async with visit:
        if path == "/ws/streams/":
            await visit.send("subscribe", "a/b")
        await visit.frames("live")
        late.fails = True
        await append(stream, "into the void", close=True)
        await wait_until(lambda: tasks() == set(), "everything stops at the first failure")
        assert late.failed == 1
        await visit.send_text("?")
        await visit.send("subscribe", "a/b")
        await assert_nothing_left(visit, disconnect)
    assert late.failed == 1
