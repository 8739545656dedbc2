"""The ends and forks of processes that write."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from django_pgstreams.models import Stream
from tests.following import Process, database_url, python, query, sessions, waiting_for_lock
from tests.waiting import wait_until
from tests.writing import held, stored, writer_rows

pytestmark = pytest.mark.usefixtures("live")


@pytest.fixture
def stream(live):
    query("DELETE FROM pgstreams_writer")
    return Stream.objects.create(key="process")


# The end of a process ------------------------------------------------------------------------------

WRITE = """
import atexit, os, signal, sys, threading, time
import django
django.setup()
from django.db import connections
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
stream = Stream.objects.get(pk=sys.argv[1])
writer = StreamWriter(stream)
"""
MANY = "for number in range(3000): writer.append_nowait(number)\n"


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("connections.close_all()", 0),
        ("threading.Thread(target=lambda: [time.sleep(0.1), writer.append(3000)]).start()", 0),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), signal.SIGTERM)", 5),
        ("from django_pgstreams import receivers; receivers.release(); writer.append_nowait(3000)", 0),
    ],
)
def test_what_a_process_appended_is_stored_and_announced_before_it_ends(stream, ear, rest, code):
    ended = python(WRITE + MANY + rest, str(stream.pk))
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")
    values = stored(stream)
    assert values == list(range(3001 if "3000" in rest else 3000))
    assert f"{stream.pk}:{len(values)}" in ear.words()
    assert writer_rows() == []


def test_a_stream_that_is_piped_fails_when_its_process_is_ended_by_sigterm(stream):
    """With the line that README has for it, in the midst of text that waits to be joined."""
    code = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
def tokens():
    yield from ("one ", "two ", "three")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
writer.pipe(tokens(), join_seconds=60)
"""
    ended = python(WRITE + code, str(stream.pk))
    assert (ended.returncode, ended.stderr) == (143, "")
    assert stored(stream) == ["one two three"]
    stream.refresh_from_db()
    assert (stream.state, stream.reason) == ("failed", "SystemExit: 143")


def test_an_end_by_an_error_stores_too(stream, ear):
    ended = python(WRITE + MANY + "raise ValueError('as the user sees it')", str(stream.pk))
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert stored(stream) == list(range(3000))
    assert f"{stream.pk}:3000" in ear.words()


@pytest.mark.parametrize("before", ["", MANY])
def test_what_is_appended_by_exit_hooks_is_stored(stream, before):
    """Registered first, so run last: no thread stores any more, and from Python 3.12 on none can start."""
    code = f"""
import atexit, sys
def last():
    with StreamWriter(stream) as block:
        block.append("last")
        block.append_nowait("very last")
    block.append_nowait("after all")
    connections.close_all()
atexit.register(last)
{WRITE}
{before}
"""
    ended = python(code, str(stream.pk))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert stored(stream)[-3:] == ["last", "very last", "after all"]
    assert len(stored(stream)) == (3003 if before else 3)


@pytest.mark.parametrize("before", ["", "writer.append('before')\n"])
def test_the_row_of_a_stream_that_is_locked_at_the_end_is_waited_for(stream, before):
    code = WRITE + before + "print('1', flush=True); sys.stdin.readline()\n" + MANY
    process = Process("-c", code, str(stream.pk))
    assert process.read() == 1
    with held(stream) as own:
        process.tell("go")
        wait_until(lambda: waiting_for_lock("writer"), "it waits for the row")
        own.execute("COMMIT")
    assert process.wait() == 0
    process.close()
    assert len(stored(stream)) == 3000 + bool(before)


def test_the_end_is_bounded_in_time_while_a_row_is_locked(stream):
    with held(stream):
        began = time.monotonic()
        ended = python(WRITE + MANY, str(stream.pk))
        assert time.monotonic() - began < 20
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    assert stored(stream) == []


def test_the_end_is_bounded_in_time_when_the_server_does_not_answer(stream, proxy):
    code = WRITE + "writer.append(0); print('1', flush=True); sys.stdin.readline()\n" + MANY
    process = Process("-c", code, str(stream.pk), **database_url(host="127.0.0.1", port=proxy.port))
    assert process.read() == 1
    proxy.hold()
    began = time.monotonic()
    process.tell("go")
    assert process.wait() == 0
    assert time.monotonic() - began < 15
    process.close()


def test_a_process_that_is_killed_has_stored_what_it_acknowledged(stream):
    code = (
        WRITE
        + """
while True:
    print(writer.append("same"), flush=True)
"""
    )
    process = Process("-c", code, str(stream.pk))
    last = max(process.read() for _ in range(200))
    os.kill(process.pid, signal.SIGKILL)
    process.kill()
    process.close()
    wait_until(lambda: not sessions("writer"), "its session is gone")
    assert len(stored(stream)) > last
    assert len(writer_rows()) == 1  # the next writer removes it in a day


# Forks ---------------------------------------------------------------------------------------------

FORK = (
    """
import warnings, multiprocessing
warnings.filterwarnings("ignore", category=DeprecationWarning)
"""
    + WRITE
    + """
from django_pgstreams import committer
over = threading.Event()
futures = []
def write():
    while not over.is_set():
        futures.append(writer.append_nowait("parent"))
        time.sleep(0.0005)
thread = threading.Thread(target=write)
thread.start()
while len(futures) < 100: time.sleep(0.01)
connections.close_all()

def in_child(name):
    assert not committer._committers
    with StreamWriter(Stream.objects.get(pk=sys.argv[1])) as mine:
        assert len({mine.append(name) for _ in range(50)}) == 50
    writer.append_nowait(name).result(30)  # the parent's object works too
    for _ in range(49):
        writer.append_nowait(name)
    connections.close_all()
"""
)

OS_FORK = """
children = []
for number in range(3):
    child = os.fork()
    if not child:
        code = 1
        try:
            in_child("child")
            committer.close_all()
            code = 0
        finally:
            os._exit(code)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
"""

MULTIPROCESSING = """
children = [multiprocessing.get_context("fork").Process(target=in_child, args=["child"]) for _ in range(3)]
for child in children: child.start()
for child in children: child.join()
assert [child.exitcode for child in children] == [0] * 3
"""

AFTER_FORK = """
more = len(futures) + 100
while len(futures) < more: time.sleep(0.01)
over.set()
thread.join()
offsets = [future.result(30) for future in futures]
assert offsets == sorted(set(offsets))
print(len(offsets))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
@pytest.mark.parametrize("fork", [OS_FORK, MULTIPROCESSING])
def test_forks_of_a_process_that_writes_store_their_own_and_nothing_twice(stream, ear, fork):
    ended = python(FORK + fork + AFTER_FORK, str(stream.pk))
    assert (ended.returncode, ended.stderr) == (0, "")
    values = stored(stream)
    assert values.count("parent") == int(ended.stdout)
    assert values.count("child") == 3 * 100
    assert len(values) == int(ended.stdout) + 300
    assert f"{stream.pk}:{len(values)}" in ear.words()


SPAWN = """
import multiprocessing, sys

def in_child(pk):
    import django
    django.setup()
    from django_pgstreams.models import Stream
    from django_pgstreams.writer import StreamWriter
    from django.db import connections
    stream = Stream.objects.get(pk=pk)
    stream.append("child")
    writer = StreamWriter(stream)
    for number in range(499):
        writer.append_nowait("child")
    connections.close_all()

if __name__ == "__main__":
    import django
    django.setup()
    from django_pgstreams.models import Stream
    from django_pgstreams.writer import StreamWriter
    with StreamWriter(Stream.objects.get(pk=sys.argv[1])) as writer:
        writer.append("parent")
        context = multiprocessing.get_context(sys.argv[2])
        children = [context.Process(target=in_child, args=[sys.argv[1]]) for _ in range(2)]
        for child in children: child.start()
        writer.append_nowait("parent")
        for child in children: child.join()
        assert [child.exitcode for child in children] == [0, 0]
"""


@pytest.mark.parametrize("method", sorted({*multiprocessing.get_all_start_methods()} - {"fork"}))
def test_spawned_children_store_all_they_appended(stream, ear, tmp_path, method):
    (tmp_path / "spawning.py").write_text(SPAWN)
    process = Process(str(tmp_path / "spawning.py"), str(stream.pk), method)
    assert process.wait() == 0
    process.close()
    values = stored(stream)
    assert (values.count("parent"), values.count("child")) == (2, 1000)
    assert f"{stream.pk}:1002" in ear.words()


def test_a_process_that_only_sets_up_has_no_writer():
    ended = python("""
import threading, django
django.setup()
from django_pgstreams import committer, writer
assert threading.active_count() == 1
assert not committer._committers
""")
    assert (ended.returncode, ended.stderr) == (0, "")
