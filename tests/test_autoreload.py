"""`runserver` reloads: the new process listens, and nothing is left of the old one."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.fresh_project import Block, fresh_project
from tests.waiting import DEADLINE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fresh_project import FreshProject

pytestmark = pytest.mark.once

SETTINGS = """
if "WITHOUT_DAPHNE" in os.environ:
    INSTALLED_APPS.remove("daphne")
PGSTREAMS = {"IDLE_SECONDS": 600}
"""
VIEW = """
import os
import threading

from django.http import HttpResponse
from django.urls import path

from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter

following = []


def follow(stream):
    for chunk in subscribe(stream):
        pass


def live(request):
    stream, _ = Stream.objects.get_or_create(key="live")
    if not following:
        following.append(threading.Thread(target=follow, args=[stream], daemon=True))
        following[0].start()
    stream.append(os.getpid())
    StreamWriter(stream).append(os.getpid())
    return HttpResponse(str(os.getpid()))
"""
ROUTE = """
from notes.live import live

urlpatterns += [path("live/", live)]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, test_database: None) -> Iterator[FreshProject]:
    """The README's project, with a page that appends and a thread that follows."""
    with fresh_project(tmp_path_factory.mktemp("reloaded")) as built:
        built.paste(Block("python", "mysite/settings.py, at the end", SETTINGS))
        built.paste(Block("python", "notes/live.py", VIEW))
        built.paste(Block("python", "mysite/urls.py, at the end", ROUTE))
        yield built


def sessions(project: FreshProject) -> dict[str, int]:
    """How many sessions the project has, by application name."""
    return dict(
        project.fetch(
            "SELECT application_name, count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name LIKE 'pgstreams-%%' GROUP BY 1"
        )
    )


def is_connected_once(project: FreshProject) -> bool:
    """Whether the project has the sessions of one process that does everything."""
    found = sessions(project)
    readers = found.pop("pgstreams-reader", 0)
    return readers in (1, 2) and found == dict.fromkeys(
        ["pgstreams-listener", "pgstreams-notifier", "pgstreams-writer"], 1
    )


def ask(address: str) -> int:
    """Which process answers; 0 for none."""
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=DEADLINE_SECONDS) as answer:
        return int(answer.read())
    return 0


def touch(project: FreshProject) -> None:
    """Make the page's code look as if it had been changed."""
    view = project.directory / "notes/live.py"
    os.utime(view, (view.stat().st_mtime + 1,) * 2)


def is_there(process: int) -> bool:
    """Whether a process exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("variables", [{}, {"WITHOUT_DAPHNE": "1"}], ids=["daphne", "django"])
def test_after_a_reload_one_process_listens(
    project: FreshProject, variables: dict[str, str], unused_tcp_port: int
) -> None:
    address = f"http://127.0.0.1:{unused_tcp_port}/live/"
    with project.started("manage.py", "runserver", f"127.0.0.1:{unused_tcp_port}", **variables) as server:
        first = wait_until(lambda: ask(address) or not server.running, "the server answers")
        assert server.running, server.output
        wait_until(lambda: is_connected_once(project), "the first process is connected")
        # More than once: Django notices no change before its first look.
        wait_until(lambda: touch(project) or not is_there(first), "the first process ends")
        second = wait_until(lambda: ask(address), "the server answers again")
        wait_until(lambda: is_connected_once(project), "the second process alone is connected")
        server.interrupt()
        wait_until(lambda: not is_there(second), "no process is left")
        wait_until(lambda: sessions(project) == {}, "no session is left")
        assert not re.search("Traceback|Exception ignored|never awaited", server.output), server.output
