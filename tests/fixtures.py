"""Fixtures of the tests that visit streams over a websocket."""

from __future__ import annotations

import gc
import logging

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import connections

from django_pgstreams.models import Stream


@pytest.fixture
def log(caplog):
    """A function for what was logged, from warnings on. A test that asks for it expects something."""
    return lambda: [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]


@pytest.fixture
def committed(django_db_setup, django_db_blocker):
    """A database to commit to, cheaper than `transactional_db`: only streams and users are removed after."""
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
