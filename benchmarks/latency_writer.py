"""The writer: appends to many streams at a steady rate and notes when each append is acknowledged.

A line asks for a case: `name`, `rate` (chunks a second), `seconds`, `with_writer` (through `StreamWriter`s;
else by `stream.append()`). It says the streams' keys and their owner's session. After another line, when the
readers are there, it appends, closes the streams, and says for each stream each append's offset, number and
time (`CLOCK_MONOTONIC`, seconds). Each stream's first chunk, which shows a reader that it follows, is not
among them.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import Client  # noqa: E402

from benchmarks.shared.talking import hear, say, settle  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402
from django_pgstreams.writer import StreamWriter  # noqa: E402

STREAMS = 50
THREADS = 8
"""That append: as many as a web server has."""
TEXT = "About as many words as a language model says at once"
TICK_SECONDS = 0.001

Acknowledged = dict[str, list[tuple[int, int, float]]]


def main() -> None:
    owner = User.objects.create_user("reader")
    browser = Client()
    browser.force_login(owner)
    while True:
        case = hear()
        keys = [f"{case['name']}/{number}" for number in range(STREAMS)]
        streams = [Stream.objects.create(key=key, owner=owner) for key in keys]
        for stream in streams:
            stream.append(chunk(-1))
        say({"keys": keys, "session": browser.cookies["sessionid"].value})
        hear()
        settle()
        count = round(case["rate"] * case["seconds"])
        append = append_with_writers if case["with_writer"] else append_in_threads
        acknowledged = append(streams, count, case["rate"])
        for stream in streams:
            stream.close()
        say({"acknowledged": acknowledged})


def chunk(number: int) -> dict[str, Any]:
    return {"number": number, "text": TEXT}


def append_in_threads(streams: list[Stream], count: int, rate: float) -> Acknowledged:
    """Each thread has streams of its own and its share of the rate."""
    acknowledged: Acknowledged = {stream.key: [] for stream in streams}
    started = time.monotonic()

    def append(first: int) -> None:
        for number in range(first, count, THREADS):
            stream = streams[number % len(streams)]
            time.sleep(max(0.0, started + number / rate - time.monotonic()))
            offset = stream.append(chunk(number)).offset
            acknowledged[stream.key].append((offset, number, time.monotonic()))
        connection.close()

    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(append, first) for first in range(THREADS)]:
            done.result()
    return acknowledged


def append_with_writers(streams: list[Stream], count: int, rate: float) -> Acknowledged:
    """Nobody waits for an append: as producers that are many would do."""
    acknowledged: Acknowledged = {stream.key: [] for stream in streams}

    failed: list[BaseException] = []

    def note(key: str, number: int, done: Future[int]) -> None:
        if error := done.exception():
            failed.append(error)
        else:
            acknowledged[key].append((done.result(), number, time.monotonic()))

    with contextlib.ExitStack() as stack:
        writers = [(stream.key, stack.enter_context(StreamWriter(stream))) for stream in streams]
        ways = itertools.cycle(writers)
        for number in paced(count, rate):
            key, writer = next(ways)
            writer.append_nowait(chunk(number)).add_done_callback(partial(note, key, number))
    if failed:
        raise failed[0]
    if sum(map(len, acknowledged.values())) != count:
        sys.exit("An append was never acknowledged.")
    return acknowledged


def paced(count: int, rate: float) -> Iterator[int]:
    """The numbers up to the count, as they come due, those of a tick together."""
    started = time.monotonic()
    number = 0
    while number < count:
        due = min(count, int((time.monotonic() - started) * rate) + 1)
        yield from range(number, due)
        number = max(number, due)
        time.sleep(TICK_SECONDS)


if __name__ == "__main__":
    main()
