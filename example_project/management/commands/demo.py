"""`manage.py demo`: the whole demo in one command, on this machine only."""

from __future__ import annotations

import argparse
import secrets
import signal
import socket
from typing import TYPE_CHECKING, Any, NoReturn

from daphne.server import Server  # first: it chooses the reactor that Twisted then installs
from django.contrib.auth import get_user_model
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.management import BaseCommand, CommandError, call_command
from django.db import connection
from twisted.internet import reactor, threads

from example_project.answers import language_model
from example_project.asgi import application
from example_project.forms import MAX_TOKENS_PER_SECOND
from example_project.producers import fail_abandoned_streams, producers

if TYPE_CHECKING:
    from types import FrameType

    from twisted.python.failure import Failure

HOST = "127.0.0.1"
ADMIN = "admin"
# Time for the streams' last frames to reach the pages that follow them.
FAREWELL_SECONDS = 0.2


class DemoServer(Server):
    """Daphne, reporting a port that it cannot have instead of logging it."""

    listen_failure: Failure | None = None

    def listen_error(self, failure: Failure) -> None:
        self.listen_failure = failure
        self.stop()


class Command(BaseCommand):
    """Start Postgres, migrate, make an admin, train the model, serve; until Ctrl-C."""

    help = "Run the demo on this machine. Needs nothing set up; Ctrl-C stops everything."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--port", type=int, default=8000, help="port to listen on; 0 for any free one (8000)"
        )
        parser.add_argument(
            "--rate",
            type=_tokens_per_second,
            default=producers.tokens_per_second,
            help="tokens per second of an answer, unless its form says otherwise (%(default)s)",
        )

    def handle(self, *, port: int, rate: float, **options: Any) -> None:
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            _check_port(port)
            producers.tokens_per_second = rate
            password = self._prepare()
            self._serve(port, password)
        except KeyboardInterrupt:
            pass
        self.stdout.write("stopped")

    def _prepare(self) -> str:
        """Get the database and the model ready, and return the admin's password."""
        self.stdout.write("Starting Postgres …")
        self.stdout.flush()
        call_command("migrate", verbosity=0, interactive=False)
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            (version,) = cursor.fetchone()
        self.stdout.write(f"Postgres {version} is running and migrated.")
        if abandoned := fail_abandoned_streams():
            self.stdout.write(f"Failed {abandoned} open streams of a demo that was killed.")
        self.stdout.write(f"Trained the model on {language_model().words_seen:,} words.")
        return _make_admin()

    def _serve(self, port: int, password: str) -> None:
        server = DemoServer(
            ASGIStaticFilesHandler(application),
            endpoints=[f"tcp:port={port}:interface={HOST}"],
            signal_handlers=False,
            ready_callable=lambda: self._announce(server, password),
        )
        _stop_on_signals()
        server.run()
        if server.listen_failure is not None:
            raise CommandError(_port_error(port, server.listen_failure.getErrorMessage()))

    def _announce(self, server: DemoServer, password: str) -> None:
        ((host, port),) = server.listening_addresses
        address = f"http://{host}:{port}"
        self.stdout.write(
            f"\n  start  {address}/"
            f"\n  ask    {address}/ask/"
            f"\n  log    {address}/log/"
            f"\n  admin  {address}/admin/   user {ADMIN}, password {password}"
            "\n\nCtrl-C stops everything."
        )
        reactor.callWhenRunning(self._say_ready)

    def _say_ready(self) -> None:
        self.stdout.write("ready")
        self.stdout.flush()


def _make_admin() -> str:
    """Make sure of the admin user, with a new password: a fixed one could be guessed."""
    password = secrets.token_urlsafe(9)
    admin, _ = get_user_model().objects.get_or_create(username=ADMIN)
    admin.is_staff = admin.is_superuser = admin.is_active = True
    admin.set_password(password)
    admin.save()
    return password


def _check_port(port: int) -> None:
    """Fail before anything has been started, if the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise CommandError(_port_error(port, str(error))) from error


def _port_error(port: int, why: str) -> str:
    return f"Cannot listen on {HOST}:{port}: {why}. Choose another with --port (0 for any free one)."


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _stop_on_signals() -> None:
    """From now on, Ctrl-C and SIGTERM end the streams first, then the server."""

    def stop(number: int, frame: FrameType | None) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, _ignore)
        reactor.callFromThread(stop_producers)

    def stop_producers() -> None:
        done = threads.deferToThread(producers.stop)
        done.addBoth(lambda _: reactor.callLater(FAREWELL_SECONDS, reactor.stop))

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A second signal changes nothing: the end is near."""


def _tokens_per_second(text: str) -> float:
    rate = float(text)
    if not 1 <= rate <= MAX_TOKENS_PER_SECOND:
        raise argparse.ArgumentTypeError(f"a rate is from 1 to {MAX_TOKENS_PER_SECOND}")
    return rate
