"""Real websockets to real servers: what the app costs there, and that it survives cuts and crowds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import pytest
from django.contrib.auth.models import User
from django.db import connection, connections, transaction
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from django_pgstreams import conf
from django_pgstreams.consumers import MAX_BAD_FRAMES
from django_pgstreams.models import Stream
from tests.cutting_proxy import CuttingProxy
from tests.servers import ANYBODY, DEADLINE_SECONDS, Socket, headers_of, serving, untroubled
from tests.waiting import wait_until

SERVERS = ("daphne", "uvicorn")


@pytest.fixture(scope="module")
def running(test_database, django_db_blocker):
    """A function for the server of a kind; each is started once."""
    with contextlib.ExitStack() as stack:
        started = {}

        def server_of(kind):
            if kind not in started:
                started[kind] = stack.enter_context(serving(kind, PGSTREAMS={"POLL_INTERVAL_SECONDS": 300}))
            return started[kind]

        with django_db_blocker.unblock():
            yield server_of
            stack.close()
            connections.close_all()


@pytest.fixture(params=SERVERS)
def server(request, running, committed):
    with untroubled(running(request.param)) as server:
        yield server


@pytest.fixture
def daphne(running, committed):
    with untroubled(running("daphne")) as server:
        yield server


@pytest.fixture
def owner(committed):
    return User.objects.create_user("owner")


@pytest.fixture
def headers(owner):
    return headers_of(owner)


@pytest.fixture
def stream(owner):
    return Stream.objects.create(key="a/b", owner=owner)


# The protocol over a wire ------------------------------------------------------------------------------

KEYS = [
    *(
        "chat/17",
        "流/数据",
        "émoji 😀/ü",
        "a b",
        "a%2Fb",
        "100%",
        "x?y=1#z",
        "a+b&c=d;e",
        '"quotes"',
        "back\\slash",
    ),
    *("ws/streams", "~user", "a:b@c", "\u202eright-to-left", "x" * 255),
]


@pytest.mark.parametrize("safe", ["/", ""])
def test_keys_of_any_script_fit_into_urls(server, owner, headers, safe):
    for key in KEYS:
        stream = Stream.objects.create(key=key, owner=owner)
        stream.append(key, close=True)
        with Socket(server.url(key, safe=safe), headers) as visit:
            frames = visit.frames("closed")
            assert {frame["stream"] for frame in frames} == {key}
            assert frames[1]["data"] == [key]
            assert visit.close_code() == 1000
        stream.delete()


@pytest.mark.parametrize(
    ("query", "values"),
    [({"offset": 3}, [3, 4]), ({"offset": "tail"}, []), ({"offset": -1}, [4]), ({"offset": 5}, [])],
)
def test_a_url_says_where_to_start(server, stream, headers, query, values):
    stream.append_many(range(5))
    with Socket(server.url("a/b", **query), headers) as visit:
        frames = visit.frames("live")
        assert [value for frame in frames[1:-1] for value in frame["data"]] == values


@pytest.mark.parametrize("query", [{"offset": "x"}, {"offset": ""}, {"offset": "1_0"}, {"offset": 2**63}])
def test_a_bad_url_is_closed_with_its_code(server, stream, headers, query):
    with Socket(server.url("a/b", **query), headers) as visit:
        assert visit.frame()["code"] == "bad_request"
        assert visit.close_code() == 4400


@pytest.mark.parametrize("key", ["a//b", "a\nb", "a\x00b", "..", " a"])
def test_a_bad_key_is_closed_with_its_code(server, headers, key):
    with Socket(server.url(key, safe=""), headers) as visit:
        assert visit.frame()["code"] == "bad_request"
        assert visit.close_code() == 4400


@pytest.mark.parametrize("query", ["", "?offset=1"])
def test_the_last_slash_may_be_missing(server, stream, headers, query):
    stream.append_many(["first", "second"], close=True)
    address = server.url("a/b").partition("?")[0].removesuffix("/") + query
    with Socket(address, headers) as visit:
        frames = visit.frames("closed")
        assert {frame["stream"] for frame in frames} == {"a/b"}
        assert frames[1]["data"] == (["second"] if query else ["first", "second"])
        assert visit.close_code() == 1000


def test_the_last_slash_may_be_missing_where_the_client_names_the_streams(server, stream, headers):
    stream.append("first", close=True)
    with Socket(server.url().removesuffix("/"), headers) as visit:
        visit.send("subscribe", "a/b")
        assert visit.frames("closed")[1]["data"] == ["first"]


@pytest.mark.parametrize("path", ["a/b//", "/", "/a/b"])
def test_more_slashes_than_one_are_part_of_a_bad_key(server, stream, headers, path):
    with Socket(server.url() + path, headers) as visit:
        assert visit.frame()["code"] == "bad_request"
        assert visit.close_code() == 4400


def test_the_forbidden_and_the_unknown_look_alike(server, stream):
    stream.append("secret")
    stranger = headers_of(User.objects.create_user("stranger"))
    inactive_user = User.objects.create_user("inactive", is_active=False)
    Stream.objects.create(key="inactive", owner=inactive_user)
    inactive = headers_of(inactive_user)
    told = set()
    for who, key in [
        *((who, key) for who in (ANYBODY, stranger, inactive) for key in ("a/b", "unknown")),
        (inactive, "inactive"),
    ]:
        with Socket(server.url(key), who) as visit:
            text = visit.text()
            told.add((text.replace(f'"{key}"', "KEY"), visit.close_code()))
    ((text, code),) = told
    assert json.loads(text.replace("KEY", "null"))["code"] == "forbidden"
    assert code == 4403


@pytest.mark.parametrize("end", ["close", "fail", "cancel", "delete"])
def test_every_end_reaches_the_socket_by_notification(server, stream, headers, end):
    with Socket(server.url("a/b"), headers) as visit:
        visit.frames("live")
        if end == "delete":
            stream.delete()
        else:
            with transaction.atomic():
                stream.append("last")
                {"close": stream.close, "fail": lambda: stream.fail("why"), "cancel": stream.cancel}[end]()
        frames = visit.frames("closed")
        assert [frame["data"] for frame in frames[:-1]] == ([] if end == "delete" else [["last"]])
        state = {"close": "completed", "fail": "failed", "cancel": "cancelled", "delete": "deleted"}[end]
        assert (frames[-1]["state"], frames[-1]["reason"]) == (state, "why" if end == "fail" else "")
        assert visit.close_code() == 1000


def test_a_reader_cancels_and_the_writer_learns_of_it(server, stream, headers):
    with Socket(server.url(), headers) as visit:
        visit.send("subscribe", "a/b")
        visit.frames("live")
        visit.send("cancel", "a/b")
        assert visit.frame()["state"] == "cancelled"
    stream.refresh_from_db()
    assert stream.state == "cancelled"


def test_who_cancels_and_leaves_at_once_has_cancelled(server, stream, headers):
    with Socket(server.url(), headers) as visit:
        visit.send("cancel", "a/b")
    wait_until(lambda: Stream.objects.get(key="a/b").state == "cancelled", "the cancellation is carried out")


def test_the_socket_survives_malformed_frames(server, stream, headers):
    stream.append("fine")
    with Socket(server.url(), headers) as visit:
        for malformed in (
            b"\x00\xff",
            "",
            "{",
            "[]",
            '{"type":"subscribe","stream":"\\ud800"}',
            "x" * 100_000,
            "[" * 60_000,
        ):
            visit.websocket.send(malformed)
            assert visit.frame()["type"] == "error"
        visit.send("subscribe", "a/b")
        assert visit.frames("live")[1]["data"] == ["fine"]


def test_a_client_that_sends_nothing_but_nonsense_is_answered_and_kept_for_so_long(daphne):
    """Daphne holds whatever its clients do not read; uvicorn waits for them."""
    answers = []
    with Socket(daphne.url(), ANYBODY) as visit, contextlib.suppress(ConnectionClosed):
        with contextlib.suppress(ConnectionClosed):
            for _ in range(2000):
                visit.send("subscribe", "😀" * 254 + "/")
        while True:
            answers.append(visit.text())
    assert visit.websocket.close_code == 4400
    assert len(answers) == MAX_BAD_FRAMES
    assert max(map(len, answers)) < 300


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [(["pgstreams.v1", "a-secret"], "pgstreams.v1"), (["a-secret"], None), (None, None)],
)
def test_only_the_protocol_is_echoed(server, headers, offered, chosen):
    with Socket(server.url(), headers, subprotocols=offered) as visit:
        assert visit.websocket.subprotocol == chosen


# Cuts -----------------------------------------------------------------------------------------------------


CUTS = {
    "before the frame": b'"offset":56,"next":57,"data":["value 56 \xf0\x9f\x98\x80"]}',
    "half-way through the frame": b'"offset":57,"next":58,"data":["value 57 \xf0\x9f',
    "after the frame": b'"offset":57,"next":58,"data":["value 57 \xf0\x9f\x98\x80"]}',
}


@pytest.mark.parametrize("where", CUTS)
def test_a_cut_socket_resumes_with_the_next_chunk(server, stream, headers, where):
    values = [f"value {number} 😀" for number in range(60)]
    proxy = CuttingProxy(server.port, CUTS[where])
    received = []
    with Socket(server.url("a/b", port=proxy.port), headers) as visit:
        visit.frames("live")
        for value in values[:58]:
            stream.append(value)
            try:
                received.append(visit.frame())
            except ConnectionClosed:
                break
    proxy.close()
    position = 58 if where == "after the frame" else 57
    assert received[-1]["next"] == position
    stream.append_many(values[stream.next_offset :])
    wait_until(lambda: server.look()["followers"] == 0, "the server notices the cut")
    with Socket(server.url("a/b", offset=position), headers) as visit:
        frames = visit.frames("live")[1:-1]
        assert frames[0]["offset"] == position
        stream.append("live again", close=True)
        frames += visit.frames("closed")[:-1]
    assert [value for frame in received + frames for value in frame["data"]] == [*values, "live again"]


def test_two_tabs_each_get_every_chunk_once(server, stream, headers):
    stream.append_many(range(10))
    with Socket(server.url("a/b"), headers) as one, Socket(server.url("a/b"), headers) as two:
        one.frames("live")
        for number in range(10, 20):
            stream.append(number)
        stream.close()
        two.frames("subscribed")
        for visit, first in ((one, 10), (two, 0)):
            frames = [frame for frame in visit.frames("closed") if frame["type"] == "chunks"]
            assert [value for frame in frames for value in frame["data"]] == list(range(first, 20))


REQUEST = "GET /ws/streams/a/b/ HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
HANDSHAKE = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n{}\r\n"


@contextlib.contextmanager
def locked(table):
    """Every look at a table waits inside."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield


@pytest.mark.parametrize("how", ["vanish", "leave"])
def test_clients_go_in_any_state_and_leave_nothing(server, stream, headers, how):
    def go(visit):
        if how == "vanish":
            visit.vanish()
        else:
            threading.Thread(target=visit.leave, daemon=True).start()

    stream.append_many(["x" * 10_000] * 500)
    # In the middle of the handshake, and right after it.
    cookie = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    for sent in (REQUEST, REQUEST + HANDSHAKE.format(cookie)):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(sent.encode())
    # While the stream is looked up.
    visits = [Socket(server.url(), headers) for _ in range(3)]
    with locked("pgstreams_stream"):
        for visit in visits:
            visit.send("subscribe", "a/b")
        wait_until(lambda: "pgstreams-subscription" in server.look()["tasks"], "the look-ups begin")
        for visit in visits:
            go(visit)
        server.wait_empty()
    # While a page is read.
    visits = [Socket(server.url("a/b"), headers) for _ in range(3)]
    for visit in visits:
        visit.frames("live")
        visit.send("unsubscribe", "a/b")
    wait_until(lambda: server.look()["followers"] == 0, "the subscriptions end")
    with locked("pgstreams_chunk"):
        for visit in visits:
            visit.send("subscribe", "a/b")
            assert visit.frame()["type"] == "subscribed"
        for visit in visits:
            go(visit)
        wait_until(lambda: server.look()["followers"] == 0, "the followers are forgotten")
    # In the middle of a replay that is not read, live, and while chunks arrive.
    visits = [Socket(server.url("a/b"), headers) for _ in range(6)]
    for visit in visits[3:]:
        visit.frames("live")
    for visit in visits:
        go(visit)
        stream.append("into the void")
    stream.close()


def test_a_database_that_goes_and_comes_costs_no_chunk(daphne, stream, headers):
    with Socket(daphne.url(), headers) as visit:
        visit.send("subscribe", "a/b")
        visit.frames("live")
        daphne.role.lock_out()
        try:
            stream.append("while it was away")
            visit.send("subscribe", "other")
            error = visit.frame()
            assert (error["stream"], error["code"]) == ("other", "unavailable")
        finally:
            daphne.role.let_in()
        assert visit.frame()["data"] == ["while it was away"]
        visit.send("subscribe", "other")
        assert visit.frame()["code"] == "forbidden"
        visit.send("cancel", "a/b")
        assert visit.frame()["state"] == "cancelled"


# Crowds ---------------------------------------------------------------------------------------------------


class Crowd:
    """Many websockets; they live while one of the methods runs, and wait in between."""

    def __init__(self):
        self._runner = asyncio.Runner()
        self._websockets = []

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._runner.run(self._leave())
        self._runner.close()

    def come(self, urls, headers):
        """Open a websocket to each URL, and wait until it is live."""
        self._runner.run(self._come(urls, headers))

    async def _come(self, urls, headers):
        turns = asyncio.Semaphore(20)

        async def open_one(url):
            async with turns:
                websocket = await connect(
                    url,
                    additional_headers=headers,
                    compression=None,
                    proxy=None,
                    open_timeout=DEADLINE_SECONDS,
                    ping_interval=None,
                )
                self._websockets.append((url, websocket))
                while (await self._frame(websocket))["type"] != "live":
                    pass

        await asyncio.gather(*map(open_one, urls))

    async def _frame(self, websocket):
        return json.loads(await asyncio.wait_for(websocket.recv(), DEADLINE_SECONDS))

    def frames(self, url):
        """The next frame of each websocket to a URL."""
        return self._runner.run(self._frames(url))

    async def _frames(self, url):
        websockets = [websocket for known, websocket in self._websockets if known == url]
        return await asyncio.gather(*map(self._frame, websockets))

    async def _leave(self):
        await asyncio.gather(*(websocket.close() for _, websocket in self._websockets))


def replace_listener(server):
    """End the listening session of a server, and wait for another."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE usename = %s AND application_name = 'pgstreams-listener'",
            [server.role.name],
        )
        [ended] = cursor.fetchall()
    assert ended == (True,)
    wait_until(lambda: "pgstreams-listener" not in server.role.sessions(), "its listener is gone")
    wait_until(lambda: "pgstreams-listener" in server.role.sessions(), "it listens again")


@pytest.mark.parametrize("conn_max_age", [0, pytest.param(60, marks=pytest.mark.once)])
def test_a_crowd_costs_one_listener_and_an_append_one_read(owner, headers, conn_max_age):
    streams = [Stream.objects.create(key=f"crowd/{number}", owner=owner) for number in range(50)]
    for stream in streams:
        stream.append("first")
    # 300 sockets over 50 streams, 200 of them on one.
    counts = [200, *(3 if number <= 2 else 2 for number in range(1, 50))]
    assert sum(counts) == 300
    rarely = {"POLL_INTERVAL_SECONDS": 300, "HEARTBEAT_SECONDS": 300}
    given = {"PGSTREAMS": rarely, "DATABASE": {"CONN_MAX_AGE": conn_max_age}}
    with serving("daphne", **given) as daphne, Crowd() as crowd:
        urls = [daphne.url(stream.key, offset=1) for stream in streams]

        def check_sessions():
            names = daphne.role.sessions()
            assert names.count("pgstreams-listener") == 1
            assert names.count("pgstreams-reader") <= conf.get().READ_POOL_SIZE
            # Django's own: of the one thread that looks streams up.
            assert names.count("") <= bool(conn_max_age), names

        crowd.come([url for url, count in zip(urls, counts, strict=True) for _ in range(count)], headers)
        wait_until(lambda: daphne.look()["followers"] == 300, "all sockets are followers")
        check_sessions()

        before = daphne.role.page_queries()
        assert before > 0
        streams[0].append("second")
        frames = crowd.frames(urls[0])
        assert [(frame["offset"], frame["data"]) for frame in frames] == [(1, ["second"])] * 200
        assert 1 <= daphne.role.page_queries() - before <= 2

        for stream in streams[1:]:
            stream.append("second")
        for url, count in zip(urls[1:], counts[1:], strict=True):
            frames = crowd.frames(url)
            assert [(frame["offset"], frame["data"]) for frame in frames] == [(1, ["second"])] * count
        check_sessions()
        if conn_max_age:
            for _ in range(5):
                replace_listener(daphne)
            check_sessions()
            streams[0].append("third")
            assert [frame["data"] for frame in crowd.frames(urls[0])] == [["third"]] * 200


def test_a_burst_arrives_whole_while_others_come_and_go(daphne, stream, headers):
    over = threading.Event()

    def come_and_go():
        while not over.is_set():
            with Socket(daphne.url("a/b"), headers) as visit:
                visit.frame()

    others = [threading.Thread(target=come_and_go) for _ in range(20)]
    with Socket(daphne.url("a/b"), headers) as visit:
        visit.frames("live")
        for other in others:
            other.start()
        try:
            with transaction.atomic():
                for number in range(1000):
                    stream.append(number)
            values, position = [], 0
            while len(values) < 1000:
                frame = visit.frame()
                assert frame["offset"] == position
                values += frame["data"]
                position = frame["next"]
            assert values == list(range(1000))
        finally:
            over.set()
            for other in others:
                other.join(DEADLINE_SECONDS)
    assert not any(other.is_alive() for other in others)
