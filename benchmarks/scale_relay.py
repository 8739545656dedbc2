"""A relay, started with its settings by default, as `manage.py pgstreams relay` does.

Each line asks what it has done so far: it says how often it has announced something, and the seconds of
processor time that this has taken.
"""

from __future__ import annotations

import time

import django

django.setup()

from benchmarks.shared.talking import hear, say  # noqa: E402
from django_pgstreams import conf  # noqa: E402
from django_pgstreams.relay import Relay  # noqa: E402

IDLE_INTERVAL_SECONDS = 0.05


def main() -> None:
    settings = conf.get()
    relay = Relay(
        "default",
        channel=settings.CHANNEL,
        interval_seconds=settings.FLUSH_INTERVAL_SECONDS,
        idle_interval_seconds=IDLE_INTERVAL_SECONDS,
        timeout_seconds=settings.QUERY_TIMEOUT_SECONDS,
    )
    relay.start()
    while True:
        hear()
        say({"flushes": relay.flushes, "cpu_seconds": time.process_time()})


if __name__ == "__main__":
    main()
