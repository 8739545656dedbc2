"""The reader at a websocket: notes when the frame of each chunk arrives.

Arguments: the multi-stream URL, the session, and the keys as JSON. It says when all streams are live, and at
the end of the last one, for each stream, each chunk's offset, number and time (`CLOCK_MONOTONIC`, seconds).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from benchmarks.shared.talking import say


async def main(url: str, session: str, keys: list[str]) -> None:
    """Follow the streams to their ends."""
    headers = {"Cookie": f"sessionid={session}", "Origin": "http://127.0.0.1"}
    async with connect(url, additional_headers=headers, compression=None, proxy=None) as websocket:
        for key in keys:
            await websocket.send(json.dumps({"type": "subscribe", "stream": key, "offset": 0}))
        say({"received": await follow(websocket, keys)})


async def follow(websocket: ClientConnection, keys: list[str]) -> dict[str, list[tuple[int, int, float]]]:
    """What arrives until each stream has ended."""
    received: dict[str, list[tuple[int, int, float]]] = {key: [] for key in keys}
    not_live, open_streams = set(keys), set(keys)
    while open_streams:
        text = await websocket.recv()
        at = time.monotonic()
        frame: dict[str, Any] = json.loads(text)
        match frame["type"]:
            case "live" if frame["stream"] in not_live:
                not_live.remove(frame["stream"])
                if not not_live:
                    say({"live": True})
            case "chunks":
                await acknowledge(websocket, frame)
                received[frame["stream"]] += [
                    (offset, data["number"], at) for offset, data in enumerate(frame["data"], frame["offset"])
                ]
            case "closed":
                open_streams.remove(frame["stream"])
            case "error" | "gap" | "reset":
                sys.exit(f"Unexpected frame: {text!r}")
    return received


async def acknowledge(websocket: ClientConnection, frame: dict[str, Any]) -> None:
    """Have more sent."""
    ack = {"type": "ack", "stream": frame["stream"], "offset": frame["next"]}
    await websocket.send(json.dumps(ack))


if __name__ == "__main__":
    url, session, keys = sys.argv[1:]
    asyncio.run(main(url, session, json.loads(keys)))
