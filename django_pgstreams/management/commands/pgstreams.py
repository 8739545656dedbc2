"""`manage.py pgstreams …`: the app's commands for operation."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections

from django_pgstreams import conf
from django_pgstreams.relay import Relay

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP_SECONDS = 1.0


class Command(BaseCommand):
    """One command; each sub-command is a method."""

    help = "Operates streams."

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(title="sub-commands", required=True, metavar="COMMAND")
        relay = commands.add_parser(
            "relay",
            help="announce what raw SQL and processes without a notifier have written",
            description="Watches a database's streams and wakes their readers, until SIGTERM or Ctrl-C.",
        )
        relay.set_defaults(method=self.relay)
        relay.add_argument(
            "--database",
            default=DEFAULT_DB_ALIAS,
            choices=tuple(connections),
            help="the alias whose streams are watched (%(default)s)",
        )
        relay.add_argument(
            "--interval-seconds",
            type=_seconds,
            metavar="N",
            help="how often to look while streams move (FLUSH_INTERVAL_SECONDS)",
        )
        relay.add_argument(
            "--idle-interval-seconds",
            type=_seconds,
            default=0.05,
            metavar="N",
            help="how often to look while nothing moves (%(default)g)",
        )

    def handle(self, *args: Any, method: Callable[..., None], **options: Any) -> None:
        """Run the sub-command."""
        method(**options)

    def relay(
        self,
        *,
        database: str,
        interval_seconds: float | None,
        idle_interval_seconds: float,
        verbosity: int,
        **options: Any,
    ) -> None:
        """Announce until a signal comes."""
        if connections[database].vendor != "postgresql":
            raise CommandError(f"The alias {database!r} is {connections[database].vendor}, not Postgres.")
        self._log_to_the_terminal(verbosity)
        settings = conf.get()
        relay = Relay(
            database,
            channel=settings.CHANNEL,
            interval_seconds=interval_seconds or settings.FLUSH_INTERVAL_SECONDS,
            idle_interval_seconds=idle_interval_seconds,
            timeout_seconds=settings.QUERY_TIMEOUT_SECONDS,
        )
        with _stop_signals() as wait:
            relay.start()
            wait()
            relay.close(_STOP_SECONDS)

    def _log_to_the_terminal(self, verbosity: int) -> None:
        """Show the app's log here, unless the project says where it goes."""
        logger = logging.getLogger("django_pgstreams")
        if verbosity and not logger.hasHandlers():
            handler = logging.StreamHandler(self.stderr)
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], None]]:
    """A function that waits for the signals that end a process; meanwhile they do nothing else."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    handlers = {number: signal.signal(number, _do_nothing) for number in _STOP_SIGNALS}
    # Wakes this thread whichever one the signal interrupts.
    descriptor = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)

    def wait() -> None:
        while woken.recv(1)[0] not in _STOP_SIGNALS:
            pass

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        woken.close()
        waker.close()


def _do_nothing(*_: object) -> None:
    pass


def _seconds(text: str) -> float:
    """An option's value: seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
