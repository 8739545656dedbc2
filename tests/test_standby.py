"""A listener that has got to a standby, of real servers: it waits, without a noise, for the promotion."""

from __future__ import annotations

import time

import psutil
import psycopg
import pytest

from benchmarks.shared.cluster import cluster
from django_pgstreams import background, listener
from django_pgstreams.listener import Listener
from tests.aliases import alias, settings_of
from tests.waiting import wait_until

pytestmark = pytest.mark.once

STEP_SECONDS = 2.0
"""The longest wait between two tries, shorter than the product's own."""
WATCHED_SECONDS = 5.0


@pytest.fixture
def servers():
    with cluster(synchronous=False) as made:
        yield made


@pytest.fixture
def standby(servers):
    """A Django alias that leads to the standby, whatever becomes of it."""
    with alias("standby", **settings_of(servers.standby.address)) as name:
        yield name


@pytest.fixture
def listening(standby, monkeypatch):
    monkeypatch.setattr(listener, "_MAX_BACKOFF_SECONDS", STEP_SECONDS)
    made = Listener(standby, channel="pgstreams", health_check_seconds=15.0, idle_seconds=30.0)
    yield made
    made._callbacks = ()
    background.submit(made.close()).result(20)


def test_on_a_standby_it_tries_now_and_then_and_listens_within_a_step_of_the_promotion(
    servers, listening, caplog, monkeypatch
):
    tries = []
    connect = listener.database.aconnect

    async def counted(using, role):
        tries.append(role)
        return await connect(using, role)

    monkeypatch.setattr(listener.database, "aconnect", counted)
    heard = []
    listening.attach(heard.append)
    wait_until(lambda: listening._failures >= 3, "LISTEN is refused again and again")
    before, busy = len(tries), psutil.Process().cpu_times().user
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > WATCHED_SECONDS, "a while")
    # No wait is shorter than half a step, once they have grown; the first ones take about one more together.
    assert len(tries) - before <= WATCHED_SECONDS / (STEP_SECONDS / 2) + 6
    assert psutil.Process().cpu_times().user - busy < WATCHED_SECONDS / 4
    [record] = caplog.records
    assert "cannot execute LISTEN during recovery" in record.getMessage()
    assert not heard

    node = servers.standby
    servers.promote()
    promoted_at = time.monotonic()
    wait_until(lambda: heard, "it listens")
    assert time.monotonic() - promoted_at < STEP_SECONDS + 5
    with psycopg.connect(node.address, autocommit=True) as own:
        assert own.execute("SELECT pg_is_in_recovery()").fetchone() == (False,)
        own.execute("NOTIFY pgstreams, '7:8'")
    wait_until(lambda: any(batch.wake_ups for batch in heard), "it is woken")
    wait_until(lambda: listening.is_proved, "it is proved")
