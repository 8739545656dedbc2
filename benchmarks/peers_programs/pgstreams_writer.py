"""This project, through the group-commit writer: `await writer.aappend()`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from django_pgstreams.writer import StreamWriter

from .pgstreams_orm import all_streams, prepare, read
from .work import Work, run_tasks

__all__ = ["prepare", "read", "write"]


def write(work: Work, plan: dict[str, Any]) -> None:
    """The tasks share the process's one writer thread and its connection."""
    streams = all_streams()

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            writers = {
                stream: await stack.enter_async_context(StreamWriter(streams[stream]))
                for writer in work.mine
                for stream in work.streams(writer)
            }

            async def append(stream: int, chunks: list[dict[str, Any]]) -> None:
                if len(chunks) == 1:
                    await writers[stream].aappend(chunks[0])
                else:
                    await asyncio.gather(*map(writers[stream].aappend, chunks))

            await run_tasks(work, append)

    asyncio.run(run())
