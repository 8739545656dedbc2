"""Tasks append in the children of a real Celery worker (prefork), which end after a few tasks each."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Any

import pytest

from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from tests import celery_tasks
from tests.concurrency import start
from tests.following import environment
from tests.fresh_project import Program
from tests.waiting import wait_until

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("live")]
TASKS = 12
TASKS_PER_CHILD = 3


@pytest.fixture
def worker(tmp_path):
    """A worker of two children at a time."""
    (tmp_path / "control").mkdir()
    celery_tasks.use_broker(str(tmp_path))
    command = ["-m", "celery", "--app", "tests.celery_tasks", "worker", "--loglevel", "INFO"]
    command += ["--pool", "prefork", "--concurrency", "2", "--max-tasks-per-child", str(TASKS_PER_CHILD)]
    command += ["--without-gossip", "--without-mingle"]
    with contextlib.closing(
        Program(command, env=environment(CELERY_BROKER_DIRECTORY=str(tmp_path), C_FORCE_ROOT="1"))
    ) as running:
        yield running
        sys.stdout.write(running.output)  # pytest shows it of a test that failed


def test_what_tasks_append_is_announced_however_short_their_process_lives(settings, request):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 600.0}  # what arrives was announced
    stream = Stream.objects.create(key=celery_tasks.KEY)
    seen: list[Any] = []
    reading = start(lambda: seen.extend(chunk.data for chunk in subscribe(stream)))
    worker = request.getfixturevalue("worker")
    for number in range(TASKS):
        celery_tasks.append.delay(number)
    wait_until(lambda: worker.output.count("succeeded in") == TASKS, "all tasks are done")
    # A child that ends sends what waits, though Celery runs no exit hooks.
    wait_until(lambda: len(seen) == 2 + 3 * TASKS, "all chunks arrive")
    stream.close()
    reading.result(30)
    assert seen[:2] == ["prepared", "prepared"]
    ways = ["appended", "written", "written at last"]
    assert sorted(chunk[:2] for chunk in seen[2:]) == [[n, way] for n in range(TASKS) for way in ways]
    assert len({process for _, _, process in seen[2:]}) >= TASKS / TASKS_PER_CHILD
    assert worker.stop(signal.SIGTERM) == 0
    assert "Traceback" not in worker.output
