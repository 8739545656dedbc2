"""Close codes on real servers, which do not send every code that there is."""

from __future__ import annotations

import threading

import pytest
from django.contrib.auth.models import User
from django.db import connection

from django_pgstreams.models import Stream
from tests.servers import ANYBODY, DEADLINE_SECONDS, Socket, headers_of, serving


@pytest.mark.parametrize("kind", ["daphne", "uvicorn"])
def test_a_socket_of_one_stream_is_closed_when_the_database_is_away(committed, kind):
    with serving(kind) as server:
        server.role.lock_out()
        with Socket(server.url("a/b"), ANYBODY) as visit:
            assert visit.frame()["code"] == "unavailable"
            assert visit.close_code() == 4500


@pytest.mark.parametrize("kind", ["daphne", "uvicorn"])
def test_a_chunk_that_cannot_be_sent_is_final_and_says_where_to_go_on(committed, kind):
    owner = User.objects.create_user("owner")
    stream = Stream.objects.create(key="a/b", owner=owner, content_type="text/plain")
    stream.append_many(["zero", "one", "two"], close=True)
    with connection.cursor() as cursor:
        cursor.execute('UPDATE pgstreams_chunk SET payload = %s WHERE "offset" = 1', [b"\xff"])
    with serving(kind) as server:
        with Socket(server.url("a/b"), headers_of(owner)) as visit:
            error = visit.frames("error")[-1]
            assert (error["code"], error["next"]) == ("unreadable", 2)
            assert visit.close_code() == 4422
        with Socket(server.url("a/b", offset=error["next"]), headers_of(owner)) as visit:
            assert visit.frames("closed")[1]["data"] == ["two"]


def test_daphne_tells_its_clients_to_come_back_when_it_stops(committed):
    """Only while it has seen no handshake for a second: its end trips over what one leaves for so long."""
    with serving("daphne", PGSTREAMS={"HEARTBEAT_SECONDS": 1}) as server:
        with Socket(server.url(), ANYBODY) as visit:
            for _ in range(3):
                assert visit.websocket.recv(DEADLINE_SECONDS) == '{"type":"ping"}'
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            assert visit.close_code() == 4500
        stopping.join(DEADLINE_SECONDS)
        assert not server.trouble()
