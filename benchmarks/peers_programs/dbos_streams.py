"""dbos: a workflow per writer, whose step writes to its streams; `DBOSClient.read_stream` reads elsewhere."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dbos import DBOS, DBOSClient, SetWorkflowID
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL

from .received import Received
from .work import STREAMS, Work, key

POOL = 20  # the library's default


def prepare(plan: dict[str, Any]) -> None:
    """DBOS makes its tables when it is launched."""
    launch(plan)
    DBOS.destroy()


def address(plan: dict[str, Any]) -> str:
    """The database as a URL, which dbos wants."""
    parts = conninfo_to_dict(plan["database"])
    url = URL.create(
        "postgresql",
        username=parts.pop("user", None),
        password=parts.pop("password", None),
        database=parts.pop("dbname"),
        query=parts,
    )
    return url.render_as_string(hide_password=False)


def launch(plan: dict[str, Any]) -> None:
    """Launch DBOS with a thread and a connection for each writer."""
    DBOS(
        config={
            "name": "benchmark",
            "system_database_url": address(plan),
            "sys_db_pool_size": max(POOL, plan["writers"] + 4),
            "max_executor_threads": 2 * plan["writers"] + 4,
            "log_level": "ERROR",
        }
    )
    DBOS.launch()


def workflow_id(writer: int) -> str:
    """The workflow that owns a writer's streams."""
    return f"writer-{writer}"


def write(work: Work, plan: dict[str, Any]) -> None:
    """A value that a step writes costs one row; one that the workflow itself writes, a checkpoint more."""
    begin, go = threading.Event(), threading.Event()
    warm = threading.Barrier(len(work.mine) + 1)

    @DBOS.step()
    def write_all(writer: int) -> None:
        begin.wait()
        for stream, chunks in work.first(writer):
            DBOS.write_stream(key(stream), *chunks)
        warm.wait()
        go.wait()
        for stream, chunks in work.turns(writer):
            DBOS.write_stream(key(stream), *chunks)

    @DBOS.workflow()
    def answer(writer: int) -> None:
        write_all(writer)

    launch(plan)
    handles = []
    for writer in work.mine:
        with SetWorkflowID(workflow_id(writer)):
            handles.append(DBOS.start_workflow(answer, writer))
    work.wait_for_readers()
    begin.set()
    warm.wait()
    work.wait_for_go()
    go.set()
    for handle in handles:
        handle.get_result()
    work.done()


def read(received: Received, plan: dict[str, Any]) -> None:
    """A thread per stream, woken by notifications."""
    client = DBOSClient(
        system_database_url=address(plan), system_database_pool_size=POOL, use_listen_notify=True
    )

    def follow(stream: int) -> None:
        for data in client.read_stream(workflow_id(stream % plan["writers"]), key(stream)):
            received.take(data)

    received.following.set()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(follow, range(STREAMS)))
