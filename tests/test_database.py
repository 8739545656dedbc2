from __future__ import annotations

import asyncio
import os
import secrets
import time
import warnings

import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections
from psycopg.sql import SQL, Identifier

from django_pgstreams import database
from tests.following import connect, in_thread, query, sessions, terminate, until
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("live")


def test_a_connection_has_its_role_as_its_name_and_is_in_autocommit():
    made = database.connect("default", "reader")
    assert made.autocommit
    assert made.info.parameter_status("application_name") == "pgstreams-reader"
    assert made.info.dbname == connection.settings_dict["NAME"]
    assert sessions("reader", "idle") == [made.info.backend_pid]
    made.close()


def test_the_time_between_tries_grows_to_a_cap_and_no_number_of_failures_ends_it():
    assert all(0.05 <= database.backoff_seconds(1) <= 0.1 for _ in range(100))
    assert all(2.5 <= database.backoff_seconds(failures) <= 5 for failures in (7, 10, 2_000, 10**6))
    assert all(5 <= database.backoff_seconds(2_000, 10) <= 10 for _ in range(100))
    assert len({database.backoff_seconds(9) for _ in range(10)}) > 1


def test_a_dead_peer_is_noticed_and_nothing_is_prepared():
    given = database.parameters("default", "reader")
    assert given["tcp_user_timeout"] == 15_000
    assert (given["keepalives"], given["keepalives_idle"], given["connect_timeout"]) == (1, 10, 5)
    assert given["prepare_threshold"] is None
    assert given["autocommit"] is True


def test_the_options_of_the_alias_win_but_for_the_name(monkeypatch):
    options = {"connect_timeout": 3, "application_name": "site", "prepare_threshold": 5}
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", options)
    given = database.parameters("default", "reader")
    assert (given["connect_timeout"], given["prepare_threshold"]) == (3, 5)
    assert given["application_name"] == "pgstreams-reader"


def test_queries_run_in_the_role_that_the_alias_assumes(monkeypatch):
    role = f'reader of "streams" {secrets.token_hex(4)}'
    with connection.cursor() as cursor:
        cursor.execute(SQL("CREATE ROLE {}").format(Identifier(role)))
    try:
        monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {"assume_role": role})
        made = database.connect("default", "reader")
        assert made.execute("SELECT current_user").fetchone() == (role,)
        made.close()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(SQL("DROP ROLE {}").format(Identifier(role)))


def test_another_kind_of_database_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(
        connections.settings,
        "lite",
        {**connections.settings["default"], "ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    )
    with pytest.raises(ImproperlyConfigured, match="'lite' is sqlite"):
        database.parameters("lite", "reader")
    connections["lite"].close()
    del connections["lite"]


# Blocking statements -------------------------------------------------------------------------------


@pytest.fixture
def blocking():
    made = database.connect("default", "notifier")
    yield made
    made.close()


def test_a_blocking_statement_returns_its_rows_as_text(blocking):
    rows = database.execute(
        blocking, "SELECT $1::int + n, $2::text, NULL FROM generate_series(1, 2) AS n", ["4", "ö"],
        timeout_seconds=10,
    )  # fmt: skip
    assert rows == [["5", "ö", None], ["6", "ö", None]]
    assert database.execute(blocking, "SET work_mem = '4MB'", [], timeout_seconds=10) == []


def test_a_blocking_statement_may_be_large_both_ways(blocking):
    text = "x" * 20_000_000
    rows = database.execute(blocking, "SELECT $1::text", [text], timeout_seconds=60)
    assert rows == [[text]]


def test_a_blocking_statement_that_fails_raises_what_the_server_says(blocking):
    with pytest.raises(psycopg.Error, match="division by zero"):
        database.execute(blocking, "SELECT 1 / $1::int", ["0"], timeout_seconds=10)


def test_a_blocking_statement_on_a_session_that_was_ended_raises(blocking):
    query("SELECT pg_terminate_backend(%s)", blocking.info.backend_pid)
    with pytest.raises(psycopg.OperationalError):
        database.execute(blocking, "SELECT 1", [], timeout_seconds=10)


def test_a_blocking_statement_ends_at_its_deadline(blocking):
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        database.execute(blocking, "SELECT pg_sleep($1::float)", ["20"], timeout_seconds=0.3)
    assert 0.3 <= time.monotonic() - began < 10
    query("SELECT pg_terminate_backend(%s)", blocking.info.backend_pid)


def test_a_blocking_statement_that_cannot_even_be_sent_ends_at_its_deadline(proxy):
    made = database.connect(proxy.alias, "notifier")
    proxy.hold()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        database.execute(made, "SELECT $1::text", ["x" * 50_000_000], timeout_seconds=1)
    assert time.monotonic() - began < 10
    made.close()


def test_a_blocking_connection_keeps_nothing_of_what_its_pooled_session_hears(blocking):
    database.execute(blocking, "LISTEN pgstreams", [], timeout_seconds=10)
    query("SELECT pg_notify('pgstreams', '1:1')")
    database.execute(blocking, "SELECT 1", [], timeout_seconds=10)
    assert blocking.pgconn.notifies() is None


# Statements in an event loop -----------------------------------------------------------------------


async def test_within_returns_what_the_work_returns_and_raises_what_it_raises(alive):
    made = await database.aconnect("default", "reader")
    cursor = await database.within(10, made, made.execute("SELECT 4"))
    assert await cursor.fetchall() == [(4,)]
    with pytest.raises(psycopg.errors.DivisionByZero):
        await database.within(10, made, made.execute("SELECT 1 / 0"))
    await made.close()


async def test_past_its_deadline_a_statement_is_cancelled_at_the_server(alive):
    made = await database.aconnect("default", "reader")
    with pytest.raises(TimeoutError):
        await database.within(0.2, made, made.execute("SELECT pg_sleep(60)"))
    await until(lambda: not sessions("reader", "active"), "the server has stopped working on it")
    await made.close()


async def test_a_caller_that_is_cancelled_cancels_its_statement_at_the_server(alive):
    made = await database.aconnect("default", "reader")
    task = asyncio.create_task(database.within(60, made, made.execute("SELECT pg_sleep(60)")))
    await until(lambda: sessions("reader", "active"), "the server works on it")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not sessions("reader", "active"), "the server has stopped working on it")
    await made.close()


async def test_a_peer_that_is_gone_without_a_word_costs_no_more_than_the_deadline(alive, proxy, caplog):
    made = await database.aconnect(proxy.alias, "reader")
    proxy.strand(new_ones=True)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await database.within(0.3, made, made.execute("SELECT 1"))
    assert time.monotonic() - began < 2.5  # psycopg alone waits 5 s more for an answer to its cancelling
    assert caplog.records == []
    await made.close()


async def test_a_caller_that_is_cancelled_does_not_wait_long_for_a_peer_that_is_gone(
    alive, proxy, monkeypatch
):
    monkeypatch.setattr(database, "_CANCEL_SECONDS", 0.5)
    made = await database.aconnect(proxy.alias, "reader")
    proxy.strand(new_ones=True)
    task = asyncio.create_task(database.within(60, made, made.execute("SELECT 1")))
    await asyncio.sleep(0)
    began = time.monotonic()
    task.cancel()
    with pytest.raises((asyncio.CancelledError, psycopg.OperationalError)):
        await task
    assert time.monotonic() - began < 15
    await made.close()


# The pool ------------------------------------------------------------------------------------------


def pool(size=2, using="default"):
    return database.ReadPool(using, "reader", size=size, timeout_seconds=10)


async def test_the_pool_opens_no_more_than_its_size_and_serves_in_turn(alive):
    reading = pool()
    served = []

    async def fetch(number):
        await reading.fetch("SELECT pg_sleep(0.02)", {})
        served.append(number)

    await asyncio.gather(*(fetch(number) for number in range(20)))
    assert len(sessions("reader")) == 2
    assert all(abs(number - place) <= 2 for place, number in enumerate(served))
    await reading.close()
    await until(lambda: not sessions("reader"), "all are closed")


async def test_a_connection_keeps_nothing_of_what_its_pooled_session_hears(alive):
    reading = pool(1)
    async with reading._connection() as made:
        await made.execute("LISTEN pgstreams")
        await in_thread(query)("SELECT pg_notify('pgstreams', '1:1')")
    assert await reading.fetch("SELECT 1", {}) == [(1,)]
    with warnings.catch_warnings(action="ignore"):  # of the handler that is there
        assert [note async for note in made.notifies(timeout=0.1)] == []
    await reading.close()


async def test_a_connection_that_failed_does_not_come_back(alive):
    reading = pool(1)
    with pytest.raises(psycopg.errors.DivisionByZero):
        await reading.fetch("SELECT 1 / 0", {})
    await until(lambda: not sessions("reader"), "it is closed")
    assert await reading.fetch("SELECT 2", {}) == [(2,)]
    await reading.close()


async def test_what_broke_one_connection_costs_no_second_reader_its_time(alive):
    reading = pool(3)
    await asyncio.gather(*(reading.fetch("SELECT pg_sleep(0.1)", {}) for _ in range(3)))
    assert len(sessions("reader")) == 3
    terminate("reader")
    with pytest.raises(psycopg.OperationalError):
        await reading.fetch("SELECT 1", {})
    assert await reading.fetch("SELECT 2", {}) == [(2,)]
    await reading.close()


async def test_a_reader_that_is_cancelled_gives_its_turn_back(alive):
    reading = pool(1)
    for _ in range(3):
        task = asyncio.create_task(reading.fetch("SELECT pg_sleep(60)", {}))
        await until(lambda: sessions("reader", "active"), "the server works on it")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await reading.fetch("SELECT 2", {}) == [(2,)]
    await reading.close()


async def test_only_what_has_been_idle_for_so_long_is_closed(alive):
    reading = pool(2)
    await asyncio.gather(*(reading.fetch("SELECT pg_sleep(0.1)", {}) for _ in range(2)))
    await reading.close_idle(60)
    assert len(sessions("reader")) == 2
    idle_since = time.monotonic()
    await until(lambda: time.monotonic() - idle_since > 0.3, "a while")
    await reading.fetch("SELECT 1", {})  # the one that was used last is used again
    await reading.close_idle(0.3)
    await until(lambda: len(sessions("reader")) == 1, "the other is closed")
    await reading.close()


# Forks ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_closes_an_inherited_connection_leaves_the_parent_its_session():
    blocking = database.connect("default", "notifier")
    looping = asyncio.run(database.aconnect("default", "reader"))
    child = os.fork()
    if not child:
        blocking.close()
        with pytest.raises(StopIteration):
            looping.close().send(None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert blocking.execute("SELECT 1").fetchone() == (1,)
    assert sessions("reader") == [looping.info.backend_pid]
    blocking.close()
    looping.pgconn.finish()
    wait_until(lambda: not sessions("reader"), "the parent's own close ends it")
    with connect() as own:
        assert own.execute("SELECT 1").fetchone() == (1,)
