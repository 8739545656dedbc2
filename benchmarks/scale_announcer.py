"""One of many processes that append and announce at once, each as fast as it can.

Argument: the keys of its streams, as JSON. A line names when to begin (`CLOCK_MONOTONIC`, seconds) and for
how many seconds; at the end it says, for each stream, each append's offset and number, and how many flushes
there had been at which times.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from typing import Any

import django

django.setup()

from benchmarks.shared.talking import hear, say  # noqa: E402
from django_pgstreams import notifier  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402

SAMPLE_SECONDS = 0.02
TEXT = "About as many words as a language model says at once"


def main(keys: list[str]) -> None:
    streams = [Stream.objects.get(key=key) for key in keys]
    say("ready")
    order = hear()
    time.sleep(max(0.0, order["at"] - time.monotonic()))
    stop = threading.Event()
    flushes: list[tuple[float, int]] = []
    sampling = threading.Thread(target=sample, args=(flushes, stop), name="sampling")
    sampling.start()
    acknowledged = append(streams, order["at"] + order["seconds"])
    stop.set()
    sampling.join()
    say({"acknowledged": acknowledged, "flushes": flushes})


def sample(flushes: list[tuple[float, int]], stop: threading.Event) -> None:
    """Note the notifier's count of flushes now and then, and at the end."""
    own = notifier.get("default")
    while not stop.wait(SAMPLE_SECONDS):
        flushes.append((time.monotonic(), own.flushes))
    flushes.append((time.monotonic(), own.flushes))


def append(streams: list[Stream], until: float) -> dict[str, list[Any]]:
    """Append in turns, each append a transaction of its own."""
    acknowledged: dict[str, list[Any]] = {stream.key: [] for stream in streams}
    # No number is one that another process has had for the same stream before.
    for number in itertools.count(time.monotonic_ns()):
        if time.monotonic() >= until:
            break
        stream = streams[number % len(streams)]
        offset = stream.append({"number": number, "text": TEXT}).offset
        acknowledged[stream.key].append((offset, number))
    return acknowledged


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
