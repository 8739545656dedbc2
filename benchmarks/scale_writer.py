"""The writer that wakes followers: each line names streams, each of which gets a chunk.

One by `stream.append()`, many through `StreamWriter`s at once. It says, for each stream, the chunk's offset
and number.
"""

from __future__ import annotations

import itertools
import time

import django

django.setup()

from benchmarks.shared.talking import hear, say  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402
from django_pgstreams.writer import StreamWriter  # noqa: E402

TEXT = "About as many words as a language model says at once"


def main() -> None:
    streams = {stream.key: stream for stream in Stream.objects.all()}
    # None is one that an earlier writer gave to a chunk of the same stream.
    numbers = itertools.count(time.monotonic_ns())
    while True:
        keys = hear()
        chunks = {key: {"number": next(numbers), "text": TEXT} for key in keys}
        if len(keys) == 1:
            offsets = [streams[key].append(chunk).offset for key, chunk in chunks.items()]
        else:
            futures = [StreamWriter(streams[key]).append_nowait(chunk) for key, chunk in chunks.items()]
            offsets = [future.result() for future in futures]
        say({key: (offset, chunks[key]["number"]) for key, offset in zip(keys, offsets, strict=True)})


if __name__ == "__main__":
    main()
