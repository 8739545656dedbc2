"""A disk whose flushes can be made slow while Postgres runs on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.shared.preloading import built

_SOURCE = Path(__file__).with_name("chaos_slow_disk.c")


class Disk:
    """What servers started with this `environment` think of as their disk."""

    def __init__(self, library: Path) -> None:
        self._told = library.with_name("milliseconds")
        self.slow_down(0)
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "SLOW_DISK_FILE": str(self._told)}

    def slow_down(self, milliseconds: int) -> None:
        """Let each flush take so much longer from now on."""
        # In one step: nobody reads an empty file in between.
        new = self._told.with_name("new")
        new.write_text(str(milliseconds))
        new.chmod(0o644)
        new.rename(self._told)


@contextlib.contextmanager
def disk() -> Iterator[Disk]:
    """A disk as fast as ever, until it is told otherwise."""
    with built(_SOURCE) as library:
        yield Disk(library)
