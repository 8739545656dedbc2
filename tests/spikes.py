"""A writer whose rate jumps tenfold: `python -m tests.spikes orm|writer PER_SECOND SECONDS STREAM_ID…`.

Prints "ready"; once it reads a line, appends at the rate for a second, tenfold for so many seconds, and at
the rate for a second again. Prints how much its memory has grown (KiB), and how much of each stream was
acknowledged.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from collections.abc import Callable

import django

from tests.writers import say, stream_by_id

django.setup()

from django_pgstreams.exceptions import WriterFull  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402
from django_pgstreams.writer import StreamWriter  # noqa: E402

CALM_SECONDS = 1.0
TEXT = "x" * 80


def paced(per_second: float, seconds: float, act: Callable[[int], None]) -> None:
    """Act so often, numbered; one that is late goes on without a pause, and never for longer."""
    began = time.monotonic()
    number = 0
    while (elapsed := time.monotonic() - began) < seconds:
        if number <= elapsed * per_second:
            act(number)
            number += 1
        else:
            time.sleep(number / per_second - elapsed)


def spike(per_second: float, seconds: float, act: Callable[[int], None]) -> None:
    paced(per_second, CALM_SECONDS, act)
    paced(10 * per_second, seconds, act)
    paced(per_second, CALM_SECONDS, act)


class Acknowledged:
    """How many chunks of each stream are acknowledged; counts from any thread."""

    def __init__(self, streams: list[Stream]) -> None:
        self.counts = {stream.pk: 0 for stream in streams}
        self._lock = threading.Lock()

    def add(self, stream: Stream) -> None:
        with self._lock:
            self.counts[stream.pk] += 1


def by_orm(streams: list[Stream], acknowledged: Acknowledged, per_second: float, seconds: float) -> None:
    def append(number: int) -> None:
        stream = streams[number % len(streams)]
        stream.append({"number": number, "text": TEXT})
        acknowledged.add(stream)

    spike(per_second, seconds, append)


def by_writer(streams: list[Stream], acknowledged: Acknowledged, per_second: float, seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(StreamWriter(stream)) for stream in streams]

        def append(number: int) -> None:
            writer = writers[number % len(writers)]
            try:
                future = writer.append_nowait({"number": number, "text": TEXT})
            except WriterFull:
                writer.append({"number": number, "text": TEXT})
                acknowledged.add(writer.stream)
            else:
                future.add_done_callback(lambda done: done.exception() or acknowledged.add(writer.stream))

        spike(per_second, seconds, append)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(kind: str, per_second: str, seconds: str, *ids: str) -> None:
    streams = [stream_by_id(int(number)) for number in ids]
    acknowledged = Acknowledged(streams)
    say("ready")
    sys.stdin.readline()
    before = peak_kib()
    {"orm": by_orm, "writer": by_writer}[kind](streams, acknowledged, float(per_second), float(seconds))
    say({"grown_kib": peak_kib() - before, "counts": acknowledged.counts})


if __name__ == "__main__":
    main(*sys.argv[1:])
