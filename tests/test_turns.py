"""Turns of the database thread: what calls share, and what they do not."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.db import DatabaseError, connection
from django.test import Client

from django_pgstreams import lookups, turns
from django_pgstreams.auth import AuthMiddlewareStack
from django_pgstreams.models import Stream
from tests.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.usefixtures("visited")


def backend_pid():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return cursor.fetchone()[0]


async def connected():
    """Whether the thread has a connection."""
    return await sync_to_async(lambda: connection.connection is not None)()


# Calls -----------------------------------------------------------------------------------------------


async def test_calls_that_wait_together_share_a_connection_which_is_given_back():
    pids = await asyncio.gather(*(turns.run(backend_pid) for _ in range(100)))
    assert len(set(pids)) == 1
    assert not await connected()


async def test_an_error_is_its_callers_alone():
    def fail():
        raise ValueError("only mine")

    results = await asyncio.gather(
        turns.run(int, "1"), turns.run(fail), turns.run(int, "3"), return_exceptions=True
    )
    assert results[::2] == [1, 3]
    assert str(results[1]) == "only mine"


async def test_an_iterator_that_has_ended_is_an_error_too():
    with pytest.raises(RuntimeError, match="StopIteration"):
        await turns.run(next, iter([]))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
async def test_what_ends_a_thread_or_a_task_ends_neither_and_is_its_callers_alone(kind):
    """The call that ends so is answered, those that wait behind it are made, and so are later ones."""

    def fail():
        raise kind

    calls = [turns.run(int, "1"), turns.run(fail), turns.run(int, "3")]
    async with asyncio.timeout(DEADLINE_SECONDS):
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results[::2] == [1, 3]
        assert str(results[1]) == f"a call raised {kind.__name__}"
        assert isinstance(results[1].__cause__, kind)
        assert await turns.run(int, "4") == 4


async def test_a_broken_connection_does_not_serve_the_next_call():
    def break_it():
        with pytest.raises(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    _, pid = await asyncio.gather(turns.run(break_it), turns.run(backend_pid))
    assert pid


async def test_a_transaction_left_open_is_not_the_next_calls():
    def begin():
        connection.set_autocommit(False)
        return backend_pid()

    before, after = await asyncio.gather(turns.run(begin), turns.run(backend_pid))
    assert before != after


async def test_a_call_sees_its_callers_context():
    name = contextvars.ContextVar("name")

    async def ask(value):
        name.set(value)
        return await turns.run(name.get)

    assert await asyncio.gather(ask("one"), ask("two")) == ["one", "two"]


async def test_a_call_may_go_back_to_async_code_that_asks_the_database(owner):
    async def count():
        return await User.objects.acount()

    calls = [turns.run(async_to_sync(count)) for _ in range(2)]
    assert await asyncio.gather(*calls, turns.run(int, "1")) == [1, 1, 1]


async def test_whoever_leaves_is_not_called_for_and_keeps_nobody_waiting():
    made = []
    asked = [asyncio.ensure_future(turns.run(made.append, number)) for number in range(3)]
    asked[1].cancel()
    await asyncio.wait(asked)
    assert made == [0, 2]


async def test_others_get_the_thread_while_many_wait():
    ready = []

    def work():
        time.sleep(0.02)
        ready.append(None)

    calls = [asyncio.ensure_future(turns.run(work)) for _ in range(50)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert await sync_to_async(lambda: len(ready))() < 50
    await asyncio.gather(*calls)


async def test_connections_that_async_queries_keep_are_given_back():
    await User.objects.acount()
    assert await connected()
    await turns.give_back()
    await connected()  # nobody waits for it: the thread comes to it next
    assert not await connected()


# Look-ups --------------------------------------------------------------------------------------------


class Shelf:
    """What can be looked up; the query begins and ends when the test wants."""

    def __init__(self):
        self.queries = []
        self.holds = {"a": 1, "b": 2}
        self.begun, self.may_end = threading.Event(), threading.Event()

    def find(self, keys):
        self.queries.append(set(keys))
        found = {key: self.holds[key] for key in keys if key in self.holds}
        self.begun.set()
        self.may_end.wait(30)
        return found


async def test_who_asks_at_the_same_moment_shares_a_query():
    shelf = Shelf()
    shelf.may_end.set()
    look_up = turns.LookUp(shelf.find)
    assert await asyncio.gather(*map(look_up.get, ["a", "b", "c", "a"])) == [1, 2, None, 1]
    assert shelf.queries == [{"a", "b", "c"}]


async def test_who_asks_after_a_query_has_begun_is_not_given_its_answer():
    shelf = Shelf()
    look_up = turns.LookUp(shelf.find)
    early = asyncio.ensure_future(look_up.get("a"))
    await asyncio.to_thread(shelf.begun.wait, 30)
    shelf.holds["a"] = "changed since"
    late = asyncio.ensure_future(look_up.get("a"))
    await asyncio.sleep(0)
    shelf.may_end.set()
    assert await asyncio.gather(early, late) == [1, "changed since"]
    assert await look_up.get("a") == "changed since"  # and nothing is kept


async def test_whoever_leaves_does_not_take_the_answer_away():
    shelf = Shelf()
    look_up = turns.LookUp(shelf.find)
    first, second = (asyncio.ensure_future(look_up.get("a")) for _ in range(2))
    await asyncio.to_thread(shelf.begun.wait, 30)
    first.cancel()
    shelf.may_end.set()
    assert await second == 1


async def test_an_error_reaches_all_who_asked():
    def fail(keys):
        raise DatabaseError("away")

    look_up = turns.LookUp(fail)
    results = await asyncio.gather(look_up.get("a"), look_up.get("b"), return_exceptions=True)
    assert [str(result) for result in results] == ["away", "away"]


async def test_a_query_that_never_began_is_not_the_next_ones(monkeypatch):
    def fail():
        raise DatabaseError("no turn")

    shelf = Shelf()
    shelf.may_end.set()
    look_up = turns.LookUp(shelf.find)
    with monkeypatch.context() as patch:
        patch.setattr(turns, "close_old_connections", fail)
        with pytest.raises(DatabaseError, match="no turn"):
            await look_up.get("a")
    assert await look_up.get("a") == 1


async def test_streams_are_found_by_key_each_caller_with_an_instance_of_its_own(stream):
    await Stream.objects.acreate(key="other")
    one, two, other, unknown = await asyncio.gather(
        *(lookups.stream(key, "default") for key in ("a/b", "a/b", "other", "unknown"))
    )
    assert one == two == stream
    assert one is not two
    assert (other.key, unknown) == ("other", None)


# Users -----------------------------------------------------------------------------------------------


async def test_sockets_have_the_user_of_their_session(owner):
    def log_in():
        client = Client()
        client.force_login(owner)
        return client.cookies["sessionid"].value

    session = await sync_to_async(log_in)()
    users = []

    async def inner(scope, receive, send):
        users.append(scope["user"])

    application = AuthMiddlewareStack(inner)
    for cookie in (f"sessionid={session}", "sessionid=unknown", "other=1"):
        await application({"type": "websocket", "headers": [(b"cookie", cookie.encode())]}, None, None)
    assert users[0] == owner
    assert [user.is_authenticated for user in users] == [True, False, False]
