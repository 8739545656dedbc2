"""Commits whose reply is lost: each append is stored once, and each caller told right."""

from __future__ import annotations

import logging
import time

import pytest

from django_pgstreams import committer, receivers, settling
from django_pgstreams.exceptions import AppendFailed, AppendUnknown, StreamClosed, StreamMissing
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter
from tests.concurrency import start
from tests.following import connect, query, sessions, waiting_for_lock
from tests.losing_proxy import Lose, losing
from tests.waiting import wait_until
from tests.writing import held, make_streams, stored, writer_rows

pytestmark = pytest.mark.usefixtures("live")

BATCH = b"pgstreams_store("
SETTLE = b"SET seq = seq + 1"


@pytest.fixture
def proxy(live):
    """A proxy before the test database; the Django alias `proxy.alias` goes through it."""
    with losing() as made:
        yield made


@pytest.fixture(autouse=True)
def no_rows(live):
    """No test finds the row of another one's writer that did not end well."""
    yield
    receivers.release()
    query("DELETE FROM pgstreams_writer")


@pytest.fixture
def stream(live):
    return Stream.objects.create(key="settled")


@pytest.fixture
def writer(stream, proxy):
    return StreamWriter(stream, using=proxy.alias)


def logged(caplog, text):
    return [record for record in caplog.records if text in record.getMessage()]


# Each thing that can be lost -----------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("lost", list(Lose))
def test_whatever_is_lost_each_append_is_stored_once(stream, writer, proxy, lost, is_first, caplog):
    caplog.set_level(logging.INFO, logger="django_pgstreams")
    before = [] if is_first else [writer.append("before")]
    proxy.lose(BATCH, lost)
    futures = [writer.append_nowait(number) for number in range(100)]
    assert [future.result(30) for future in futures] == [n + len(before) for n in range(100)]
    assert proxy.lost == [lost]
    assert writer.append("after") == 100 + len(before)
    assert stored(stream) == ["before"] * len(before) + [*range(100), "after"]
    assert len(logged(caplog, "tries again")) == 1
    assert len(logged(caplog, "stores again")) == 1
    if lost is Lose.REPLY:
        assert len(logged(caplog, "had been committed")) == 1


def test_everything_may_be_lost_again_and_again(stream, writer, proxy):
    writer.append("before")
    proxy.lose(BATCH, *[Lose.REQUEST, Lose.REPLY, Lose.CONNECTION] * 3)
    for number in range(1, 12):
        assert writer.append("same") == number
    assert stored(stream) == ["before"] + ["same"] * 11
    assert len(proxy.lost) == 9


def test_the_settling_may_be_lost_too(stream, writer, proxy):
    writer.append("before")
    fates = {BATCH: [Lose.REPLY, Lose.REQUEST], SETTLE: [Lose.REPLY, Lose.CONNECTION, Lose.REQUEST]}
    proxy.marks = (BATCH, SETTLE)
    proxy.fate = lambda mark: fates[mark].pop(0) if fates[mark] else None
    for number in range(1, 5):
        assert writer.append("same") == number
    assert stored(stream) == ["before"] + ["same"] * 4
    assert fates == {BATCH: [], SETTLE: []}


def test_what_a_lost_batch_refused_is_told_too(proxy):
    good, closed, deleted, locked = streams = make_streams(4)
    writers = [StreamWriter(stream, using=proxy.alias) for stream in streams]
    writers[0].append("before")
    closed.close()
    Stream.objects.filter(pk=deleted.pk).delete()
    with held(good, locked):
        gathering = writers[0].append_nowait("gathers")
        proxy.lose(BATCH, Lose.REPLY, Lose.REPLY, Lose.REPLY)
        futures = [each.append_nowait(number) for number in range(3) for each in writers]
        wait_until(lambda: futures[1].done() and futures[2].done(), "the refused are told")
    assert isinstance(futures[1].exception(30), StreamClosed)
    assert isinstance(futures[2].exception(30), StreamMissing)
    assert gathering.result(30) == 1
    assert [future.result(30) for future in futures[::4]] == [2, 3, 4]
    assert [future.result(30) for future in futures[3::4]] == [0, 1, 2]
    assert stored(good) == ["before", "gathers", 0, 1, 2]
    assert stored(locked) == [0, 1, 2]


def test_the_end_of_a_stream_is_settled_with_its_time(stream, writer, proxy):
    proxy.lose(BATCH, *[Lose.REPLY] * 10)
    writer.pipe(["a", "b"])
    own = Stream.objects.get(pk=stream.pk)
    assert (stream.state, stream.next_offset, stream.closed_at) == ("completed", 2, own.closed_at)
    assert stored(stream) == ["a", "b"]
    assert Lose.REPLY in proxy.lost


def test_an_expected_offset_is_no_conflict_with_itself(stream, writer, proxy):
    proxy.lose(BATCH, Lose.REPLY, Lose.CONNECTION, Lose.REQUEST, Lose.REPLY)
    for number in range(6):
        assert writer.append(number, expected_offset=number) == number
    assert stored(stream) == list(range(6))


# Zombies: servers that are at a batch whose client has gone ----------------------------------------


def test_a_server_that_waits_for_the_writers_row_is_waited_for(stream, writer, proxy):
    writer.append("before")
    [(row, *_)] = writer_rows()
    with connect() as own:
        own.execute("BEGIN")
        own.execute("SELECT FROM pgstreams_writer WHERE id = %s FOR UPDATE", [row])
        future = writer.append_nowait("once")
        wait_until(lambda: len(waiting_for_lock("writer")) == 1, "the batch waits")
        proxy.go_down()
        proxy.come_up()
        wait_until(lambda: len(waiting_for_lock("writer")) == 2, "the next connection waits behind it")
        own.execute("COMMIT")
    assert future.result(30) == 1
    assert writer.append("after") == 2
    assert stored(stream) == ["before", "once", "after"]


def test_a_server_that_waits_for_a_streams_row_is_fenced(proxy):
    """The parked session's: it comes to the writer's row after the next connection."""
    locked, other = make_streams(2)
    writer, beside = [StreamWriter(stream, using=proxy.alias) for stream in (locked, other)]
    beside.append("before")
    with held(locked) as own:
        future = writer.append_nowait("once")
        wait_until(lambda: len(waiting_for_lock("writer")) == 1, "it waits for the stream")
        [(parked, seq, _)] = [row for row in writer_rows() if row[1] == 0]
        proxy.go_down()
        proxy.come_up()
        wait_until(lambda: {row[0]: row[1] for row in writer_rows()}[parked] > seq, "it is fenced")
        own.execute("COMMIT")
    assert future.result(30) == 0
    assert writer.append("after") == 1
    assert stored(locked) == ["once", "after"]
    assert beside.append("after") == 1


def test_a_request_that_arrives_late_is_fenced(stream, proxy, settings):
    """A black hole gives it back when the writer has given it up."""
    settings.PGSTREAMS = {"QUERY_TIMEOUT_SECONDS": 0.5, "WRITER_OUTAGE_SECONDS": 60.0}
    writer = StreamWriter(stream, using=proxy.alias)
    writer.append("before")
    proxy.hold()
    before = proxy.accepted
    futures = [writer.append_nowait("once") for _ in range(10)]
    wait_until(lambda: proxy.accepted > before + 1, "another connection is tried, and another")
    proxy.come_up()
    assert [future.result(60) for future in futures] == list(range(1, 11))
    assert writer.append("after") == 11
    assert stored(stream) == ["before"] + ["once"] * 10 + ["after"]


# What cannot be settled ----------------------------------------------------------------------------


def test_without_the_writers_row_nobody_knows_and_the_rest_is_stored(proxy):
    stream, other = make_streams(2)
    writer, beside = [StreamWriter(each, using=proxy.alias) for each in (stream, other)]
    writer.append("before")
    with connect() as own:
        own.execute("BEGIN")
        own.execute("SELECT FROM pgstreams_writer FOR UPDATE")
        unknown = writer.append_nowait("unknown")
        wait_until(lambda: len(waiting_for_lock("writer")) == 1, "the batch waits")
        later = [beside.append_nowait(number) for number in range(3)]
        own.execute("DELETE FROM pgstreams_writer")
        proxy.go_down()
        own.execute("COMMIT")
        wait_until(lambda: not waiting_for_lock("writer"), "the batch has failed")
        proxy.come_up()
    assert isinstance(unknown.exception(30), AppendUnknown)
    assert "read the stream's end" in str(unknown.exception())
    assert [future.result(30) for future in later] == [0, 1, 2]
    assert writer.append("after") == 1
    assert stored(stream) == ["before", "after"]


def test_a_lost_row_alone_is_replaced_without_a_word(stream, writer, caplog):
    writer.append("before")
    [(first, *_)] = writer_rows()
    query("DELETE FROM pgstreams_writer")
    assert [writer.append(number) for number in range(3)] == [1, 2, 3]
    [(second, *_)] = writer_rows()
    assert first != second
    assert caplog.records == []
    assert stored(stream) == ["before", 0, 1, 2]


def test_a_reply_that_cannot_be_read_leaves_nobody_in_a_wrong_belief(stream, writer, monkeypatch):
    def out_of_memory(*_):
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(settling, "_outcomes", out_of_memory)
    with pytest.raises(AppendUnknown):
        writer.append("stored")
    assert writer.append("next") == 1
    assert stored(stream) == ["stored", "next"]


# Outages -------------------------------------------------------------------------------------------


def test_after_a_long_outage_what_was_not_sent_has_failed(stream, proxy, settings):
    settings.PGSTREAMS = {"WRITER_OUTAGE_SECONDS": 0.5}
    writer = StreamWriter(stream, using=proxy.alias)
    writer.append("before")
    query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgstreams-writer'"
          " AND datname = current_database()")  # fmt: skip
    wait_until(lambda: not sessions("writer"), "it has gone")
    committer.get(proxy.alias)  # it has not noticed yet
    proxy.go_down()
    began = time.monotonic()
    futures = [writer.append_nowait(number) for number in range(3)]
    errors = {type(future.exception(30)) for future in futures}
    assert errors <= {AppendFailed, AppendUnknown}
    assert time.monotonic() - began > 0.4
    with pytest.raises(AppendFailed, match=r"Nothing was appended to stream 'settled'"):
        writer.append("while it is away")
    with pytest.raises(AppendFailed):
        writer.pipe(["a piece"])
    proxy.come_up()
    assert writer.append("after") == 1
    assert stored(stream) == ["before", "after"]


def test_after_a_long_outage_nobody_knows_what_was_sent(stream, proxy, settings):
    settings.PGSTREAMS = {"WRITER_OUTAGE_SECONDS": 0.5}
    other = Stream.objects.create(key="other")
    writer, beside = [StreamWriter(each, using=proxy.alias) for each in (stream, other)]
    writer.append("before")
    with connect() as own:
        own.execute("BEGIN")
        own.execute("SELECT FROM pgstreams_writer FOR UPDATE")
        sent = writer.append_nowait("sent")
        wait_until(lambda: len(waiting_for_lock("writer")) == 1, "the batch waits")
        behind = beside.append_nowait("not sent")
        proxy.go_down()
        assert isinstance(sent.exception(30), AppendUnknown)
        assert isinstance(behind.exception(30), AppendFailed)
        own.execute("COMMIT")
    wait_until(lambda: stored(stream) == ["before", "sent"], "it was stored after all")
    proxy.come_up()
    assert writer.append("after") == 2
    assert stored(other) == []


def test_a_database_that_was_never_reached_is_not_waited_for(stream, proxy):
    proxy.go_down()
    began = time.monotonic()
    with pytest.raises(AppendFailed):
        StreamWriter(stream, using=proxy.alias).append("a")
    assert time.monotonic() - began < 20
    proxy.come_up()
    assert StreamWriter(stream, using=proxy.alias).append("b") == 0


def test_a_short_outage_is_waited_for(stream, writer, proxy):
    writer.append("before")
    proxy.go_down()
    futures = [writer.append_nowait(number) for number in range(100)]
    refused = proxy.accepted
    wait_until(lambda: proxy.accepted > refused + 2, "it tries again")
    proxy.come_up()
    assert [future.result(60) for future in futures] == list(range(1, 101))
    assert stored(stream) == ["before", *range(100)]


def test_a_second_connection_that_cannot_be_made_holds_nobody_up(proxy):
    locked, other = make_streams(2)
    writer, beside = [StreamWriter(stream, using=proxy.alias) for stream in (locked, other)]
    writer.append("before")
    proxy.refuse()
    with held(locked):
        waiting = writer.append_nowait("waits")
        refused = proxy.accepted
        wait_until(lambda: proxy.accepted > refused + 1, "the second connection is tried")
        assert [beside.append(number) for number in range(20)] == list(range(20))
        assert not waiting.done()
    proxy.come_up()
    assert waiting.result(60) == 1


# Isolation -----------------------------------------------------------------------------------------


@pytest.fixture
def repeatable(live):
    """A proxy whose sessions have another isolation level by default."""
    with losing(options="-c default_transaction_isolation=repeatable\\ read") as made:
        yield made


def test_another_default_isolation_does_not_disturb(stream, repeatable, caplog):
    writer = StreamWriter(stream, using=repeatable.alias)
    theirs = start(lambda: [Stream.objects.get(pk=stream.pk).append("orm") for _ in range(100)])
    futures = [writer.append_nowait("writer") for _ in range(100)]
    offsets = [future.result(30) for future in futures] + [writer.append("writer") for _ in range(50)]
    theirs.result(60)
    values = stored(stream)
    assert [values[offset] for offset in offsets] == ["writer"] * 150
    assert values.count("orm") == 100
    assert caplog.records == []


@pytest.mark.parametrize("mark", [b"COMMIT", BATCH])
@pytest.mark.parametrize("lost", list(Lose))
def test_in_another_default_isolation_too_each_append_is_stored_once(stream, repeatable, mark, lost):
    writer = StreamWriter(stream, using=repeatable.alias)
    writer.append("before")
    repeatable.lose(mark, lost)
    assert [writer.append("same") for _ in range(3)] == [1, 2, 3]
    assert repeatable.lost == [lost]
    assert stored(stream) == ["before"] + ["same"] * 3


def test_a_locked_stream_is_waited_for_in_another_default_isolation(stream, repeatable):
    writer = StreamWriter(stream, using=repeatable.alias)
    with held(stream) as own:
        future = writer.append_nowait("a")
        wait_until(lambda: waiting_for_lock("writer"), "it waits")
        own.execute("UPDATE pgstreams_stream SET metadata = '{\"a\": 1}' WHERE id = %s", [stream.pk])
        own.execute("COMMIT")
    assert future.result(30) == 0


# Rows of the dead ----------------------------------------------------------------------------------


def test_rows_that_nobody_has_used_for_a_day_are_removed_by_the_next_writer(stream, writer):
    for name, age in (("old", "25 hours"), ("older", "3 days"), ("new", "23 hours")):
        query(
            "INSERT INTO pgstreams_writer (id, used_at) VALUES (md5(%s)::uuid, now() - %s::interval)",
            name,
            age,
        )
    with connect() as own:
        own.execute("BEGIN")
        own.execute("SELECT FROM pgstreams_writer WHERE id = md5('older')::uuid FOR UPDATE")
        assert writer.append("a") == 0
        own.execute("ROLLBACK")
    known = {key: query("SELECT md5(%s)::uuid", key)[0][0] for key in ("old", "older", "new")}
    ids = {row[0] for row in writer_rows()}
    assert {key for key, value in known.items() if value in ids} == {"older", "new"}
    assert len(ids) == 3
    receivers.release()
    assert {row[0] for row in writer_rows()} == {known["older"], known["new"]}
