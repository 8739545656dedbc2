"""The tests of a project of its own, run by `manage.py test` or pytest-django: no helper of ours."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.fresh_project import Block, FreshProject

if TYPE_CHECKING:
    from collections.abc import Iterator

# Beside the README's own tests: everything of the app that connects or starts a thread, and is left as it is.
MORE_TESTS = """
import threading

from asgiref.sync import sync_to_async
from channels.db import database_sync_to_async
from channels.routing import URLRouter
from channels.testing import WebsocketCommunicator
from django.contrib.auth.models import User
from django.db import connections
from django.test import TestCase, TransactionTestCase

from django_pgstreams.hub import subscribe
from django_pgstreams.models import Chunk, Stream
from django_pgstreams.routing import websocket_urlpatterns
from django_pgstreams.writer import StreamWriter


class RolledBackTests(TestCase):
    @classmethod
    def setUpTestData(cls):
        cls.stream = Stream.objects.create(key="made once")

    def test_appends_are_rolled_back_1(self):
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            self.stream.append(1)
        self.assertEqual(len(callbacks), 1)
        self.assertEqual(self.stream.chunks.count(), 1)

    def test_appends_are_rolled_back_2(self):
        with self.captureOnCommitCallbacks(execute=True):
            self.stream.append_many([1, 2])
        self.assertEqual([chunk.data for chunk in self.stream.read()], [1, 2])

    def test_a_stream_can_be_deleted(self):
        self.stream.append(1)
        self.stream.delete()
        self.assertFalse(Chunk.objects.exists())


class FollowingTests(TransactionTestCase):
    def test_a_blocking_reader_gets_what_another_thread_appends(self):
        stream = Stream.objects.create(key="followed")
        found = []

        def read():
            found.extend(chunk.data for chunk in subscribe(stream))
            connections.close_all()  # a thread's own, as ever with Django

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(10):
            stream.append(number)
        stream.close()
        thread.join(30)
        self.assertEqual(found, list(range(10)))

    def test_a_reader_may_leave_in_the_middle(self):
        stream = Stream.objects.create(key="left")
        stream.append_many(range(10))
        for chunk in subscribe(stream):
            if chunk.data == 4:
                break

    async def test_an_async_reader_gets_what_is_appended(self):
        stream = await Stream.objects.acreate(key="followed")
        await stream.aappend_many(range(10), close=True)
        self.assertEqual([chunk.data async for chunk in subscribe(stream)], list(range(10)))


class WriterTests(TransactionTestCase):
    def test_a_writer_stores_what_readers_follow(self):
        stream = Stream.objects.create(key="written")
        with StreamWriter(stream) as writer:
            self.assertEqual([writer.append(number) for number in range(3)], [0, 1, 2])
        stream.close()
        self.assertEqual([chunk.data for chunk in subscribe(stream)], [0, 1, 2])

    async def test_a_writer_whose_block_is_never_left(self):
        writer = StreamWriter(await Stream.objects.acreate(key="written"))
        for number in range(1000):
            writer.append_nowait(number)
        await writer.aappend("waited for")


class ConsumerTests(TransactionTestCase):
    async def connect(self, key, user):
        socket = WebsocketCommunicator(URLRouter(websocket_urlpatterns), f"/ws/streams/{key}/?offset=0")
        socket.scope["user"] = user
        await socket.connect(timeout=30)
        self.assertEqual((await socket.receive_json_from(30))["type"], "subscribed")
        return socket

    async def test_a_socket_that_is_disconnected(self):
        user = await User.objects.acreate_user("ada")
        stream = await Stream.objects.acreate(key="open", owner=user)
        socket = await self.connect("open", user)
        self.assertEqual((await socket.receive_json_from(30))["type"], "live")
        await database_sync_to_async(stream.append)({"text": "hello"})
        self.assertEqual((await socket.receive_json_from(30))["data"], [{"text": "hello"}])
        await socket.disconnect(timeout=30)

    async def test_a_socket_that_is_left_open(self):
        user = await User.objects.acreate_user("ada")
        stream = await Stream.objects.acreate(key="open", owner=user)
        socket = await self.connect("open", user)
        await sync_to_async(stream.append)({"text": "hello"})
        frame = await socket.receive_json_from(30)
        while frame["type"] != "chunks":
            frame = await socket.receive_json_from(30)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProject]:
    """The README's project with more tests, and no database yet."""
    name = f"plain_{secrets.token_hex(4)}"
    built = FreshProject(tmp_path_factory.mktemp("plain"), name)
    built.follow_readme(migrated=False)
    built.paste(Block("python", "notes/test_more.py", MORE_TESTS))
    yield built
    with built.connect("postgres") as server:
        for database in databases_of_tests(built):
            server.execute(f'DROP DATABASE "{database}" WITH (FORCE)')


def databases_of_tests(project: FreshProject) -> list[str]:
    """The test databases of the project that exist, those of parallel processes included."""
    with project.connect("postgres") as server:
        found = server.execute(
            "SELECT datname FROM pg_database WHERE starts_with(datname, %s) ORDER BY datname",
            (f"test_{project.database}",),
        )
        return [name for (name,) in found.fetchall()]


def run_tests(project: FreshProject, *options: str) -> str:
    """Run the project's tests by Django's runner; returns what was printed, in which nothing complains."""
    printed = run_quietly(project, "manage.py", "test", "--noinput", *options)
    assert "Ran 12 tests" in printed
    return printed


def run_quietly(project: FreshProject, *command: str) -> str:
    """Run a command to its good end; returns what was printed, in which nothing complains."""
    code, printed = project.run(*command, timeout_seconds=180)
    assert code == 0, printed
    for complaint in ("Traceback", "Warning", "Exception ignored", "never awaited", "was destroyed"):
        assert complaint not in printed, printed
    return printed


@pytest.mark.parametrize("options", [(), ("--parallel", "2"), ("--reverse", "--shuffle", "7")])
def test_the_tests_pass_and_leave_no_database(project: FreshProject, options: tuple[str, ...]) -> None:
    run_tests(project, *options)
    assert databases_of_tests(project) == []


def test_a_database_that_is_kept_serves_again_and_can_be_destroyed(project: FreshProject) -> None:
    for _ in range(2):
        run_tests(project, "--keepdb")
        assert databases_of_tests(project) == [f"test_{project.database}"]
    run_tests(project)
    assert databases_of_tests(project) == []


@pytest.mark.once
def test_pytest_django_runs_them_too(project: FreshProject) -> None:
    options = ["-p", "no:cacheprovider", "-p", "no:asyncio"]
    printed = run_quietly(project, "-m", "pytest", *options, "notes/tests.py", "notes/test_more.py")
    assert "12 passed" in printed
    assert databases_of_tests(project) == []
