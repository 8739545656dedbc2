"""What notifications cost and may not cost, and that everything arrives without them as well."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import statistics
import threading
import time

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db import connection, connections, transaction

from django_pgstreams import health, listener, notifier
from django_pgstreams.hub import subscribe
from django_pgstreams.models import Chunk, Stream
from django_pgstreams.writer import StreamWriter
from tests.aliases import alias
from tests.concurrency import start
from tests.following import Process, connect, is_listening, query
from tests.servers import Socket, headers_of, serving
from tests.waiting import DEADLINE_SECONDS, wait_until

pytestmark = [pytest.mark.usefixtures("live"), pytest.mark.once]

NEVER_SECONDS = 1000.0
MEGABYTE = 1024 * 1024
VERSIONS = 10_000


@pytest.fixture
def no_poll(settings):
    """What arrives was announced."""
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS}


@pytest.fixture
def quick_poll(settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 0.5}


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="notified")


@contextlib.contextmanager
def beside(name, **changes):
    """Another alias of a database: who writes by it wakes followers of the first by notification only."""
    with alias("beside", **connections.settings[name] | changes) as made:
        yield made


class Follower:
    """Follows a stream in a thread, up to its end."""

    def __init__(self, stream, using="default"):
        self._subscription = subscribe(stream.key, using=using)
        self._reading = start(lambda: [chunk.data for chunk in self._subscription])
        wait_until(lambda: is_listening(using), "it listens")

    def wait_for(self, position):
        """Wait until the chunks before the position are here."""
        wait_until(lambda: self._subscription.position >= position or self._reading.done(), "they arrive")

    def values(self):
        """All values, once the stream has ended."""
        return self._reading.result(DEADLINE_SECONDS)


# A million of them -----------------------------------------------------------------------------------

LISTEN = """
import json, sys, time
import django
django.setup()
from django_pgstreams.listener import Listener

heard, wrong, everythings = 0, [], 0

def take(batch):
    global heard, everythings
    everythings += batch.everything
    for stream_id, tail, _ in batch.wake_ups:
        heard += 1
        if tail != heard:
            wrong.append((heard, tail))

def memory_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

listener = Listener("default", channel="pgstreams", health_check_seconds=4.0, idle_seconds=30.0)
listener.attach(take)
while not everythings:
    time.sleep(0.01)
print(1, flush=True)
for line in sys.stdin:
    print(json.dumps([heard, wrong[:3], listener.connects, memory_bytes()]), flush=True)
"""
NOTIFICATIONS = 1_000_000
STEP = 10_000
MOST_UNHEARD = 5 * STEP
WARM = 100_000


def test_a_million_notifications_are_all_heard_and_none_is_kept():
    """Those that come in a health check too, which is made every two seconds meanwhile."""
    process = Process("-c", LISTEN)

    def state():
        process.tell("")
        return process.read()

    try:
        process.read()
        memory = []
        with connect() as own:
            for sent in range(STEP, NOTIFICATIONS + STEP, STEP):
                own.execute(
                    "SELECT count(pg_notify('pgstreams', '1:' || n)) "
                    "FROM generate_series(%s::int, %s::int) AS n",
                    (sent - STEP + 1, sent),
                )
                wait_until(lambda sent=sent: state()[0] >= sent - MOST_UNHEARD, "most are heard")
                if sent > WARM:
                    memory.append(state()[3])
        wait_until(lambda: state()[0] == NOTIFICATIONS, "all are heard")
        assert state()[1:3] == [[], 1]
        assert max(memory) - memory[0] < 20 * MEGABYTE
        wait_until(lambda: query("SELECT pg_notification_queue_usage()") == [(0.0,)], "the queue is empty")
    finally:
        process.close()


# Notifications that fail -------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_poll")
def test_where_notifying_is_forbidden_appends_succeed_and_the_poll_delivers(private, caplog):
    caplog.set_level(logging.INFO, logger="django_pgstreams")
    private.query("CREATE ROLE plain LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO plain")
    private.query("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO plain")
    private.query("REVOKE EXECUTE ON FUNCTION pg_notify FROM PUBLIC")
    allow = "GRANT EXECUTE ON FUNCTION pg_notify TO PUBLIC"
    try:
        with beside(private.alias, USER="plain") as plain:
            check_failing_notifications(
                private,
                plain,
                caplog,
                "permission denied",
                lambda: private.query(allow),
            )
    finally:
        private.query(allow)
        private.query("DROP OWNED BY plain; DROP ROLE plain")


@pytest.mark.usefixtures("quick_poll")
def test_where_the_queue_is_full_appends_succeed_and_the_poll_delivers(private, caplog):
    """As when another program listens and then stays in a transaction."""
    caplog.set_level(logging.INFO, logger="django_pgstreams")
    stuck = private.connect()
    stuck.execute("LISTEN stuck")
    stuck.execute("BEGIN")
    stuck.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="too many notifications"):
        fill_the_queue(private)
    try:
        with beside(private.alias) as other:
            check_failing_notifications(private, other, caplog, "too many notifications", stuck.close)
    finally:
        stuck.close()


def fill_the_queue(private):
    with private.connect() as own:
        for number in itertools.count():
            own.execute("SELECT pg_notify('stuck', rpad(%s, 7000))", (str(number),))


def check_failing_notifications(private, using, caplog, why, mend):
    stream = Stream.objects.using(using).create(key="notified")
    following = Follower(stream, private.alias)
    for number in range(20):
        assert stream.append(number).offset == number
        following.wait_for(number - 10)
    following.wait_for(20)
    wait_until(lambda: health.get(private.alias).found_only_by_poll, "it was the poll that found them")
    sent = notifier.get(using)
    wait_until(lambda: sent.failed_flushes >= 3, "it is tried again and again")
    wait_until(lambda: health.get(using).pending_wake_ups == 1, "it waits for another try")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "the flush failed" in warnings[0]
    assert why in warnings[0]
    mend()
    wait_until(lambda: f"Wake-ups of {using!r} are sent again" in caplog.messages, "what waited is sent")
    wait_until(
        lambda: private.query("SELECT pg_notification_queue_usage()") == [(0.0,)], "the queue is empty"
    )
    before = listener.get(private.alias).wake_ups
    stream.append(20, close=True)
    assert following.values() == list(range(21))
    wait_until(lambda: listener.get(private.alias).wake_ups > before, "a wake-up is heard")


# Limits of notifications -------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_poll")
def test_five_thousand_streams_with_long_names_in_one_transaction_wake_everybody(ear):
    with beside("default") as other:
        many = Stream.objects.using(other).bulk_create(
            Stream(key=f"Ключ/{number}/".ljust(200, "ж")) for number in range(5000)
        )
        followers = [Follower(stream) for stream in many[::100]]
        with transaction.atomic(using=other):
            Chunk.objects.using(other).bulk_create(Chunk(stream=stream, data=1) for stream in many)
        for follower in followers:
            follower.wait_for(1)
        expected = {f"{stream.pk}:1" for stream in many}
        wait_until(lambda: expected <= set(ear.words()), "all are heard")
        assert max(len(payload.encode()) for payload in ear.payloads) < 8000
        assert 2 <= len(ear.payloads) < 50
        Chunk.objects.using(other).bulk_create(Chunk(stream=stream, data=2) for stream in many[::100])
        for stream in many[::100]:
            stream.close()
        assert [follower.values() for follower in followers] == [[1, 2]] * len(followers)
    query("DELETE FROM pgstreams_chunk")  # faster than the ORM
    query("DELETE FROM pgstreams_stream")


@pytest.mark.usefixtures("no_poll")
def test_a_chunk_of_a_megabyte_is_announced_and_delivered(stream):
    with beside("default") as other:
        following = Follower(stream)
        written = Stream.objects.using(other).get(pk=stream.pk)
        value = "ж" * (MEGABYTE // 2 - 1)
        written.append(value, close=True)
        assert following.values() == [value]


@pytest.mark.parametrize("channel", ['Stream"s', "x" * 63, "ж" * 31])
def test_a_channel_of_any_name_works_from_end_to_end(stream, settings, channel):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": NEVER_SECONDS, "CHANNEL": channel}
    with beside("default") as other:
        following = Follower(stream)
        Stream.objects.using(other).get(pk=stream.pk).append(1, close=True)
        assert following.values() == [1]


# Notifications and those who write -----------------------------------------------------------------------

WRITERS = 32
HELD_SECONDS = 0.2
NOTIFY_LOCK = "locktype = 'object' AND database = 0 AND mode = 'AccessExclusiveLock'"


def appends_by_many_writers(streams, seconds):
    """How many transactions, each of which stays open for a while, as many writers commit in a time."""
    over = threading.Event()

    def write(stream):
        count = 0
        while not over.is_set():
            with transaction.atomic():
                stream.append(count)
                over.wait(HELD_SECONDS)
            count += 1
        return count

    writing = [start(write, stream) for stream in streams]
    waiting = 0
    until = time.monotonic() + seconds
    with connect() as own:
        while time.monotonic() < until:
            rows = own.execute(
                "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) "
                f"WHERE {NOTIFY_LOCK} AND NOT granted AND datname = current_database()"
            )
            waiting += sum(name != "pgstreams-notifier" for (name,) in rows)
    over.set()
    return sum(one.result(DEADLINE_SECONDS) for one in writing), waiting


def test_writers_do_not_feel_the_notifications(settings):
    streams = [Stream.objects.create(key=f"slow/{number}") for number in range(WRITERS)]
    counts = {}
    for who in ("relay", "thread", "relay", "thread"):
        settings.PGSTREAMS = {"NOTIFIER": who}
        count, waiting = appends_by_many_writers(streams, 1.5)
        counts[who] = max(count, counts.get(who, 0))
        assert waiting == 0
    # Within a tenth of each other on a quiet machine.
    assert counts["thread"] > 0.75 * counts["relay"]
    assert notifier.get("default").flushes > 10


@pytest.mark.usefixtures("quick_poll")
def test_while_a_commit_holds_the_lock_of_all_that_notify_appends_go_on(private):
    """The lock is the whole cluster's, and held until the commit is on the disk, or on a standby."""
    name = connections.settings[private.alias]["NAME"]
    private.query(f"ALTER DATABASE {name} SET synchronous_commit = local")
    private.query("CREATE TABLE other (value int)")
    try:
        private.query("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        private.query("SELECT pg_reload_conf()")
        with beside(private.alias) as other:
            stream = Stream.objects.using(other).create(key="notified")
            following = Follower(stream, private.alias)
            stuck = start(notify_in_a_commit_that_hangs, private)
            held = f"SELECT pid FROM pg_locks WHERE {NOTIFY_LOCK} AND granted = %s"
            wait_until(lambda: private.query(held, True), "the commit holds the lock")
            for number in range(100):
                stream.append(number)
            following.wait_for(100)
            wait_until(lambda: private.query(held, False), "the notifier waits for it")
            assert not stuck.done()
            private.query("ALTER SYSTEM RESET synchronous_standby_names")
            private.query("SELECT pg_reload_conf()")
            stuck.result(DEADLINE_SECONDS)
            wait_until(lambda: notifier.get(other).flushes, "the wake-ups are sent")
            stream.close()
            assert following.values() == list(range(100))
    finally:
        private.query("ALTER SYSTEM RESET synchronous_standby_names")
        private.query("SELECT pg_reload_conf()")
        private.query("DROP TABLE other")


def notify_in_a_commit_that_hangs(private):
    with private.connect() as own:
        own.execute("SET synchronous_commit = on")
        with own.transaction():
            own.execute("INSERT INTO other VALUES (1)")
            own.execute("NOTIFY other")


@pytest.mark.usefixtures("no_poll")
def test_ten_thousand_appends_in_one_transaction_need_one_notification(stream, ear):
    with beside("default") as other:
        following = Follower(stream)
        written = Stream.objects.using(other).get(pk=stream.pk)
        with transaction.atomic(using=other):
            for number in range(2000):
                written.append(number)
            for number in range(2000, 10_000, 100):
                written.append_many(range(number, number + 100))
        following.wait_for(10_000)
        wait_until(lambda: ear.heard(f"{stream.pk}:10000"), "the last is announced")
        assert len(ear.words()) < 100
        written.close()
        assert following.values() == list(range(10_000))


# Old snapshots -------------------------------------------------------------------------------------------


def took(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_a_transaction_that_stays_open_elsewhere_leaves_appending_and_reading_fast(private):
    """It keeps all versions of the streams' rows from being cleared away: here 10,000 of each.

    What they cost is told from a busy machine by turns: a stream with many, a stream that is new.
    """

    def make(name, count):
        return [Stream.objects.using(private.alias).create(key=f"{name}/{number}") for number in range(count)]

    def read(stream):
        list(stream.read(stream.next_offset - 1))

    def updates():
        [found] = private.query(
            "SELECT n_tup_upd, n_tup_hot_upd, n_dead_tup FROM pg_stat_user_tables "
            "WHERE relname = 'pgstreams_stream'"
        )
        return found

    private.query("ALTER TABLE pgstreams_stream SET (autovacuum_enabled = off)")
    private.query("VACUUM pgstreams_stream")
    old = make("old", 10)
    before = updates()
    times = collections.defaultdict(list)
    for number, early in enumerate(make("early", 100)):
        early.append(number)
        times["read", "early"].append(took(lambda: read(early)))  # noqa: B023
    with private.connect() as reporting, reporting.transaction(), contextlib.ExitStack() as stack:
        reporting.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reporting.execute("SELECT count(*) FROM pgstreams_stream")
        private.query(
            "SELECT count(pgstreams_append('old/' || number %% 10, '0')) "
            "FROM generate_series(1, 10 * %s) AS number",
            VERSIONS,
        )
        private.query("ANALYZE pgstreams_stream")
        wait_until(lambda: updates()[0] >= before[0] + 10 * VERSIONS, "its updates are counted")
        all_of_them, hot, dead = updates()
        assert hot - before[1] > 0.75 * (all_of_them - before[0])
        assert dead > 9 * VERSIONS
        for stream in old:
            stream.refresh_from_db()
        writers = {stream: stack.enter_context(StreamWriter(stream)) for stream in old}
        for number, new in enumerate(make("new", 300)):
            new.append(0)
            for kind, stream in (("old", old[number % 10]), ("new", new)):
                times["append", kind].append(took(lambda: stream.append(1)))  # noqa: B023
                times["read", kind].append(took(lambda: read(stream)))  # noqa: B023
                writer = writers.get(stream) or stack.enter_context(StreamWriter(stream))
                times["write", kind].append(took(lambda: writer.append(1)))  # noqa: B023
    medians = {what: statistics.median(values) for what, values in times.items()}
    for what in ("append", "read", "write"):
        assert medians[what, "old"] < 2 * medians[what, "new"]
    assert medians["read", "old"] < 5 * medians["read", "early"]  # the same plan; told from another moment
    private.query("VACUUM pgstreams_stream")
    wait_until(lambda: updates()[2] < 100, "vacuum recovers")


# Nobody there --------------------------------------------------------------------------------------------


def statements(role):
    """How many statements sessions of a role have run, by the server's own count."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(s.calls), 0) FROM pg_stat_statements AS s "
            "JOIN pg_roles AS r ON r.oid = s.userid WHERE r.rolname = %s",
            [role.name],
        )
        return int(cursor.fetchone()[0])


def statements_in(role, seconds):
    """How many it runs in a time."""
    before, began = statements(role), time.monotonic()
    wait_until(lambda: time.monotonic() - began > seconds, "the time is over")
    return statements(role) - before


def test_a_process_without_subscribers_asks_nothing_and_one_with_many_polls_once_for_all():
    query("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    owner = User.objects.create_user("owner")
    headers = headers_of(owner)
    keys = ["a", "b"]
    for key in keys:
        Stream.objects.create(key=key, owner=owner)
    quick = {"POLL_INTERVAL_SECONDS": 0.5, "IDLE_SECONDS": 1.0, "HEALTH_CHECK_SECONDS": 1000.0}
    with serving("daphne", PGSTREAMS=quick) as server:
        assert statements_in(server.role, 1) == 0
        with contextlib.ExitStack() as sockets:
            for key in keys * 5:
                sockets.enter_context(Socket(server.url(key), headers)).frames("live")
            wait_until(lambda: "" not in server.role.sessions(), "no look-up keeps a connection")
            # The poll comes twice a second.
            assert 4 <= statements_in(server.role, 3) <= 8
        server.wait_empty()
        wait_until(lambda: server.role.sessions() == [], "no connection is left")
        assert statements_in(server.role, 2) == 0
