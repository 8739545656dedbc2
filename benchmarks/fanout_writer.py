"""The writer of `fanout`: one process that appends to all streams as a schedule says.

It talks JSON lines: first, what a viewer needs to come in; then, for each schedule that it is told, how many
chunks it appended, every one acknowledged.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.test import Client  # noqa: E402

from benchmarks.fanout_load import Schedule, chunk_data, key_of, spare_the_collector  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402
from django_pgstreams.writer import StreamWriter  # noqa: E402

_SMALLEST_SLEEP_SECONDS = 0.001


def main(streams: int) -> None:
    owner = User.objects.create_user("viewer")
    browser = Client()
    browser.force_login(owner)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(StreamWriter(Stream.objects.create(key=key_of(number), owner=owner)))
            for number in range(streams)
        ]
        tails = [0] * streams
        spare_the_collector()  # it would stop the writer to look at every future of a phase
        say(session=browser.cookies["sessionid"].value)
        for line in sys.stdin:
            say(**append(Schedule(*json.loads(line)), writers, tails))


def append(schedule: Schedule, writers: list[StreamWriter], tails: list[int]) -> dict[str, float]:
    """Append each chunk when it is due; how many, all acknowledged, and how busy this process was."""
    began = time.process_time()
    futures = []
    for stream in due_streams(schedule):
        futures.append((tails[stream], writers[stream].append_nowait(chunk_data(stream, tails[stream]))))
        tails[stream] += 1
    for offset, future in futures:
        if future.result() != offset:
            sys.exit(f"A chunk got offset {future.result()} instead of {offset}.")
    ended = time.monotonic_ns()
    return {
        "chunks": len(futures),
        "busy": (time.process_time() - began) * 1e9 / (ended - schedule.start),
    }


def due_streams(schedule: Schedule) -> Iterator[int]:
    """The stream of each chunk, when it is due."""
    for nth in range(schedule.count):
        for stream in range(schedule.streams):
            ahead = (schedule.due(stream, nth) - time.monotonic_ns()) / 1e9
            if ahead > 0:
                time.sleep(max(ahead, _SMALLEST_SLEEP_SECONDS))
            yield stream


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
