"""The writer of `orm`: rounds of `stream.append()` and of plain `create()`s, in turns, in one process.

Argument: how many seconds. It says how many calls a round has and, for each way, the seconds of each round.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import django

django.setup()

from django.db import connection, models  # noqa: E402
from django.utils import timezone  # noqa: E402

from benchmarks.shared.talking import say  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402

CALLS = 100
"""In a round: a fraction of a second, so that what else the machine does meets all ways alike."""
STREAMS = 50
TEXT = "About as many words as a language model says at once"


class Message(models.Model):  # noqa: DJ008  (nobody prints it)
    """What a project would write without this app: its JSON in a table of its own."""

    conversation_id = models.BigIntegerField()
    number = models.BigIntegerField()
    data = models.JSONField()
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        app_label = "example_project"


class Record(models.Model):  # noqa: DJ008
    """The same with a chunk's own columns, hence the cheapest."""

    conversation_id = models.BigIntegerField()
    number = models.BigIntegerField()
    payload = models.BinaryField()
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        app_label = "example_project"


def main(seconds: float) -> None:
    with connection.schema_editor() as editor:
        editor.create_model(Message)
        editor.create_model(Record)
    streams = [Stream.objects.create(key=f"orm/{number}") for number in range(STREAMS)]

    def append(number: int, data: dict[str, Any]) -> None:
        streams[number % STREAMS].append(data)

    def create_message(number: int, data: dict[str, Any]) -> None:
        Message.objects.create(conversation_id=number % STREAMS, number=number, data=data)

    def create_record(number: int, data: dict[str, Any]) -> None:
        payload = json.dumps(data).encode()
        Record.objects.create(conversation_id=number % STREAMS, number=number, payload=payload)

    ways = {"append": append, "create with JSON": create_message, "create with bytes": create_record}
    for call in ways.values():
        timed(call, 0)
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    stop = time.monotonic() + seconds
    while not rounds["append"] or time.monotonic() < stop:
        for name, call in ways.items():
            rounds[name].append(timed(call, CALLS * (len(rounds[name]) + 1)))
    check(streams, CALLS * (len(rounds["append"]) + 1))
    say({"calls": CALLS, "rounds": rounds})


def timed(call: Callable[[int, dict[str, Any]], None], first: int) -> float:
    """The seconds of a round whose numbers begin there; each call is a transaction."""
    started = time.perf_counter()
    for number in range(first, first + CALLS):
        call(number, {"number": number, "text": TEXT})
    return time.perf_counter() - started


def check(streams: list[Stream], appended: int) -> None:
    """Leave with an error unless each stream holds what was appended to it, in order."""
    for place, stream in enumerate(streams):
        stored = [(chunk.offset, chunk.data["number"]) for chunk in stream.read()]
        if stored != list(enumerate(range(place, appended, STREAMS))):
            sys.exit(f"Stream {stream.key} does not hold what was appended to it.")


if __name__ == "__main__":
    main(float(sys.argv[1]))
