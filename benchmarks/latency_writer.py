"""The writer of a benchmark: makes a stream, and appends to it at a steady rate.

It talks JSON lines: first, what a reader needs; then, once it is told how to, it appends, and says of each
append its offset, number and the time (`CLOCK_MONOTONIC`, seconds) when `append()` had returned.
"""

from __future__ import annotations

import json
import sys
import time

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.test import Client  # noqa: E402

from django_pgstreams.models import Stream  # noqa: E402


def main() -> None:
    owner = User.objects.create_user("reader")
    browser = Client()
    browser.force_login(owner)
    stream = Stream.objects.create(key="benchmark/latency", owner=owner)
    say(key=stream.key, session=browser.cookies["sessionid"].value)
    plan = json.loads(sys.stdin.readline())
    say(appended=append(stream, plan["count"], plan["rate"]))


def append(stream: Stream, count: int, rate: float) -> list[tuple[int, int, float]]:
    """Append numbers, so many per second, and complete the stream."""
    appended = []
    started = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, started + number / rate - time.monotonic()))
        stream.append({"number": number})
        appended.append((number, number, time.monotonic()))
    stream.close()
    return appended


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
