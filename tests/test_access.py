"""Who may see and cancel what over a websocket, and what the others are told: always the same."""

from __future__ import annotations

import logging
import statistics
import time

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import AnonymousUser, User
from django.db import OperationalError, connections

from django_pgstreams.consumers import StreamConsumer
from django_pgstreams.models import Stream
from tests.visits import Visit, append, followers, held, tasks, wait_until

pytestmark = pytest.mark.usefixtures("visited")

# Looking ---------------------------------------------------------------------------------------------


async def refusal(path, user):
    """What a visitor of a one-stream URL is told before the socket closes, and with which code."""
    async with Visit(path, user) as visit:
        frames = await visit.frames("error")
        return frames, await visit.close_code()


def refused(request, key, message):
    """The frame that refuses a request."""
    about = {"stream": key, "request": request}
    return {"type": "error", **about, "code": "forbidden", "message": message}


async def test_without_a_hook_a_stream_is_for_its_owner(owner, stream):
    await append(stream, "secret")
    stranger = await User.objects.acreate(username="stranger")
    inactive = await User.objects.acreate(username="inactive", is_active=False)
    await Stream.objects.acreate(key="inactive", owner=inactive)
    message = "This stream does not exist, or you may not see it."
    for user, key in [
        (stranger, "a/b"),
        (stranger, "unknown"),
        (None, "a/b"),
        (AnonymousUser(), "a/b"),
        (AnonymousUser(), "unknown"),
        (inactive, "inactive"),
        (inactive, "unknown"),
    ]:
        error = refused("subscribe", key, message)
        assert await refusal(f"/ws/streams/{key}/", user) == ([error], 4403)
    async with Visit(user=stranger) as visit:
        for key in ("a/b", "unknown"):
            await visit.send("subscribe", key)
            assert await visit.frame() == refused("subscribe", key, message)
    assert followers() == 0


async def test_a_refusal_does_not_tell_by_its_time_whether_the_stream_exists(owner, stream):
    await append(stream, *range(1000))
    stranger = await User.objects.acreate(username="stranger")
    times = {"a/b": [], "unknown": []}
    async with Visit(user=stranger) as visit:
        for _ in range(50):
            for key, measured in times.items():
                started = time.perf_counter()
                await visit.send("subscribe", key)
                await visit.frame()
                measured.append(time.perf_counter() - started)
    exists, unknown = (statistics.median(measured) for measured in times.values())
    noise = statistics.quantiles(times["a/b"], n=4)[2] - statistics.quantiles(times["a/b"], n=4)[0]
    assert abs(exists - unknown) < max(noise, 0.2 * unknown), (exists, unknown, noise)


def raises(user, stream, action):
    raise RuntimeError("the policy is broken")


def truthy(user, stream, action):
    return "yes"


@pytest.mark.parametrize("hook", ["raises", "truthy"])
@pytest.mark.parametrize("key", ["a/b", "unknown"])
async def test_a_hook_that_fails_refuses(owner, stream, settings, log, hook, key):
    settings.PGSTREAMS = {"PERMISSION": f"{__name__}.{hook}"}
    await append(stream, "secret")
    frames, code = await refusal(f"/ws/streams/{key}/", owner)
    assert ([frame["code"] for frame in frames], code) == (["forbidden"], 4403)
    (record,) = log()
    assert repr(key) in record.getMessage()


def database_is_away(user, stream, action):
    raise OperationalError("the connection is lost")


class LosesDatabase(StreamConsumer):
    async def get_stream(self, key):
        await Stream.objects.filter(key=key).aexists()
        raise OperationalError("the connection is lost")


@pytest.mark.parametrize("consumer", [LosesDatabase, StreamConsumer])
@pytest.mark.parametrize("key", ["a/b", "unknown"])
async def test_a_database_that_is_away_refuses_but_not_for_good(owner, stream, settings, log, consumer, key):
    if consumer is StreamConsumer:
        settings.PGSTREAMS = {"PERMISSION": f"{__name__}.database_is_away"}
    await append(stream, "secret")
    async with Visit(f"/ws/streams/{key}/", owner, consumer=consumer) as visit:
        error = await visit.frame()
        assert (error["type"], error["code"], error["stream"]) == ("error", "unavailable", key)
        assert await visit.close_code() == 4500
    (record,) = log()
    assert "the connection is lost" in record.getMessage()
    async with Visit(user=owner, consumer=consumer) as visit:
        for kind in ("subscribe", "cancel"):
            await visit.send(kind, key)
            error = await visit.frame()
            assert (error["code"], error["request"]) == ("unavailable", kind)
        assert await sync_to_async(lambda: connections["default"].connection)() is None
    assert followers() == 0


class Lending(StreamConsumer):
    """Overrides both: aliases for keys, and a decision of its own with Django's async queries."""

    async def get_stream(self, key):
        if key == "broken":
            raise LookupError(key)
        return await Stream.objects.filter(key={"alias": "a/b"}.get(key, key)).afirst()

    async def has_permission(self, stream, action):
        return await Stream.objects.filter(key="a/b", pk=stream.pk).aexists() and action == "view"


async def test_streams_and_permissions_can_be_overridden(stream, log):
    await append(stream, "lent")
    async with Visit(user=AnonymousUser(), consumer=Lending) as visit:
        await visit.send("subscribe", "alias")
        frames = await visit.frames("live")
        assert {frame["stream"] for frame in frames} == {"alias"}
        assert frames[1]["data"] == ["lent"]
        await visit.send("cancel", "alias")
        assert (await visit.frame())["code"] == "forbidden"
        assert log() == []
        await visit.send("subscribe", "broken")
        assert (await visit.frame())["code"] == "forbidden"
        (record,) = log()
        assert record.exc_info is not None
        assert await sync_to_async(lambda: connections["default"].connection)() is None


class Careless(StreamConsumer):
    """Says yes in a way that is not True."""

    async def has_permission(self, stream, action):
        return 1


async def test_an_override_allows_with_true_alone(owner, stream):
    async with Visit("/ws/streams/a/b/", owner, consumer=Careless) as visit:
        assert (await visit.frame())["code"] == "forbidden"
        assert await visit.close_code() == 4403


def informed(caplog):
    """What the consumer has said, without alarm."""
    return [
        record.getMessage()
        for record in caplog.get_records("call")
        if (record.name, record.levelno) == ("django_pgstreams.consumers", logging.INFO)
    ]


@pytest.mark.parametrize("request_type", ["subscribe", "cancel"])
async def test_a_refusal_is_logged_with_who_and_why(owner, stream, caplog, log, request_type):
    caplog.set_level(logging.INFO, logger="django_pgstreams")
    stranger = await User.objects.acreate(username="stranger")
    for user, key, consumer, by in [
        (stranger, "a/b", None, f"user {stranger.pk} (no permission)"),
        (stranger, "unknown", None, f"user {stranger.pk} (no such stream)"),
        (AnonymousUser(), "a/b", None, "an anonymous user (no permission)"),
        (None, "unknown", None, "an anonymous user (no such stream)"),
        (owner, "broken", Lending, f"user {owner.pk} (the check failed)"),
    ]:
        caplog.clear()
        async with Visit(user=user, consumer=consumer) as visit:
            await visit.send(request_type, key)
            assert (await visit.frame())["code"] == "forbidden"
        assert informed(caplog) == [f"Refused: {request_type}, stream {key!r}, by {by}"]


async def test_a_cancellation_is_logged_and_no_chunk_is(owner, stream, caplog):
    caplog.set_level(logging.DEBUG, logger="django_pgstreams.consumers")
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frames("live")
        await append(stream, 0)
        await visit.frame()
        await visit.send("cancel", "a/b")
        await visit.frames("closed")
        await visit.close_code()
    assert informed(caplog) == [f"Cancelled: stream 'a/b', by user {owner.pk}"]


# Cancelling -----------------------------------------------------------------------------------------


async def test_the_owner_cancels_a_stream(owner, stream):
    async with Visit("/ws/streams/a/b/", owner) as visit:
        await visit.frames("live")
        await visit.send("cancel", "a/b")
        closed = await visit.frame()
        assert (closed["type"], closed["state"], closed["reason"]) == (
            "closed",
            "cancelled",
            "cancelled by a reader",
        )
    await stream.arefresh_from_db()
    assert stream.state == "cancelled"


async def test_cancelling_needs_no_subscription(owner, stream):
    async with Visit(user=owner) as visit:
        await visit.send("cancel", "a/b")
        await visit.send("cancel", "a/b")
        await wait_until(lambda: not tasks() - {"pgstreams-heartbeat"}, "the cancellation ends")
    await stream.arefresh_from_db()
    assert stream.state == "cancelled"


async def test_a_cancellation_is_carried_out_though_the_visitor_leaves(owner, stream):
    for leaves_by in ("disconnect", "close"):
        doomed = await Stream.objects.acreate(key=leaves_by, owner=owner)
        async with Visit(user=owner) as visit:
            await visit.send("cancel", leaves_by)
            await visit.leave()
        await doomed.arefresh_from_db()
        assert doomed.state == "cancelled"
    assert tasks() == set()


async def test_who_may_view_may_not_cancel_therefore(stream, settings):
    settings.PGSTREAMS = {"PERMISSION": f"{__name__}.may_view"}
    async with Visit("/ws/streams/a/b/", AnonymousUser()) as visit:
        await visit.frames("live")
        for key in ("a/b", "unknown"):
            await visit.send("cancel", key)
            message = "This stream does not exist, or you may not cancel it."
            assert await visit.frame() == refused("cancel", key, message)
        await append(stream, "still open")
        assert (await visit.frame())["data"] == ["still open"]


def may_view(user, stream, action):
    return action == "view"


async def test_a_stream_that_has_ended_is_not_cancelled(owner, stream):
    await stream.aclose()
    async with Visit(user=owner) as visit:
        await visit.send("cancel", "a/b")
        error = await visit.frame()
        assert (error["code"], error["stream"], error["request"]) == ("closed", "a/b", "cancel")


async def test_cancelling_behind_a_long_transaction_is_busy_and_hinders_no_other_socket(
    owner, stream, settings
):
    settings.PGSTREAMS = {"LOCK_TIMEOUT_SECONDS": 1.0}
    await Stream.objects.acreate(key="other", owner=owner)
    async with Visit(user=owner) as visit, Visit(user=owner) as other:
        async with held(lambda: stream.append("held")):
            started = time.monotonic()
            await visit.send("cancel", "a/b")
            await wait_until(lambda: "pgstreams-cancel" in tasks(), "the cancellation begins")
            await other.send("subscribe", "other")
            await other.frames("live")
            assert "pgstreams-cancel" in tasks(), "the other socket had to wait for the lock"
            error = await visit.frame()
            assert (error["code"], error["stream"], error["request"]) == ("busy", "a/b", "cancel")
            assert time.monotonic() - started >= 1.0
        await visit.send("cancel", "a/b")
        await wait_until(lambda: "pgstreams-cancel" not in tasks(), "the cancellation ends")
    await stream.arefresh_from_db()
    assert stream.state == "cancelled"
