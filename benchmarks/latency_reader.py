"""The reader of a benchmark: a websocket that notes when each chunk arrives.

Arguments: the one-stream URL and the session. It prints a JSON line once it is live, and one at the end with
each chunk's offset, number, and the time (`CLOCK_MONOTONIC`, seconds) when its frame was there.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from websockets.asyncio.client import connect


async def main(url: str, session: str) -> None:
    received = []
    headers = {"Cookie": f"sessionid={session}", "Origin": "http://127.0.0.1"}
    async with connect(url, additional_headers=headers, compression=None, proxy=None) as websocket:
        async for text in websocket:
            at = time.monotonic()
            frame = json.loads(text)
            match frame["type"]:
                case "live":
                    print(json.dumps({"live": True}), flush=True)
                case "chunks":
                    received += [
                        (offset, data["number"], at)
                        for offset, data in enumerate(frame["data"], start=frame["offset"])
                    ]
                case "error" | "gap" | "reset":
                    sys.exit(f"Unexpected frame: {text}")
    print(json.dumps({"received": received}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
