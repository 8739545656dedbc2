"""The writer: appends to many streams at a steady rate and notes when each append is acknowledged.

A line asks for a case: `name`, `rate` (chunks a second), `seconds`. It says the streams' keys and their
owner's session. After another line, when the readers are there, it appends, closes the streams, and says for
each stream each append's offset, number and time (`CLOCK_MONOTONIC`, seconds). Each stream's first chunk,
which shows a reader that it follows, is not among them.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import Client  # noqa: E402

from benchmarks.shared.talking import hear, say  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402

STREAMS = 50
THREADS = 8
"""That append: as many as a web server has."""
TEXT = "About as many words as a language model says at once"

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
        count = round(case["rate"] * case["seconds"])
        acknowledged = append_in_threads(streams, count, case["rate"])
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


if __name__ == "__main__":
    main()
