"""How long the two browser clients wait before they come back: the README's page, and the example project's.

Each runs in Chromium as it is, on a clock and with sockets that the test moves: a hundred drops take no time.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.fresh_project import readme_blocks
from tests.test_browser import CHROMIUM_ARGUMENTS

pytestmark = pytest.mark.once

FOLLOWER = Path(__file__).parents[1] / "example_project/static/example_project/stream.js"
LONGEST_MS = 10_000
FIRST_MS = 250
STABLE_MS = 10_000
CLOCK_AND_SOCKETS = """
let now = 0, timers = [], sockets = [];
window.setTimeout = (act, ms) => timers.push({ at: now + ms, act });
window.clearTimeout = (number) => { if (number) timers[number - 1].act = null; };
performance.now = () => now;
window.elapse = (ms) => {
  const end = now + ms;
  for (;;) {
    const [next] = timers.filter(({ act, at }) => act && at <= end).sort((one, two) => one.at - two.at);
    if (!next) break;
    const { act } = next;
    next.act = null;
    now = next.at;
    act();
  }
  now = end;
};
window.WebSocket = class {
  static OPEN = 1;
  readyState = 1;
  constructor() { this.at = now; sockets.push(this); }
  send() {}
  close() {}
};
// Let the connection live until it is live, and for a time; drop it; how long is it to the next one?
window.drop = (code, lived, ms) => {
  const socket = sockets.at(-1), count = sockets.length;
  if (lived) {
    socket.onopen?.();
    for (const frame of [
      { type: "subscribed", epoch: "e", offset: 0, tail: 0, content_type: "application/json" },
      { type: "live", offset: 0 },
    ]) socket.onmessage({ data: JSON.stringify({ stream: "a/b", ...frame }) });
  }
  elapse(ms);
  if (sockets.length !== count) throw new Error("it came back by itself");
  const dropped = now;
  socket.onclose({ code, reason: "" });
  while (sockets.length === count && now < dropped + 60_000) elapse(1);
  return sockets.length === count ? null : sockets.at(-1).at - dropped;
};
"""


def readme_page():
    """The page of the README as Django would send it."""
    (text,) = (block.text for block in readme_blocks() if block.title.endswith("notes.html"))
    key = '<script id="key" type="application/json">"a/b"</script>'
    return text.replace("{% csrf_token %}", "").replace('{{ stream.key|json_script:"key" }}', key)


def example_page():
    return f"<!doctype html><script>{FOLLOWER.read_text()}\nnew StreamFollower('a/b').start();</script>"


@pytest.fixture(scope="module")
def browser(chromium_path):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(params=[readme_page, example_page])
def drop(request, browser):
    """A function that drops the connection, and returns the delay (ms) before the client tries again."""
    page = browser.new_page()
    page.add_init_script(CLOCK_AND_SOCKETS)
    page.route("**/*", lambda route: route.fulfill(content_type="text/html", body=request.param()))
    page.goto("http://page.test/")
    yield lambda code=1006, lived=False, ms=0: page.evaluate(f"drop({code}, {str(lived).lower()}, {ms})")
    page.close()


def test_delays_grow_spread_and_are_capped(drop):
    delays = [drop() for _ in range(100)]
    longest = [min(FIRST_MS * 2**number, LONGEST_MS) for number in range(100)]
    for delay, bound in zip(delays, longest, strict=True):
        assert bound / 2 <= delay <= bound + 1
    capped = delays[10:]
    assert statistics.stdev(capped) > LONGEST_MS / 10
    assert len({round(delay / 100) for delay in capped}) > 20


def test_a_connection_that_fails_at_once_does_not_count_as_a_success(drop):
    delays = [drop(lived=True, ms=100) for _ in range(10)]
    assert min(delays[6:]) >= LONGEST_MS / 2


def test_a_stable_connection_starts_anew(drop):
    for _ in range(10):
        drop()
    assert drop(lived=True, ms=STABLE_MS + 1) <= FIRST_MS + 1


@pytest.mark.parametrize("code", [1012, 1013])
def test_a_server_that_asks_for_time_is_given_it(drop, code):
    delays = [drop(code, lived=True, ms=STABLE_MS + 1) for _ in range(20)]
    assert min(delays) >= LONGEST_MS / 2
    assert max(delays) - min(delays) > LONGEST_MS / 10


@pytest.mark.parametrize("code", [4400, 4403])
def test_a_refusal_is_final(drop, code):
    assert drop(code) is None


def test_a_page_that_was_asleep_comes_back(drop):
    assert drop(4408) <= FIRST_MS + 1
