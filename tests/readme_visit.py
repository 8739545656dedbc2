"""A visit to the README's page in a real browser, run as a program of its own by `test_readme`.

`python readme_visit.py CHROMIUM URL USERNAME PASSWORD` logs in, writes two notes, and says `written`; waits
until there are four, and says `resumed`; waits for the end of the stream, and says what it has seen as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from playwright.sync_api import Error, Page, Route, WebSocket, expect, sync_playwright

_DEADLINE_MS = 100_000
_RECONNECTING_WOULD_TAKE_MS = 2_000


def main(chromium: str, url: str, username: str, password: str) -> None:
    expect.set_options(timeout=_DEADLINE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(_DEADLINE_MS)
        seen = visit(page, url, username, password)
        browser.close()
    say(json.dumps(seen))


def say(line: str) -> None:
    """Tell the test, which reads the output."""
    print(line, flush=True)  # noqa: T201


def visit(page: Page, url: str, username: str, password: str) -> dict[str, Any]:
    """What the README's page shows and sends during the steps above."""
    sockets: list[dict[str, Any]] = []
    errors: list[str] = []
    page.on("websocket", lambda socket: sockets.append(record(socket)))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.get_by_label("Username").fill(username)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("#status")).to_have_text("live")
    notes = page.locator("#notes li")
    box = page.get_by_role("textbox")
    box.fill("first")

    def type_before_the_answer(route: Route) -> None:
        box.fill("<b>second</b>")
        route.continue_()

    page.route(url, type_before_the_answer, times=1)
    add_note(page)
    expect(notes).to_have_count(1)
    expect(box).to_have_value("<b>second</b>")
    add_note(page)
    expect(notes).to_have_count(2)
    expect(box).to_have_value("")  # the page has the answer, and empties it
    wait_for_acknowledgement(page, sockets, 2)
    lose_the_session(page)
    say("written")
    expect(notes).to_have_count(4)
    expect(page.locator("#status")).to_have_text("live")
    wait_for_acknowledgement(page, sockets, 4)
    resumed = notes.all_inner_texts()
    say("resumed")
    expect(page.locator("#status")).to_have_text("ended: completed")
    return {
        "resumed": resumed,
        "finally": notes.all_inner_texts(),
        "sockets": sockets,
        "errors": errors,
        "came back after the end": comes_back(page),
    }


def lose_the_session(page: Page) -> None:
    """A note that is not saved for want of a session, which is there again afterwards, is not lost."""
    session = [cookie for cookie in page.context.cookies() if cookie["name"] == "sessionid"]
    page.context.clear_cookies(name="sessionid")
    box = page.get_by_role("textbox")
    box.fill("not saved")
    add_note(page)
    expect(page.locator("#status")).to_have_text("The note was not saved. Try again.")
    expect(box).to_have_value("not saved")
    page.context.add_cookies(session)


def add_note(page: Page) -> None:
    """Press the button, and wait until the page has the answer."""
    with page.expect_response(lambda response: response.request.method == "POST"):
        page.get_by_role("button", name="Add").click()


def wait_for_acknowledgement(page: Page, sockets: list[dict[str, Any]], position: int) -> None:
    """Wait until the page has acknowledged a position, which is all that it ever sends."""
    deadline = time.monotonic() + _DEADLINE_MS / 1000
    while not sockets[-1]["sent"] or sockets[-1]["sent"][-1]["offset"] != position:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Position {position} is not acknowledged: {sockets[-1]['sent']}")
        page.wait_for_timeout(50)


def record(socket: WebSocket) -> dict[str, Any]:
    """The address of a socket, and all its frames, filled in as they pass."""
    seen: dict[str, Any] = {"url": socket.url, "sent": [], "received": []}
    socket.on("framesent", lambda frame: seen["sent"].append(json.loads(frame)))
    socket.on("framereceived", lambda frame: seen["received"].append(json.loads(frame)))
    return seen


def comes_back(page: Page) -> bool:
    """Whether the page opens another socket."""
    try:
        page.wait_for_event("websocket", timeout=_RECONNECTING_WOULD_TAKE_MS)
    except Error:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
