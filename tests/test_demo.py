"""The demo: its command in a real process, its pages, its guests and what they may see."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest
from django.contrib.auth import get_user_model

from django_pgstreams.models import Stream
from example_project.answers import tokens
from example_project.producers import ABANDONED, STOPPED
from tests.waiting import wait_until

from .demo_process import DemoDatabase, DemoProcess, Visitor, demo_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.once

User = get_user_model()
SLOW = {"tokens_per_second": 10, "length": 900}
FAST = {"tokens_per_second": 200, "length": 30}

# The command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database(django_db_setup, django_db_blocker) -> Iterator[DemoDatabase]:
    with django_db_blocker.unblock(), demo_database() as own:
        yield own


@pytest.fixture
def start(database) -> Iterator[Callable[..., DemoProcess]]:
    """Start a demo that is ready, with arguments; it is stopped after the test."""
    started: list[DemoProcess] = []

    def start_demo(*arguments: str) -> DemoProcess:
        started.append(DemoProcess(database, "--port", "0", *arguments))
        started[-1].wait_ready()
        return started[-1]

    yield start_demo
    for demo in started:
        demo.close()


def has_chunks(database: DemoDatabase, key: str) -> bool:
    return database.stream(key)["next_offset"] > 0


def is_closed(database: DemoDatabase, key: str) -> bool:
    return database.stream(key)["state"] != "open"


def test_one_command_serves_every_page(start):
    demo = start()
    visitor = Visitor(demo.url)
    page = "/static/example_project"
    for path in (
        "/",
        "/ask/",
        "/log/",
        "/favicon.ico",
        f"{page}/stream.js",
        f"{page}/demo.js",
        f"{page}/demo.css",
    ):
        assert visitor.get(path)[0] == 200, path
    user, password = re.search(r"user (\w+), password (\S+)", demo.output).groups()
    status, path, text = Visitor(demo.url).post(
        "/admin/login/", username=user, password=password, next="/admin/"
    )
    assert (status, path) == (200, "/admin/")
    assert "Streams" in text


def test_an_answer_is_stored_as_the_model_gives_it(start, database):
    key = Visitor(start().url).ask(**FAST)
    wait_until(lambda: is_closed(database, key), "the answer ends")
    row = database.stream(key)
    assert (row["state"], row["content_type"]) == ("completed", "text/plain")
    expected = tokens(Stream(metadata=row["metadata"]))
    assert [payload.decode() for payload in database.payloads(key)] == list(expected)


def test_answers_keep_to_the_rate_that_was_asked_for(start, database):
    visitor = Visitor(start("--rate", "17").url)
    assert 'value="17"' in visitor.get("/ask/")[2]
    started = time.monotonic()
    key = visitor.ask(tokens_per_second=20, length=20)
    wait_until(lambda: is_closed(database, key), "the answer ends")
    assert time.monotonic() - started >= (len(database.payloads(key)) - 1) / 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_everything_quickly_and_quietly(start, database, number):
    demo = start()
    visitor = Visitor(demo.url)
    keys = [visitor.ask(**SLOW), visitor.run("library")]
    for key in keys:
        wait_until(lambda key=key: has_chunks(database, key), "it writes")
    at = time.monotonic()
    demo.send(number)
    assert demo.wait() == 0
    assert time.monotonic() - at < 10
    assert demo.output.endswith("ready\nstopped\n")
    for key in keys:
        row = database.stream(key)
        assert (row["state"], row["reason"]) == ("failed", STOPPED)
    assert list(demo.scratch.iterdir()) == []


def test_streams_of_a_killed_demo_are_failed_at_the_next_start_and_no_others(start, database):
    killed, other = start(), start()
    lost = Visitor(killed.url).ask(**SLOW)
    running = Visitor(other.url).ask(**SLOW)
    wait_until(lambda: has_chunks(database, lost), "it writes")
    killed.send(signal.SIGKILL)
    killed.wait()
    assert not is_closed(database, lost)

    again = start()
    row = database.stream(lost)
    assert (row["state"], row["reason"]) == ("failed", ABANDONED)
    assert "Failed 1 open streams" in again.output
    assert not is_closed(database, running)


def test_a_port_in_use_is_said_plainly(database):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo = DemoProcess(database, "--port", str(port))
        try:
            assert demo.wait() == 1
        finally:
            demo.close()
    assert f"127.0.0.1:{port}" in demo.output
    assert "--port" in demo.output
    assert "Traceback" not in demo.output


@pytest.mark.parametrize("arguments", [("--rate", "0"), ("--rate", "fast"), ("--rate", "1e9")])
def test_a_rate_out_of_bounds_is_refused(database, arguments):
    demo = DemoProcess(database, *arguments)
    try:
        assert demo.wait() == 2
    finally:
        demo.close()
    assert "--rate" in demo.output


def test_a_program_is_streamed_line_by_line_and_its_exit_code_ends_the_stream(start, database):
    demo = start()
    key = Visitor(demo.url).run("broken")
    wait_until(lambda: is_closed(database, key), "the program ends")
    row = database.stream(key)
    assert (row["state"], row["reason"]) == ("failed", "The program ended with exit code 1.")
    lines = [json.loads(payload) for payload in database.payloads(key)]
    assert "Compiling 'json/decoder.py'..." in [line["text"] for line in lines]
    assert any("SyntaxError" in line["text"] for line in lines)
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    assert list(demo.scratch.iterdir()) == []


def test_stop_ends_the_program(start, database):
    demo = start()
    visitor = Visitor(demo.url)
    key = visitor.run("library")
    wait_until(lambda: has_chunks(database, key), "it writes")
    assert visitor.post(f"/{key}/stop/")[:2] == (200, f"/{key}/")
    assert database.stream(key)["state"] == "cancelled"
    wait_until(lambda: not list(demo.scratch.iterdir()), "the program is gone")


# The pages --------------------------------------------------------------------------------------


@pytest.fixture
def guest_stream(client, db) -> Stream:
    """A stream of the guest whom `client` is."""
    client.get("/ask/")
    return Stream.objects.create(
        key="ask/1",
        owner=User.objects.get(),
        content_type="text/plain",
        metadata={"prompt": "<b>Why?</b>", "tokens_per_second": 25, "length": 160},
    )


def test_each_session_is_a_guest_of_its_own(client, db):
    for path in ("/", "/ask/", "/log/", "/"):
        assert client.get(path).status_code == 200
    guest = User.objects.get()
    assert guest.username.startswith("guest-")
    assert not guest.has_usable_password()
    client.cookies.clear()
    client.get("/")
    assert User.objects.count() == 2


def test_whoever_is_logged_in_stays_that_user(client, db):
    user = User.objects.create_user("somebody")
    client.force_login(user)
    assert client.get("/ask/").context["request"].user == user
    assert User.objects.count() == 1


def test_a_stream_has_a_page_for_its_owner_only(client, guest_stream):
    page = client.get("/ask/1/")
    assert 'data-stream="ask/1"' in page.text
    assert "&lt;b&gt;Why?&lt;/b&gt;" in page.text
    assert "<b>Why?" not in page.text
    client.cookies.clear()
    assert client.get("/ask/1/").status_code == 404
    assert client.post("/ask/1/stop/").status_code == 404
    guest_stream.refresh_from_db()
    assert guest_stream.state == Stream.State.OPEN


def test_stop_cancels_and_a_second_stop_does_nothing(client, guest_stream):
    for _ in range(2):
        assert client.post("/ask/1/stop/").headers["Location"] == "/ask/1/"
    guest_stream.refresh_from_db()
    assert guest_stream.state == Stream.State.CANCELLED


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": "x" * 301},
        {"tokens_per_second": 0},
        {"tokens_per_second": 201},
        {"tokens_per_second": "nan"},
        {"length": 9},
        {"length": 1001},
    ],
)
def test_a_question_out_of_bounds_is_asked_again(client, db, fields):
    question = {"prompt": "Why?", "tokens_per_second": 25, "length": 100} | fields
    page = client.post("/ask/", question)
    assert page.status_code == 200
    assert set(page.context["form"].errors) == set(fields)
    assert not Stream.objects.exists()


def test_an_unknown_program_is_not_run(client, db):
    page = client.post("/log/", {"program": "rm"})
    assert set(page.context["form"].errors) == {"program"}
    assert not Stream.objects.exists()
