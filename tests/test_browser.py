"""The demo's pages in a real browser: reloads, cut sockets, second tabs, Stop.

The thread that runs Playwright's event loop touches no ORM: what is stored is read with plain SQL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, WebSocket, WebSocketRoute, sync_playwright

from django_pgstreams.models import Stream
from example_project.answers import tokens

from .cuttable_proxy import CuttableProxy
from .demo_process import DemoDatabase, DemoProcess, demo_database

CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMEOUT_MS = 90_000
pytestmark = pytest.mark.once
FOLLOWER = "document.querySelector('[data-stream]').follower"


@pytest.fixture(scope="module")
def database(django_db_setup, django_db_blocker) -> Iterator[DemoDatabase]:
    with django_db_blocker.unblock(), demo_database() as own:
        yield own


@pytest.fixture(scope="module")
def demo(database) -> Iterator[DemoProcess]:
    process = DemoProcess(database, "--port", "0")
    try:
        process.wait_ready()
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.output, process.output
    finally:
        process.close()


@pytest.fixture(scope="module")
def browser(chromium_path, demo) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def proxy(demo) -> Iterator[CuttableProxy]:
    proxy = CuttableProxy(demo.port)
    yield proxy
    proxy.close()


@pytest.fixture
def new_visitor(browser, proxy) -> Iterator[Callable[[], BrowserContext]]:
    """Make a browser session of its own. No page of it may have an error."""
    contexts: list[BrowserContext] = []
    errors: list[str] = []

    def new() -> BrowserContext:
        context = browser.new_context(base_url=proxy.url)
        context.set_default_timeout(TIMEOUT_MS)
        context.on("weberror", lambda error: errors.append(str(error.error)))
        contexts.append(context)
        return context

    yield new
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def visitor(new_visitor) -> BrowserContext:
    return new_visitor()


@dataclass
class Frames:
    """The frames of one websocket, as the browser recorded them."""

    sent: list[dict[str, Any]] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)

    def offsets(self) -> list[int]:
        """The offsets of the chunks received, in the order in which they came."""
        found: list[int] = []
        for frame in self.received:
            if frame["type"] == "chunks":
                offsets = range(frame["offset"], frame["next"])
                assert len(frame["data"]) == len(offsets)
                found += offsets
        return found

    def start(self) -> int:
        """The position that was asked for."""
        (subscribe,) = (frame for frame in self.sent if frame["type"] == "subscribe")
        return subscribe["offset"]


class Tab:
    """A page that follows one stream, and the frames of all its websockets."""

    def __init__(self, visitor: BrowserContext) -> None:
        self.page: Page = visitor.new_page()
        self.sockets: list[Frames] = []
        self.page.on("websocket", self._record)

    def _record(self, socket: WebSocket) -> None:
        frames = Frames()
        self.sockets.append(frames)
        socket.on("framesent", lambda text: frames.sent.append(json.loads(text)))
        socket.on("framereceived", lambda text: frames.received.append(json.loads(text)))

    def ask(self, prompt: str, *, tokens_per_second: int, length: int) -> None:
        self.page.goto("/ask/")
        self.page.get_by_label("Your question").fill(prompt)
        self.page.get_by_label("Tokens per second").fill(str(tokens_per_second))
        self.page.get_by_label("Tokens, about").fill(str(length))
        self.page.get_by_role("button", name="Ask", exact=True).click()
        self.page.wait_for_url("**/ask/*/")

    def run(self, program: str) -> None:
        self.page.goto("/log/")
        self.page.get_by_label(program).check()
        self.page.get_by_role("button", name="Run").click()
        self.page.wait_for_url("**/log/*/")

    @property
    def key(self) -> str:
        return self.page.locator("[data-stream]").get_attribute("data-stream")

    @property
    def text(self) -> str:
        """What the page shows of the stream, exactly."""
        return self.page.locator("[data-part=content]").evaluate("box => box.textContent")

    @property
    def position(self) -> int:
        return self.page.evaluate(f"{FOLLOWER}.position")

    def wait_for_position(self, position: int) -> None:
        self.page.wait_for_function(f"{FOLLOWER}.position >= {position}")

    def wait_for_status(self, *statuses: str) -> None:
        self.page.wait_for_function(f"{json.dumps(statuses)}.includes({FOLLOWER}.status)")

    def badge(self) -> str:
        return self.page.locator("[data-part=status]").inner_text()

    def offsets(self) -> list[int]:
        """The offsets of all chunks that ever came, over every websocket."""
        return [offset for frames in self.sockets for offset in frames.offsets()]


def stored_text(database: DemoDatabase, key: str) -> str:
    return b"".join(database.payloads(key)).decode()


def test_an_answer_survives_a_reload_and_a_cut_with_each_offset_once(visitor, proxy, database):
    tab = Tab(visitor)
    tab.ask("Why is a raven like a writing-desk?", tokens_per_second=40, length=400)
    answer = "".join(tokens(Stream(metadata=database.stream(tab.key)["metadata"])))
    tab.wait_for_position(20)
    shown = tab.text
    assert 0 < len(shown) < len(answer)
    assert answer.startswith(shown)

    # Nothing may be on its way to the page while it is torn down: nobody could say if it was seen.
    reloaded_at = proxy.hold_websockets()
    tab.wait_for_position(reloaded_at)
    tab.page.reload()
    tab.wait_for_position(reloaded_at + 20)
    assert answer.startswith(tab.text)
    proxy.cut_websockets()
    tab.wait_for_status("finished")

    first, reloaded, resumed = tab.sockets
    assert first.start() == 0
    assert reloaded.start() == reloaded_at > 0
    assert resumed.start() == reloaded.offsets()[-1] + 1 < resumed.offsets()[-1]
    assert tab.offsets() == list(range(database.stream(tab.key)["next_offset"]))
    assert tab.text == stored_text(database, tab.key) == answer
    assert tab.badge() == "completed"


def test_positions_are_acknowledged_as_they_are_shown(visitor):
    tab = Tab(visitor)
    tab.ask("Where is the little golden key?", tokens_per_second=20, length=900)
    tab.wait_for_position(5)
    tab.wait_for_position(tab.position + 10)
    tab.page.get_by_role("button", name="Stop").click()
    tab.wait_for_status("finished")
    (frames,) = tab.sockets
    acks = [frame["offset"] for frame in frames.sent if frame["type"] == "ack"]
    assert len(acks) > 1
    assert acks == sorted(set(acks))
    assert acks[-1] == tab.position


def test_a_finished_answer_is_shown_again_without_a_chunk_sent_twice(visitor, database):
    tab = Tab(visitor)
    tab.ask("What is the Dormouse dreaming?", tokens_per_second=200, length=40)
    tab.wait_for_status("finished")
    tab.page.reload()
    tab.wait_for_status("finished")
    assert tab.sockets[1].offsets() == []
    assert tab.text == stored_text(database, tab.key)


def test_a_second_tab_catches_up_and_stop_ends_both_and_the_writer(visitor, database):
    first = Tab(visitor)
    first.ask("Tell me about the pool of tears.", tokens_per_second=20, length=900)
    first.wait_for_position(10)
    second = Tab(visitor)
    second.page.goto(f"/{first.key}/")
    second.wait_for_status("live")
    assert second.sockets[0].start() == 0
    second.wait_for_position(first.position)
    second.page.get_by_role("button", name="Stop").click()
    for tab in (first, second):
        tab.wait_for_status("finished")
        assert tab.badge() == "cancelled"
        assert not tab.page.get_by_role("button", name="Stop").is_visible()
    assert {"type": "cancel", "stream": first.key} in second.sockets[0].sent
    assert database.stream(first.key)["state"] == "cancelled"
    assert first.text == second.text == stored_text(database, first.key)


def test_stop_works_without_a_websocket(visitor, database):
    tab = Tab(visitor)
    tab.ask("Tell me about the pool of tears.", tokens_per_second=20, length=900)
    tab.wait_for_position(3)
    # As on a page whose script never ran.
    tab.page.evaluate(f"{FOLLOWER}.stop()")
    tab.page.get_by_role("button", name="Stop").click()
    tab.page.wait_for_load_state()
    tab.wait_for_status("finished")
    assert tab.badge() == "cancelled"


def test_a_page_waits_out_a_server_that_is_away(visitor, proxy, database):
    tab = Tab(visitor)
    tab.ask("Has anybody seen the Cheshire cat?", tokens_per_second=40, length=300)
    tab.wait_for_position(10)
    proxy.go_down()
    tab.wait_for_status("waiting")
    assert tab.badge() == "reconnecting"
    proxy.come_up()
    tab.page.evaluate("dispatchEvent(new Event('online'))")
    tab.wait_for_status("finished")
    assert tab.offsets() == list(range(database.stream(tab.key)["next_offset"]))
    assert tab.text == stored_text(database, tab.key)


def test_coming_back_online_replaces_a_connection_that_looks_open(visitor, proxy, database):
    tab = Tab(visitor)
    tab.ask("Is it always tea-time?", tokens_per_second=40, length=300)
    tab.wait_for_position(10)
    held_at = proxy.hold_websockets()
    tab.wait_for_position(held_at)
    tab.page.evaluate("dispatchEvent(new Event('online'))")
    tab.wait_for_status("finished")
    assert [frames.start() for frames in tab.sockets] == [0, held_at]
    assert tab.offsets() == list(range(database.stream(tab.key)["next_offset"]))
    assert tab.text == stored_text(database, tab.key)


def test_a_kept_text_of_another_life_of_the_key_is_thrown_away(visitor, database):
    tab = Tab(visitor)
    tab.ask("Who lives at the bottom of the well?", tokens_per_second=200, length=40)
    tab.wait_for_status("finished")
    kept = json.dumps({"first": 0, "epoch": "another", "items": ["not", "of", "this", "life"]})
    # In a new tab, since the page that is open keeps its own text when it goes.
    again = Tab(visitor)
    again.page.add_init_script(f"sessionStorage.setItem('pgstreams:{tab.key}', {kept!r})")
    again.page.goto(f"/{tab.key}/")
    again.wait_for_status("finished")
    assert again.sockets[0].start() == 4
    assert again.offsets() == list(range(database.stream(tab.key)["next_offset"]))
    assert again.text == stored_text(database, tab.key)


def test_a_reset_that_is_lost_is_asked_for_again(visitor):
    """A scripted server: no real one can be made to lose its connection at this very frame."""
    subscribes: list[dict[str, Any]] = []

    def serve(socket: WebSocketRoute) -> None:
        def answer(text: str) -> None:
            frame = json.loads(text)
            if frame["type"] != "subscribe":
                return
            subscribes.append(frame)
            about = {"stream": "k", "epoch": "new", "offset": frame["offset"]}
            state = {"first": 0, "tail": 9, "state": "open", "content_type": "text/plain"}
            socket.send(json.dumps({"type": "subscribed", **about, **state}))
            if len(subscribes) == 1:
                socket.close(code=1011)
                return
            socket.send(json.dumps({"type": "reset", "stream": "k", "epoch": "new"}))
            socket.send(
                json.dumps({"type": "closed", **about, "offset": 0, "state": "completed", "reason": ""})
            )

        socket.on_message(answer)

    page = visitor.new_page()
    page.route_web_socket("**/ws/streams/", serve)
    page.goto("/")
    after = page.evaluate(
        """() => new Promise((resolve) => {
            const follower = new StreamFollower("k", {
                position: 5,
                epoch: "old",
                onClosed: () => resolve([follower.position, follower.epoch]),
            });
            follower.start();
        })"""
    )
    assert [(frame["offset"], frame["epoch"]) for frame in subscribes] == [(5, "old"), (5, "old")]
    assert after == [0, "new"]


def test_an_error_about_a_cancel_leaves_what_is_followed_alone(visitor):
    """A scripted server, for errors that only a failure brings about, and one before "subscribed"."""
    codes = ["forbidden", "busy", "unavailable", "internal"]
    subscribes: list[dict[str, Any]] = []

    def serve(socket: WebSocketRoute) -> None:
        def send(kind: str, **fields: Any) -> None:
            socket.send(json.dumps({"type": kind, "stream": "k", **fields}))

        def refuse(code: str) -> None:
            send("error", request="cancel", code=code, message=code)

        def answer(text: str) -> None:
            frame = json.loads(text)
            if frame["type"] == "cancel":
                refuse(codes[1 + cancels.pop()])
                if not cancels:
                    send("closed", offset=0, state="completed", reason="")
            elif frame["type"] == "subscribe":
                subscribes.append(frame)
                refuse(codes[0])
                state = {"first": 0, "tail": 0, "state": "open", "content_type": "text/plain"}
                send("subscribed", epoch="e", offset=0, **state)
                send("live", offset=0)

        cancels = [2, 1, 0]
        socket.on_message(answer)

    page = visitor.new_page()
    page.route_web_socket("**/ws/streams/", serve)
    page.goto("/")
    errors, statuses = page.evaluate(
        """() => new Promise((resolve) => {
            const [errors, statuses] = [[], []];
            const follower = new StreamFollower("k", {
                onStatus: (status) => {
                    statuses.push(status);
                    if (status === "live") for (let i = 0; i < 3; i++) follower.cancel();
                    if (["finished", "refused", "waiting"].includes(status)) resolve([errors, statuses]);
                },
                onError: ({ code, request }) => errors.push([code, request]),
            });
            follower.start();
        })"""
    )
    assert errors == [[code, "cancel"] for code in codes]
    assert statuses == ["connecting", "replaying", "live", "finished"]
    assert len(subscribes) == 1


def test_what_was_trimmed_away_is_said_and_the_rest_is_shown(visitor, database):
    tab = Tab(visitor)
    tab.ask("What is the Dormouse dreaming?", tokens_per_second=200, length=40)
    tab.wait_for_status("finished")
    database.trim(tab.key, 10)
    again = Tab(visitor)
    again.page.goto(f"/{tab.key}/")
    again.wait_for_status("finished")
    assert again.page.locator(".gap").inner_text() == "Chunks 0–9 are no longer stored."
    assert again.offsets() == list(range(10, database.stream(tab.key)["next_offset"]))
    rest = again.page.locator("[data-part=content] span").all_inner_texts()
    assert "".join(rest) == stored_text(database, tab.key)
    again.page.reload()
    again.wait_for_status("finished")
    assert again.sockets[1].offsets() == []


def test_a_stream_is_refused_to_another_visitor_and_not_asked_for_again(visitor, new_visitor):
    tab = Tab(visitor)
    tab.ask("Who stole the tarts?", tokens_per_second=200, length=40)
    tab.wait_for_status("finished")
    other = Tab(new_visitor())
    assert other.page.goto(f"/{tab.key}/").status == 404
    other.page.goto("/")
    statuses = other.page.evaluate(
        """key => new Promise((resolve) => {
            const statuses = [];
            const onStatus = (status) => {
                statuses.push(status);
                if (status === "refused") resolve(statuses);
            };
            new StreamFollower(key, { onStatus }).start();
        })""",
        tab.key,
    )
    assert statuses == ["connecting", "refused"]
    (frames,) = other.sockets
    assert [frame["type"] for frame in frames.received] == ["error"]


def test_a_program_is_shown_line_by_line_as_text_and_how_it_ended(visitor, database):
    tab = Tab(visitor)
    tab.run("broken file")
    tab.wait_for_status("finished")
    lines = tab.page.locator(".line .text").all_inner_texts()
    stored = [json.loads(payload)["text"] for payload in database.payloads(tab.key)]
    assert [line.rstrip() for line in lines] == [line.rstrip() for line in stored]
    assert any("<b>" in line for line in lines)
    assert tab.page.locator(".line b").count() == 0
    assert tab.badge() == "failed"
    assert "exit code 1" in tab.page.locator("[data-part=note]").inner_text()


def test_stop_ends_a_program(visitor, demo, database):
    tab = Tab(visitor)
    tab.run("standard library")
    tab.wait_for_position(5)
    tab.page.get_by_role("button", name="Stop").click()
    tab.wait_for_status("finished")
    assert tab.badge() == "cancelled"
    assert tab.offsets() == list(range(database.stream(tab.key)["next_offset"]))
