"""Close codes on real servers, which do not send every code that there is."""

from __future__ import annotations

import threading

import pytest

from tests.servers import ANYBODY, DEADLINE_SECONDS, Socket, serving


@pytest.mark.parametrize("kind", ["daphne", "uvicorn"])
def test_a_socket_of_one_stream_is_closed_when_the_database_is_away(committed, kind):
    with serving(kind) as server:
        server.role.lock_out()
        with Socket(server.url("a/b"), ANYBODY) as visit:
            assert visit.frame()["code"] == "unavailable"
            assert visit.close_code() == 4500


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
