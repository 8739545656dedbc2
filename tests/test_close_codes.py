"""Close codes on real servers, which do not send every code that there is."""

from __future__ import annotations

import pytest

from tests.servers import ANYBODY, Socket, serving


@pytest.mark.parametrize("kind", ["daphne", "uvicorn"])
def test_a_socket_of_one_stream_is_closed_when_the_database_is_away(committed, kind):
    with serving(kind) as server:
        server.role.lock_out()
        with Socket(server.url("a/b"), ANYBODY) as visit:
            assert visit.frame()["code"] == "unavailable"
            assert visit.close_code() == 4500
