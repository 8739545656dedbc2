"""Writes notes into a stream of the README's project until its standard input ends; then ends the stream.

`python readme_writer.py KEY`, in the project's directory. Transactions differ in length, and some roll back.
Says `created` once the stream exists, and at last the number of notes.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import django

django.setup()

from django.db import transaction  # noqa: E402

from django_pgstreams.models import Stream  # noqa: E402


def write(stream: Stream, number: int) -> int:
    """Append a few notes, numbered from `number` on, in one transaction; returns the next number."""
    upto = number + random.choice((1, 1, 2, 5, 40))
    regretted = random.random() < 0.1
    with transaction.atomic():
        for index in range(number, upto):
            stream.append({"text": f"note {index}"})
        transaction.set_rollback(regretted)
    return number if regretted else upto


def say(line: object) -> None:
    """Tell the test, which reads the output."""
    print(line, flush=True)  # noqa: T201


def main(key: str) -> None:
    stream = Stream.objects.create(key=key)
    say("created")
    told_to_end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), told_to_end.set()), daemon=True).start()
    number = 0
    while not told_to_end.is_set():
        number = write(stream, number)
        time.sleep(0.002)  # leaves some of the machine to the readers
    stream.close()
    say(number)


if __name__ == "__main__":
    main(*sys.argv[1:])
