"""What storing and reading cost with all that is stored now: the streams are chosen at random among all.

Each line asks for a number of appends, and how many chunks a page has. It says the milliseconds of an
append by `stream.append()`, of one by `StreamWriter` with 500 in flight, and of a page's read: medians.
What it has appended it reads back and checks.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import django

django.setup()

from benchmarks.shared.checking import check  # noqa: E402
from benchmarks.shared.talking import hear, say  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402
from django_pgstreams.writer import StreamWriter  # noqa: E402

IN_FLIGHT = 500
WARM_UP = 50
TEXT = "About as many words as a language model says at once"

numbers = itertools.count(10**12)
"""They tell payloads apart, also from those that were there before."""


def main() -> None:
    while True:
        order = hear()
        costs(sample(WARM_UP), order["page"])
        say(costs(sample(order["appends"]), order["page"]))


def costs(streams: list[Stream], page: int) -> dict[str, float]:
    """Milliseconds of each piece of work, on one stream after the other."""
    return {
        "page": median_ms(lambda stream: read(stream, page), streams),
        "stream.append()": measured_append(streams),
        "StreamWriter append": measured_writes(random.sample(streams, len(streams))),
    }


def sample(count: int) -> list[Stream]:
    """So many streams, the same one more than once where there are fewer."""
    ids = list(Stream.objects.values_list("pk", flat=True))
    by_id = Stream.objects.in_bulk(random.sample(ids, min(count, len(ids))))
    return random.choices(list(by_id.values()), k=count)


def median_ms(work: Callable[[Stream], Any], streams: Iterable[Stream]) -> float:
    """The median time of the work on one stream."""
    times = []
    for stream in streams:
        began = time.perf_counter()
        work(stream)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def read(stream: Stream, page: int) -> None:
    """Read a page from a random position."""
    position = random.randint(0, stream.next_offset - page)
    chunks = list(stream.read(position, limit=page))
    assert [chunk.offset for chunk in chunks] == list(range(position, position + page))


def measured_append(streams: list[Stream]) -> float:
    """Milliseconds of an append, each its own transaction."""
    acknowledged: dict[Stream, list[tuple[int, int]]] = {stream: [] for stream in streams}

    def append(stream: Stream) -> None:
        number = next(numbers)
        acknowledged[stream].append((stream.append(chunk(number)).offset, number))

    milliseconds = median_ms(append, streams)
    check_stored(acknowledged)
    return milliseconds


def measured_writes(streams: list[Stream]) -> float:
    """Milliseconds of an append, so many at a time: of all of a round together, by their number."""
    acknowledged: dict[Stream, list[tuple[int, int]]] = {stream: [] for stream in streams}
    writers = {stream: StreamWriter(stream) for stream in acknowledged}
    times = []
    for first in range(0, len(streams), IN_FLIGHT):
        round_of = [(stream, next(numbers)) for stream in streams[first : first + IN_FLIGHT]]
        began = time.perf_counter()
        futures = [writers[stream].append_nowait(chunk(number)) for stream, number in round_of]
        offsets = [future.result() for future in futures]
        times.append((time.perf_counter() - began) / len(round_of))
        for (stream, number), offset in zip(round_of, offsets, strict=True):
            acknowledged[stream].append((offset, number))
    check_stored(acknowledged)
    return statistics.median(times) * 1000


def chunk(number: int) -> dict[str, Any]:
    return {"number": number, "text": TEXT}


def check_stored(acknowledged: dict[Stream, list[tuple[int, int]]]) -> None:
    """Read back what was appended. Raises `BenchmarkError` unless all is there, once and in order."""
    stored = {
        stream: [(chunk.offset, chunk.data["number"]) for chunk in stream.read(min(entries)[0])]
        for stream, entries in acknowledged.items()
    }
    check(acknowledged, stored)


if __name__ == "__main__":
    main()
