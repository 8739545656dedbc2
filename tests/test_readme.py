"""The project that README.md builds works as it says: its socket, its page and its consumer."""

from __future__ import annotations

import contextlib
import http.cookiejar
import json
import random
import re
import signal
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from django_pgstreams import consumers
from tests.fresh_project import PASSWORD, USERNAME, Block, FreshProject, Program, fresh_project
from tests.servers import Connection
from tests.waiting import DEADLINE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from websockets.sync.client import ClientConnection

TESTS = Path(__file__).resolve().parent
KILLS = 6


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProject]:
    """The README's project, migrated, with a superuser."""
    with fresh_project(tmp_path_factory.mktemp("readme")) as built:
        built.paste(Block("python", "readme_writer.py", (TESTS / "readme_writer.py").read_text()))
        yield built


class Visitor:
    """Somebody with a session: logs in, writes notes, opens sockets as the page does."""

    def __init__(self, port: int) -> None:
        self._site = f"127.0.0.1:{port}"
        self._cookies = http.cookiejar.CookieJar()
        processor = urllib.request.HTTPCookieProcessor(self._cookies)
        self._opener = urllib.request.build_opener(processor)
        self.post("/admin/login/", username=USERNAME, password=PASSWORD, next="/")
        self.page = self._open("/")
        self.key = json.loads(
            re.search(r'<script id="key" type="application/json">(.+?)</script>', self.page)[1]
        )

    def _open(self, path: str, data: bytes | None = None) -> str:
        request = urllib.request.Request(f"http://{self._site}{path}", data)
        with self._opener.open(request, timeout=DEADLINE_SECONDS) as response:
            return response.read().decode()

    def _cookie(self, name: str) -> str:
        return next(cookie.value for cookie in self._cookies if cookie.name == name)

    def post(self, path: str, **form: str) -> None:
        self._open("/admin/login/")
        form["csrfmiddlewaretoken"] = self._cookie("csrftoken")
        self._open(path, urllib.parse.urlencode(form).encode())

    def write(self, text: str) -> None:
        """Send the page's form."""
        self.post("/", text=text)

    @contextlib.contextmanager
    def socket(self, key: str, **query: object) -> Iterator[Socket]:
        """The page's socket."""
        path = f"/ws/streams/{urllib.parse.quote(key)}/?{urllib.parse.urlencode(query)}"
        with connect(
            f"ws://{self._site}{path}",
            origin=f"http://{self._site}",
            subprotocols=["pgstreams.v1"],
            additional_headers={"Cookie": f"sessionid={self._cookie('sessionid')}"},
            open_timeout=DEADLINE_SECONDS,
            proxy=None,
            create_connection=Connection,
        ) as connection:
            yield Socket(connection, key)


class Socket:
    """Frames of one stream, over one connection."""

    def __init__(self, connection: ClientConnection, key: str) -> None:
        self._connection = connection
        self._key = key

    def receive(self) -> dict[str, Any]:
        """The next frame."""
        return json.loads(self._connection.recv(timeout=DEADLINE_SECONDS))

    def expect(self, kind: str) -> dict[str, Any]:
        """The next frame, which has to be of this type."""
        frame = self.receive()
        assert frame["type"] == kind, frame
        return frame

    def acknowledge(self, position: int) -> None:
        self._connection.send(json.dumps({"type": "ack", "stream": self._key, "offset": position}))

    def close_code(self) -> int:
        """The code that the server closes with."""
        with pytest.raises(ConnectionClosed) as caught:
            self._connection.recv(timeout=DEADLINE_SECONDS)
        return caught.value.rcvd.code


def test_a_note_reaches_the_socket_and_a_reader_resumes(project: FreshProject) -> None:
    with project.served() as (_, port):
        visitor = Visitor(port)
        with visitor.socket(visitor.key, offset=0, epoch="") as socket:
            subscribed = socket.expect("subscribed")
            assert (subscribed["offset"], subscribed["content_type"]) == (0, "application/json")
            socket.expect("live")
            visitor.write("first ☃")
            chunks = socket.expect("chunks")
            assert (chunks["offset"], chunks["next"], chunks["data"]) == (0, 1, [{"text": "first ☃"}])
            socket.acknowledge(1)
        visitor.write("while away")
        with visitor.socket(visitor.key, offset=1, epoch=subscribed["epoch"]) as socket:
            assert socket.expect("subscribed")["offset"] == 1
            chunks = socket.expect("chunks")
            assert (chunks["offset"], chunks["next"], chunks["data"]) == (1, 2, [{"text": "while away"}])
            end_stream(project, visitor.key)
            frames = [socket.receive()]
            if frames[0]["type"] == "live":
                frames.append(socket.receive())
            assert frames[-1]["type"] == "closed"
            assert (frames[-1]["offset"], frames[-1]["state"]) == (2, "completed")
            assert socket.close_code() == consumers.CLOSE_ENDED
        with visitor.socket("notes/of somebody else", offset=0) as socket:
            assert socket.expect("error")["code"] == "forbidden"
            assert socket.close_code() == consumers.CLOSE_REFUSED
    run_in(project, f"Stream.objects.get(key={visitor.key!r}).delete()")


def run_in(project: FreshProject, statements: str) -> None:
    """Run Python in another process of the project."""
    start = "import django; django.setup(); from django_pgstreams.models import Stream\n"
    code, printed = project.run("-c", start + statements)
    assert code == 0, printed


def end_stream(project: FreshProject, key: str) -> None:
    run_in(project, f"Stream.objects.get(key={key!r}).close()")


def await_word(program: Program, word: str) -> None:
    """Wait until a program has printed this word, or fail if it ends without."""
    wait_until(lambda: word in program.output.split() or not program.running, f"{word!r} is printed")
    assert word in program.output.split(), program.output


@pytest.mark.once
def test_the_page_resumes_in_a_browser(project: FreshProject, chromium_path: str) -> None:
    """The server goes twice while the page is open, the second time to come back with another stream."""
    visit = (str(TESTS / "readme_visit.py"), chromium_path)
    with contextlib.ExitStack() as stack:
        server, port = stack.enter_context(project.served())
        address = f"http://127.0.0.1:{port}/"
        browser = stack.enter_context(project.started(*visit, address, USERNAME, PASSWORD))
        await_word(browser, "written")
        ((key, first_epoch),) = project.fetch("SELECT key, epoch FROM pgstreams_stream WHERE state = 'open'")
        server.stop(signal.SIGTERM)
        run_in(project, f"Stream.objects.get(key={key!r}).append({{'text': 'third'}})")
        server, _ = stack.enter_context(project.served(port))
        Visitor(port).write("fourth")
        await_word(browser, "resumed")
        server.stop(signal.SIGTERM)
        run_in(
            project,
            f"old = Stream.objects.get(key={key!r}); old.delete()\n"
            "new = Stream.objects.create(key=old.key, owner=old.owner)\n"
            "new.append({'text': 'of another stream'}, close=True)",
        )
        stack.enter_context(project.served(port))
        assert browser.wait() == 0, browser.output
        seen = json.loads(browser.output.splitlines()[-1])

    assert seen["errors"] == []
    assert seen["resumed"] == ["first", "<b>second</b>", "third", "fourth"]
    assert seen["finally"] == ["of another stream"]
    assert not seen["came back after the end"]
    first, second, last = (socket for socket in seen["sockets"] if socket["received"])
    assert query_of(first) == {"offset": ["0"]}
    assert query_of(second) == {"offset": ["2"], "epoch": [first_epoch]}
    assert query_of(last) == {"offset": ["4"], "epoch": [first_epoch]}
    assert offsets(first) + offsets(second) == [0, 1, 2, 3]
    assert [frame["type"] for frame in last["received"]] in (
        ["subscribed", "reset", "chunks", "closed"],
        ["subscribed", "reset", "chunks", "live", "closed"],
    )
    # The server closed the last one before the page's next acknowledgement.
    assert [socket["sent"][-1]["offset"] for socket in (first, second)] == [2, 4]


def query_of(socket: dict[str, Any]) -> dict[str, list[str]]:
    return urllib.parse.parse_qs(urllib.parse.urlsplit(socket["url"]).query)


def offsets(socket: dict[str, Any]) -> list[int]:
    """Every offset that a socket received, in order, with repetitions."""
    chunks = (frame for frame in socket["received"] if frame["type"] == "chunks")
    return [frame["offset"] + index for frame in chunks for index in range(len(frame["data"]))]


# The consumer --------------------------------------------------------------------------------------


def copied(project: FreshProject, key: str) -> list[tuple[int, str]]:
    """The copies that the consumer has made, in the order in which it made them."""
    return project.fetch('SELECT "offset", text FROM notes_note WHERE key = %s ORDER BY id', key)


def copy_to_the_end(project: FreshProject, key: str) -> str:
    """Run the consumer until the stream ends; returns what it printed."""
    code, printed = project.run("manage.py", "copy_notes", key)
    assert code == 0, printed
    return printed


def make_stream(project: FreshProject, key: str, *texts: str) -> None:
    """A stream that holds these notes and has ended."""
    values = [{"text": text} for text in texts]
    run_in(project, f"Stream.objects.create(key={key!r}).append_many({values!r}, close=True)")


@pytest.mark.once
def test_a_consumer_that_is_killed_copies_each_chunk_once_and_in_order(project: FreshProject) -> None:
    key = "notes/written while it is killed"
    with project.started("readme_writer.py", key) as writer, project.connect() as own:

        def position() -> int:
            row = own.execute('SELECT "offset" FROM notes_position WHERE key = %s', (key,)).fetchone()
            return row[0] if row else 0

        await_word(writer, "created")
        for _ in range(KILLS):
            far = position() + random.randint(1, 500)
            with project.started("manage.py", "copy_notes", key) as consumer:
                wait_until(lambda: position() >= far or not consumer.running, "the consumer gets on")  # noqa: B023
                assert consumer.running, consumer.output
                consumer.stop(signal.SIGKILL)
        writer.end_input()
        assert writer.wait() == 0, writer.output
        written = int(writer.output.split()[-1])
    copy_to_the_end(project, key)
    assert copied(project, key) == [(number, f"note {number}") for number in range(written)]


@pytest.mark.once
def test_a_consumer_that_is_killed_in_its_transaction_has_done_nothing(project: FreshProject) -> None:
    key = "notes/killed in mid-transaction"
    make_stream(project, key, "a", "b", "c")
    stuck = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
    with project.connect() as own, project.started("manage.py", "copy_notes", key) as consumer:
        with own.transaction():
            own.execute("LOCK TABLE notes_note IN SHARE MODE")
            ((pid,),) = wait_until(lambda: project.fetch(stuck, project.database), "the consumer waits")
            consumer.stop(signal.SIGKILL)
        alive = "SELECT FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: not project.fetch(alive, pid), "the consumer's session ends")
    assert copied(project, key) == []
    copy_to_the_end(project, key)
    assert copied(project, key) == [(0, "a"), (1, "b"), (2, "c")]


def test_a_consumer_is_told_of_a_gap_and_goes_on(project: FreshProject) -> None:
    key = "notes/trimmed"
    make_stream(project, key, "a", "b", "c", "d")
    with project.connect() as own:
        row = own.execute("SELECT id FROM pgstreams_stream WHERE key = %s", (key,)).fetchone()
        own.execute("UPDATE pgstreams_stream SET first_offset = 2 WHERE id = %s", row)
        own.execute('DELETE FROM pgstreams_chunk WHERE stream_id = %s AND "offset" < 2', row)
    assert "no longer stored" in copy_to_the_end(project, key)
    assert copied(project, key) == [(2, "c"), (3, "d")]


@pytest.mark.once
def test_a_consumer_begins_again_with_another_stream_of_the_same_key(project: FreshProject) -> None:
    key = "notes/made twice"
    make_stream(project, key, "a", "b", "c")
    copy_to_the_end(project, key)
    run_in(project, f"Stream.objects.get(key={key!r}).delete()")
    make_stream(project, key, "d", "e", "f", "g")
    copy_to_the_end(project, key)
    assert copied(project, key) == [(0, "d"), (1, "e"), (2, "f"), (3, "g")]


def test_a_consumer_of_an_unknown_stream_says_so(project: FreshProject) -> None:
    code, printed = project.run("manage.py", "copy_notes", "notes/unknown")
    assert code == 1
    assert printed.startswith("CommandError: ")
