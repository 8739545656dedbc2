from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from django_pgstreams import hub
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Chunk, Stream
from tests.concurrency import DEADLINE_SECONDS, start
from tests.following import Process, database_url, python, query, sessions, store, terminate, writer
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("live")


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="process")


APPEND_AND = """
import sys, threading
import django
django.setup()
from django.db import connections
from django_pgstreams.models import Stream
stream = Stream.objects.get(pk=sys.argv[1])
stream.append("last words")
"""


# The end of a process (C24) ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("import signal; signal.signal(15, lambda *_: sys.exit(5)); signal.raise_signal(15)", 5),
        ("t = threading.Thread(target=sys.exit); t.start(); t.join()", 0),
        ("for n in range(500): stream.append(n)", 0),
        ("threading.Thread(target=lambda: [stream.append(1), connections.close_all()]).start()", 0),
        ("import atexit; atexit.register(stream.append, 'even later')", 0),
        ("from django_pgstreams.hub import subscribe; next(iter(subscribe(stream)))", 0),
        ("from django_pgstreams import notifier; notifier.close_all(); stream.append('more')", 0),
    ],
)
def test_what_a_process_appended_is_announced_before_it_ends_without_a_traceback(stream, ear, rest, code):
    ended = python(APPEND_AND + rest, str(stream.pk))
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")
    tail = Stream.objects.get(pk=stream.pk).next_offset
    assert tail >= 1
    if "atexit" not in rest:  # what is appended after the last flush waits for the poll
        assert f"{stream.pk}:{tail}" in ear.words()


def test_an_end_by_an_error_flushes_too(stream, ear):
    ended = python(APPEND_AND + "raise ValueError('as the user sees it')", str(stream.pk))
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert ear.words() == [f"{stream.pk}:1"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_between_commit_and_flush_costs_time_only(stream, ear, settings, number):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 1.0}
    subscription = subscribe(stream)
    reading = start(lambda: [chunk.data for chunk in subscription])
    hold_the_flush = f"""
import os
from django_pgstreams.notifier import Notifier
Notifier._flush = lambda self, batch, timeout_seconds: os.kill(os.getpid(), {number})
"""
    began = time.monotonic()
    ended = python(hold_the_flush + APPEND_AND + "import time; time.sleep(60)", str(stream.pk))
    assert ended.returncode == -number
    wait_until(lambda: subscription.position == 1, "the chunk arrives by the poll")
    assert ear.words() == []
    assert time.monotonic() - began < 4 * DEADLINE_SECONDS
    stream.close()
    assert reading.result(30) == ["last words"]


def test_the_end_is_bounded_in_time_when_the_server_does_not_answer(stream, proxy):
    code = """
import sys, time, django
from django.conf import settings
django.setup()
from django_pgstreams import notifier
from django_pgstreams.buffer import WakeUp
notifier.announce("default", [WakeUp(1, 1)])
while not notifier.get("default").flushes:
    time.sleep(0.01)
print('"flushed"', flush=True)
sys.stdin.readline()
notifier.announce("default", [WakeUp(2, 2)])
"""
    process = Process("-c", code, **database_url(host="127.0.0.1", port=proxy.port))
    assert process.read() == "flushed"
    proxy.hold()
    began = time.monotonic()
    process.tell("go")
    assert process.wait() == 0
    assert time.monotonic() - began < 15
    process.close()


def test_set_up_alone_connects_to_nothing_and_starts_no_thread():
    code = """
import threading, django
django.setup()
from django_pgstreams import admin, checks, consumers, hub, listener, models, notifier, routing
from django.core.management import call_command
call_command("check", verbosity=0)
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
assert threading.active_count() == 1, threading.enumerate()
from django_pgstreams import background
assert not background.is_running()
assert not notifier._notifiers and not listener._listeners and not hub._hubs
"""
    before = len(query("SELECT FROM pg_stat_activity WHERE application_name LIKE 'pgstreams-%%'"
                       " AND datname = current_database()"))  # fmt: skip
    ended = python(code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert before == 0


# Forks ---------------------------------------------------------------------------------------------

FORK = """
import gc, os, sys, threading, time, warnings
import multiprocessing
warnings.filterwarnings("ignore", category=DeprecationWarning)
import django
django.setup()
from django.db import connections
from django_pgstreams import background, hub, listener, notifier
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream

def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

def sessions():
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                       "AND application_name IN ('pgstreams-listener', 'pgstreams-notifier') "
                       "AND backend_start > %s", [started])
        return {pid for (pid,) in cursor}

with connections["default"].cursor() as cursor:
    cursor.execute("SELECT clock_timestamp()")
    [started] = cursor.fetchone()

stream = Stream.objects.get(pk=sys.argv[1])
stream.append("parent")
subscription = subscribe(stream)
got = []
def read():
    batches = iter(subscription.batches())
    got.extend(chunk.data for chunk in next(batches))
    connections.close_all()  # the child would find it abandoned
    for batch in batches:
        got.extend(chunk.data for chunk in batch)
reader = threading.Thread(target=read, daemon=True)
reader.start()
wait_until(lambda: len(got) == 1)
wait_until(lambda: listener.get("default").connects == 1)
wait_until(lambda: notifier.get("default").flushes >= 1)
before = sessions()
assert len(before) == 2
connections.close_all()

def in_child():
    assert not notifier._notifiers and not hub._hubs and not listener._listeners
    assert not background.is_running()
    gc.collect()
    mine = Stream.objects.get(pk=sys.argv[1])
    mine.append("child")
    assert [chunk.data for chunk in next(iter(subscribe(mine).batches()))] == ["parent", "child"]
    assert before < sessions()  # its own are others
    connections.close_all()
"""

OS_FORK = """
child = os.fork()
if not child:
    code = 1
    try:
        in_child()
        code = 0
    finally:
        if END == "exit":
            os._exit(code)
    sys.exit(code)
assert os.waitpid(child, 0)[1] == 0
"""

MULTIPROCESSING = """
child = multiprocessing.get_context("fork").Process(target=in_child)
child.start()
child.join()
assert child.exitcode == 0
"""

AFTER_FORK = """
wait_until(lambda: len(got) == 2)
assert before <= sessions()
stream.append("parent again", close=True)
reader.join(30)
assert got == ["parent", "child", "parent again"], got
assert listener.get("default").connects == 1
assert notifier.get("default").failed_flushes == 0
connections.close_all()
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
@pytest.mark.parametrize(
    "fork", [OS_FORK.replace("END", "'exit'"), OS_FORK.replace("END", "'return'"), MULTIPROCESSING]
)
def test_a_forked_child_starts_empty_and_leaves_its_parent_alone(stream, ear, fork):
    ended = python(FORK + fork + AFTER_FORK, str(stream.pk))
    assert ended.stderr == ""
    assert (ended.returncode, ended.stdout) == (0, "fine\n")
    words = ear.words()
    assert f"{stream.pk}:3!" in words
    assert f"{stream.pk}:2" in words or "'exit' ==" in fork  # os._exit() waits for no flush


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
def test_each_child_of_a_pool_announces_what_it_appends(stream, ear):
    code = (
        APPEND_AND
        + """
import multiprocessing, warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)
from django.db import connections
connections.close_all()
def append(number):
    Stream.objects.get(pk=sys.argv[1]).append(number)
    connections.close_all()
children = [multiprocessing.get_context("fork").Process(target=append, args=[n]) for n in range(4)]
for child in children: child.start()
for child in children: child.join()
assert [child.exitcode for child in children] == [0] * 4
"""
    )
    ended = python(code, str(stream.pk))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {f"{stream.pk}:{tail}" for tail in range(1, 6)} >= set(ear.words()) >= {f"{stream.pk}:5"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
def test_an_iteration_that_a_fork_parts_goes_on_in_the_parent_and_says_so_in_the_child(stream):
    ended = python(
        APPEND_AND
        + """
import os, warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)
from django_pgstreams.hub import subscribe
stream.append("more")
connections.close_all()
subscription = subscribe(stream)
seen = iter(subscription.batches())
assert [chunk.data for chunk in next(seen)] == ["last words", "more"]
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    stream.append("by the parent", close=True)
    assert [chunk.data for batch in seen for chunk in batch] == ["by the child", "by the parent"]
else:
    try:
        next(seen)
    except RuntimeError as error:
        assert "Iterate again" in str(error)
        assert subscription.position == 2
        assert not threading.active_count() > 1
        Stream.objects.get(pk=sys.argv[1]).append("by the child")
        assert [chunk.data for chunk in next(iter(subscription.batches()))] == ["by the child"]
        connections.close_all()
        sys.exit(0)
    sys.exit(1)
""",
        str(stream.pk),
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
def test_a_child_of_a_fork_that_python_is_not_told_of_starts_empty_too(ear):
    """As uWSGI forks: by the C library alone.

    In such a child Python itself hangs sooner or later if another thread of the parent was just waiting for
    the interpreter's lock: its condition counts a thread that is not there. Then another fork is tried.
    """
    for attempt in range(10):
        stream = Stream.objects.create(key=f"attempt {attempt}")
        ended = fork_in_secret(stream)
        if ended.returncode != STUCK:
            break
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {f"{stream.pk}:3", f"{stream.pk}:4"} & set(ear.words())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
@pytest.mark.parametrize(
    "look_up",
    [
        "notifier.known('default')",
        "committer.known('default')",
        "notifier.get('default')",
        "listener.known('default')",
        "listener.get('default')",
        "polling.tally('default')",
        "committer.get('default')",
        "hub.subscribers('default')",
        "health.get()",
        "background.is_running()",
    ],
)
def test_whatever_such_a_child_looks_up_first_is_not_its_parents(look_up):
    """Each look-up must notice by itself: it may be the first use of the app since the fork."""
    ended = python(
        f"""
import ctypes, os
import django
django.setup()
from django_pgstreams import background, committer, health, hub, listener, notifier, polling

# Stands for what the parent's threads own. Here there are none, so that no child can be stuck.
parents = object()
for owned in (notifier._notifiers, listener._listeners, polling._tallies, committer._committers, hub._hubs):
    owned["default"] = parents
background._loop = parents
child = ctypes.PyDLL(None).fork()
if not child:
    code = 1
    try:
        assert {look_up} is not parents
        here = (notifier, "_notifiers"), (listener, "_listeners"), (polling, "_tallies"), (hub, "_hubs")
        for module, name in (*here, (committer, "_committers")):
            assert parents not in getattr(module, name).values()
        assert background._loop is None
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
os._exit(0)
""",
    )
    assert (ended.returncode, ended.stderr) == (0, "")


STUCK = signal.SIGALRM


def fork_in_secret(stream):
    return python(
        APPEND_AND
        + """
import ctypes, os, signal
from django_pgstreams import background, committer, hub, listener, notifier
from django_pgstreams.hub import subscribe
from django_pgstreams.writer import StreamWriter
writer = StreamWriter(stream)
writer.append("written")
seen = iter(subscribe(stream))
assert [next(seen).data, next(seen).data] == ["last words", "written"]
assert background.is_running()
connections.close_all()
child = ctypes.PyDLL(None).fork()
if child:
    ended = os.waitpid(child, 0)[1]
    if ended == signal.SIGALRM:
        os._exit(ended)
    assert ended == 0
    assert [next(seen).data, next(seen).data] == ["child", "child too"]
else:
    signal.alarm(10)
    committer.close_all()
    assert not background.is_running()
    assert not committer._committers and not notifier._notifiers and not hub._hubs and not listener._listeners
    mine = Stream.objects.get(pk=sys.argv[1])
    mine.append("child")
    assert writer.append("child too") == 3
    assert next(iter(subscribe(mine, 3))).data == "child too"
    connections.close_all()
    notifier.close_all()
    os._exit(0)
""",
        str(stream.pk),
    )


# Memory --------------------------------------------------------------------------------------------

SLOW_READER = """
import resource, sys, time, json
import django
django.setup()
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream

def rss_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def say(what):
    print(json.dumps(what), flush=True)

stream = Stream.objects.get(pk=sys.argv[1])
seconds, per_second = float(sys.argv[2]), float(sys.argv[3])
expected = 0
warm_up = iter(subscribe(stream))
while expected < 100:
    assert next(warm_up).offset == expected
    expected += 1
warm_up.close()
before = highest = rss_bytes()
say("ready")
began = time.monotonic()
hurry = False
for chunk in subscribe(stream, expected):
    assert chunk.offset == expected, (chunk.offset, expected)
    expected += 1
    if not hurry:
        time.sleep(1 / per_second)
        highest = max(highest, rss_bytes())
        if time.monotonic() - began > seconds:
            hurry = True
            say(["slow", expected, highest - before])
say(["end", expected, rss_bytes() - before])
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.once
def test_a_slow_reader_of_a_fast_stream_stays_small_and_reads_on_to_the_end(stream):
    seconds = 30
    store(stream, 100)
    reader = Process("-c", SLOW_READER, str(stream.pk), str(seconds), "10")
    with writer("quiet", stream, seconds, 5000, 1024) as writing:
        writing.tell("go")
        assert reader.read() == "ready"
        written = writing.read()
    slow, position, grown = reader.read()
    stream.close()
    end, read_to, grown_at_the_end = reader.read()
    assert (slow, end) == ("slow", "end")
    assert written >= 0.8 * 5000 * seconds
    assert position < 100 + 15 * seconds
    assert grown <= 20_000_000
    assert grown_at_the_end <= 20_000_000 + 10_000_000  # it read 150,000 chunks since
    assert read_to == 100 + written
    assert reader.wait() == 0
    reader.close()


# Everything at once --------------------------------------------------------------------------------


def test_every_follower_sees_a_contiguous_run_to_the_end_whatever_happens(settings, elsewhere):
    """Writers of all kinds, followers that come and go, sessions that are ended."""
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 0.5, "WINDOW_BYTES": 2000, "PAGE_CHUNKS": 50}
    streams = [Stream.objects.create(key=f"stress/{number}") for number in range(3)]
    over = threading.Event()
    deadline = time.monotonic() + 3

    def append(stream, number):
        own = Stream.objects.get(pk=stream.pk)
        while time.monotonic() < deadline:
            if number % 2:
                own.append_many(["many"] * (number + 2))
            else:
                Chunk.objects.bulk_create(Chunk(stream=own, data="bulk") for _ in range(3))
                own.append("one")

    def follow(stream, number):
        seen = 0
        runs = 0
        while not over.is_set():
            where = (0, "tail", -1, -20, -200)[(number + runs) % 5]
            subscription = subscribe(stream, where)
            expected = None
            for chunk in subscription:
                assert chunk.offset == (chunk.offset if expected is None else expected)
                expected = chunk.offset + 1
                seen += 1
                if seen % 37 == 0 and not over.is_set() and number % 3:
                    break
            runs += 1
            if subscription.state:
                assert expected is None or expected == Stream.objects.get(pk=stream.pk).next_offset
                return seen
        return follow_to_the_end(stream, number)

    def follow_to_the_end(stream, number):
        offsets = [chunk.offset for chunk in subscribe(stream)]
        assert offsets == list(range(Stream.objects.get(pk=stream.pk).next_offset))
        return len(offsets)

    writing = [start(append, stream, number) for stream in streams for number in range(2)]
    reading = [start(follow, stream, number) for stream in streams for number in range(5)]
    while time.monotonic() < deadline:
        for stream in streams:
            store(stream, 5)
            elsewhere(stream, "stream.append('elsewhere')")
        terminate("reader")
        terminate("listener")
        terminate("notifier")
    for future in writing:
        future.result(DEADLINE_SECONDS)
    over.set()
    for stream in streams:
        stream.close()
    assert all(future.result(2 * DEADLINE_SECONDS) for future in reading)
    wait_until(lambda: not sum(one.followers for one in hub._all()), "nobody follows")
    assert len(sessions("listener")) <= 1
