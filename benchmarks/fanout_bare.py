"""The bare ASGI app of `fanout`: it replays recorded frames to each socket, and does nothing else.

What the product needs beyond it is the product's cost. `FANOUT_RECORDING` names the file with the frames, a
line for each socket. `/?schedule=[…]` plays them: the nth frame of each socket when its nth chunk is due.
Wake-ups are gathered as the product's are, so that the bare app does not pay for more of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from benchmarks.fanout_load import Schedule, spare_the_collector

_TICK_NS = 10_000_000  # PGSTREAMS["FLUSH_INTERVAL_SECONDS"]

recordings = [json.loads(line) for line in Path(os.environ["FANOUT_RECORDING"]).read_text().splitlines()]
waiting: dict[int, tuple[int, asyncio.Future[None]]] = {}  # by socket: its stream, and what it waits for
playing: set[asyncio.Task[None]] = set()
spare_the_collector()


async def application(scope: Any, receive: Any, send: Any) -> None:
    """`/<socket>/<stream>` is a websocket; anything else plays."""
    if scope["type"] == "websocket":
        _, number, stream = scope["path"].split("/")
        await serve(int(number), int(stream), receive, send)
    elif scope["type"] == "http":
        (schedule,) = parse_qs(scope["query_string"].decode())["schedule"]
        task = asyncio.get_running_loop().create_task(play(Schedule(*json.loads(schedule))))
        playing.add(task)
        task.add_done_callback(playing.discard)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def serve(number: int, stream: int, receive: Any, send: Any) -> None:
    """One socket: a frame for each wake-up."""
    await receive()
    await send({"type": "websocket.accept"})
    sending = asyncio.get_running_loop().create_task(send_on(number, stream, send))
    try:
        while (await receive())["type"] != "websocket.disconnect":
            pass
    finally:
        sending.cancel()


async def send_on(number: int, stream: int, send: Any) -> None:
    loop = asyncio.get_running_loop()
    while True:
        for text in recordings[number]:
            future = loop.create_future()
            waiting[number] = stream, future
            await future
            await send({"type": "websocket.send", "text": text})


async def play(schedule: Schedule) -> None:
    """Wake each socket when its next frame is due, those of a tick together."""
    due = sorted(
        (schedule.due(stream, nth), number)
        for number, (stream, _) in waiting.items()
        for nth in range(schedule.count)
    )
    ready: list[int] = []
    at = now = 0
    while ready or at < len(due):
        next_due = now if ready else due[at][0]
        await asyncio.sleep(max(0, max(next_due, now + _TICK_NS) - time.monotonic_ns()) / 1e9)
        now = time.monotonic_ns()
        while at < len(due) and due[at][0] <= now:
            ready.append(due[at][1])
            at += 1
        ready = [number for number in ready if not wake(number)]


def wake(number: int) -> bool:
    """Wake a socket; False if it has not sent its last frame yet."""
    future = waiting[number][1]
    if future.done():
        return False
    future.set_result(None)
    return True
