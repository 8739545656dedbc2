"""Servers that load the application and then fork: each child appends, announces and follows for itself."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from tests.concurrency import start
from tests.servers import DEADLINE_SECONDS, serving
from tests.waiting import wait_until
from tests.writing import stored

if TYPE_CHECKING:
    from tests.servers import ServerProcess

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("live")]
CHILDREN = 4
NEVER_SECONDS = 600.0
"""No poll comes while a test runs: what arrives was announced."""


@pytest.fixture
def streams(live, settings):
    """The one that all append to, and the one where the children tell what they heard."""
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS}
    return Stream.objects.create(key="preloaded"), Stream.objects.create(key="heard")


def ask(server: ServerProcess) -> int:
    """Have one of the server's processes append; its id."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=DEADLINE_SECONDS) as answer:
        return json.load(answer)


def ask_all(server: ServerProcess) -> Counter[int]:
    """Ask until each child has answered; how often each did."""
    answers: Counter[int] = Counter()

    def ask_more() -> bool:
        with ThreadPoolExecutor(2 * CHILDREN) as pool:
            answers.update(pool.map(lambda _: ask(server), range(2 * CHILDREN)))
        return len(answers) == CHILDREN

    wait_until(ask_more, "every child answers")
    return answers


@pytest.mark.parametrize("kind", ["gunicorn sync", "gunicorn gthread", "gunicorn uvicorn", "uwsgi"])
def test_each_child_appends_announces_and_follows_for_itself(streams, ear, kind):
    stream, heard = streams
    # uWSGI forks first and then loads: its fork leaves Python's own lock as it is, held perhaps.
    loads, forks = (CHILDREN, 0) if kind == "uwsgi" else (1, CHILDREN)
    seen: list[Any] = []
    reading = start(lambda: seen.extend(chunk.data for chunk in subscribe(stream)))
    settings = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS, "IDLE_SECONDS": NEVER_SECONDS}
    with serving(kind, ROOT_URLCONF="tests.preloaded", PGSTREAMS=settings) as server:
        answers = ask_all(server)
        expected = Counter({"loaded": 2 * loads, "forking": forks})
        for process, times in answers.items():
            expected |= {f"appended {process}": times, f"written {process}": times}
        # Announced, all of it: this reader polls not at all, nor do those in the children.
        wait_until(lambda: Counter(seen) == expected, "every child's chunks arrive")
        listeners = CHILDREN + (1 if forks else 0)  # the parent has followed too
        assert server.role.sessions().count("pgstreams-listener") == listeners
        stream.close()
        wait_until(lambda: len(stored(heard)) == CHILDREN, "every child has followed to the end")
        assert reading.result(DEADLINE_SECONDS) is None
        assert sorted(stored(heard)) == sorted([process, seen] for process in answers)
        assert server.trouble() == ""
        assert server.stop() == 0
    announced = Counter(word for word in ear.words() if word.startswith(f"{stream.pk}:"))
    assert set(announced.values()) == {1}
