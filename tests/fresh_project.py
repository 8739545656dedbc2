"""The project that README.md builds: its blocks pasted verbatim, its commands run, a database of its own."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from django.db import connection
from psycopg import sql

from tests.waiting import DEADLINE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

README = Path(__file__).resolve().parents[1] / "README.md"
_FENCED = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)
_AT_END = ", at the end"
_LIBPQ_NAMES = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
USERNAME = "ada"
PASSWORD = "countess"


class Block(NamedTuple):
    """A fenced block of the README; `title` names the file that it is for."""

    language: str
    title: str
    text: str


def readme_blocks() -> list[Block]:
    """The README's fenced blocks, in order."""
    return [
        Block(found["language"], found["title"] or "", found["text"])
        for found in _FENCED.finditer(README.read_text())
    ]


class Program:
    """A running Python program and what it has printed, errors included."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self._printed = tempfile.NamedTemporaryFile(suffix=".txt")  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
            **options,
        )

    @property
    def output(self) -> str:
        return Path(self._printed.name).read_text()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def end_input(self) -> None:
        """Close its standard input."""
        self._process.stdin.close()

    def wait(self) -> int:
        """Wait for its end, and return the exit code."""
        return self._process.wait(DEADLINE_SECONDS)

    def stop(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it with a signal, and return the exit code."""
        self._process.send_signal(number)
        return self.wait()

    def interrupt(self) -> int:
        """End it as Ctrl-C does, which its children get too, and return the exit code."""
        os.killpg(self._process.pid, signal.SIGINT)
        return self.wait()

    def close(self) -> None:
        """Make sure that it is gone, with its children, however the test went."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait()
        self._process.stdin.close()
        self._printed.close()


class FreshProject:
    """A project on disk, and its database on the server of the tests."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        self.database = database
        parameters = connection.get_connection_params()
        self._server = {name: str(parameters[name]) for name in _LIBPQ_NAMES if name in parameters}
        self._options = {"cwd": directory, "env": self._environment()}

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
        return {
            **inherited,
            **{_LIBPQ_NAMES[name]: value for name, value in self._server.items()},
            "PGDATABASE": self.database,
            "DJANGO_SETTINGS_MODULE": "mysite.settings",
            "DJANGO_SUPERUSER_USERNAME": USERNAME,
            "DJANGO_SUPERUSER_PASSWORD": PASSWORD,
            "DJANGO_SUPERUSER_EMAIL": "ada@example.com",
            "PYTHONWARNINGS": "default",
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, *command: str, timeout_seconds: float = DEADLINE_SECONDS) -> tuple[int, str]:
        """Run `python …` in the project to its end; returns the exit code and what it printed."""
        done = subprocess.run(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=timeout_seconds,
            check=False,
            **self._options,
        )
        return done.returncode, done.stdout

    @contextlib.contextmanager
    def started(self, *command: str, **variables: str) -> Iterator[Program]:
        """Run `python …` in the project for as long as the block lasts, with more in its environment."""
        options = self._options | {"env": self._options["env"] | variables}
        with contextlib.closing(Program(list(command), **options)) as program:
            yield program

    @contextlib.contextmanager
    def served(self, port: int = 0) -> Iterator[tuple[Program, int]]:
        """Daphne with the project, listening on the loopback port that is returned."""
        command = ("-m", "daphne", "--bind", "127.0.0.1", "--port", str(port), "mysite.asgi:application")
        with self.started(*command) as daphne:
            listening = re.compile(r"Listening on TCP address 127\.0\.0\.1:(\d+)")
            found = wait_until(
                lambda: listening.search(daphne.output) or not daphne.running, "the server starts"
            )
            assert isinstance(found, re.Match), daphne.output
            yield daphne, int(found[1])

    def connect(self, database: str | None = None) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection to the project's database, or to another one of the same server."""
        return psycopg.connect(dbname=database or self.database, autocommit=True, **self._server)

    def fetch(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """What a query finds in the project's database."""
        with self.connect() as own:
            return own.execute(statement, parameters).fetchall()

    # Building --------------------------------------------------------------------------------------

    def paste(self, block: Block) -> None:
        """Put a block into its file: in place of what is there, or at the end."""
        path = self.directory / block.title.removesuffix(_AT_END)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() + "\n" if block.title.endswith(_AT_END) else ""
        path.write_text(before + block.text)

    def follow_readme(self, *, migrated: bool = True) -> None:
        """Do what the README says: its commands in order, and its files where it says them.

        Unless `migrated`, without those that need a database.
        """
        for block in readme_blocks():
            if block.language == "sh":
                for line in block.text.splitlines():
                    self._follow(shlex.split(line), migrated)
            elif block.title:
                self.paste(block)

    def _follow(self, words: list[str], migrated: bool) -> None:
        match words:
            case ["django-admin", "startproject", name]:
                # The project's directory is there already; its settings are not.
                self._succeed("-m", "django", "startproject", name, ".", settings="")
            case ["python", "manage.py", "startapp" | "makemigrations", *_]:
                self._succeed(*words[1:])
            case ["python", "manage.py", "migrate"] if migrated:
                self._succeed(*words[1:])
            case ["python", "manage.py", "createsuperuser"] if migrated:
                self._succeed(*words[1:], "--noinput")

    def _succeed(self, *command: str, settings: str = "mysite.settings") -> None:
        self._options["env"]["DJANGO_SETTINGS_MODULE"] = settings
        code, printed = self.run(*command)
        assert code == 0, printed


@contextlib.contextmanager
def fresh_project(directory: Path) -> Iterator[FreshProject]:
    """The README's project, migrated and with a superuser, ready to be served."""
    project = FreshProject(directory, f"readme_{secrets.token_hex(4)}")
    name = sql.Identifier(project.database)
    with project.connect("postgres") as server:
        server.execute(sql.SQL("CREATE DATABASE {}").format(name))
        try:
            project.follow_readme()
            yield project
        finally:
            server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))
