"""Fixtures of the tests that visit streams over a websocket."""

from __future__ import annotations

import gc
import logging

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import DEFAULT_DB_ALIAS, connection, connections
from django.test.utils import setup_databases, teardown_databases
from psycopg.conninfo import make_conninfo

from django_pgstreams.models import Stream

CONFIGURED_NAME = connection.settings_dict["NAME"]
"""The name of the database that is not for tests."""


@pytest.fixture
def log(caplog):
    """A function for what was logged, from warnings on. A test that asks for it expects something."""
    return lambda: [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]


@pytest.fixture
def database_url(django_db_setup, django_db_blocker):
    """The address of the tests' server, for programs that make databases of their own there."""
    with django_db_blocker.unblock():
        own = connection.get_connection_params()
    names = ("host", "port", "user", "password")
    return make_conninfo(dbname="postgres", **{name: own[name] for name in names if name in own})


@pytest.fixture(scope="session")
def test_database(django_db_setup, django_db_blocker, django_db_keepdb):
    """The test database, also in a run in which no test asks pytest-django for it: then it makes none."""
    if connection.settings_dict["NAME"] != CONFIGURED_NAME:
        yield
        return
    with django_db_blocker.unblock():
        made = setup_databases(
            verbosity=0, interactive=False, keepdb=django_db_keepdb, aliases={DEFAULT_DB_ALIAS}
        )
    yield
    if not django_db_keepdb:
        with django_db_blocker.unblock():
            teardown_databases(made, verbosity=0)


@pytest.fixture
def committed(test_database, django_db_blocker):
    """A database to commit to, cheaper than `transactional_db`: only streams and users are removed after."""
    assert connection.settings_dict["NAME"] != CONFIGURED_NAME
    with django_db_blocker.unblock():
        yield
        Stream.objects.all().delete()
        User.objects.all().delete()
        connections.close_all()


@pytest.fixture
async def visited(request, caplog, committed):
    """What every test with visits demands: nothing is wrong in the log, and no connection is left."""
    yield
    await sync_to_async(connections.close_all)()
    gc.collect()  # a task's exception that nobody has looked at is logged now
    if "log" not in request.fixturenames:
        records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
        assert [record.getMessage() for record in records if record.levelno >= logging.WARNING] == []


@pytest.fixture
async def owner(committed):
    return await User.objects.acreate(username="owner")


@pytest.fixture
async def stream(owner):
    return await Stream.objects.acreate(key="a/b", owner=owner)
