"""Serves rakaia's live view on hypercorn: `python -m benchmarks.peers_programs.rakaia_server PLAN`.

It says its `port`, as a JSON line.
"""

from __future__ import annotations

import asyncio
import json
import sys

from django.core.asgi import get_asgi_application
from hypercorn.asyncio import serve
from hypercorn.config import Config

from benchmarks.shared.talking import say

from .peer import set_up_django
from .redis_server import RETRY_SECONDS, free_port


async def main() -> None:
    config = Config()
    port = free_port()
    config.bind = [f"127.0.0.1:{port}"]
    serving = asyncio.create_task(serve(get_asgi_application(), config, mode="asgi"))
    while not await accepts(port):
        if serving.done():
            serving.result()
        await asyncio.sleep(RETRY_SECONDS)
    say({"port": port})
    await serving


async def accepts(port: int) -> bool:
    """Whether it accepts connections yet."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


if __name__ == "__main__":
    set_up_django(json.loads(sys.argv[1]))
    asyncio.run(main())
