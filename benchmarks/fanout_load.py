"""What the programs of `fanout` agree on: which chunk is which, when it is due, how their server is set up.

Times are `CLOCK_MONOTONIC`, nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import gc
import json
from typing import Any, NamedTuple

CHUNK_BYTES = 100


class Schedule(NamedTuple):
    """`count` chunks of each of `streams` streams: one every `interval` from `start` on, streams spread."""

    start: int
    interval: int
    count: int
    streams: int

    def due(self, stream: int, nth: int) -> int:
        """When the nth chunk of a stream is due."""
        return self.start + nth * self.interval + stream * self.interval // self.streams

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.count * self.interval / 1e9


def spare_the_collector() -> None:
    """Set a server up as the README advises: Python's collector seldom looks at what lives long.

    Else it stops the server for 0.15 s every few seconds to go through what a thousand sockets hold.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def key_of(stream: int) -> str:
    """The key of a stream."""
    return f"fanout/{stream}"


def chunk_data(stream: int, offset: int) -> dict[str, Any]:
    """The chunk at an offset of a stream: no two are alike, and each has `CHUNK_BYTES` as JSON."""
    data = {"stream": stream, "offset": offset, "text": ""}
    return data | {"text": "x" * (CHUNK_BYTES - len(as_stored(data)))}


def as_stored(data: Any) -> str:
    """The JSON text that is stored for it."""
    return json.dumps(data, separators=(",", ":"))


def frame_of(stream: int, offset: int, position: int) -> bytes:
    """The frame that holds the chunks of a stream from an offset up to a position."""
    data = ",".join(as_stored(chunk_data(stream, place)) for place in range(offset, position))
    head = {"type": "chunks", "stream": key_of(stream), "offset": offset, "next": position}
    return f'{as_stored(head)[:-1]},"data":[{data}]}}'.encode()
