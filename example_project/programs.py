"""Runs of real programs: application/json streams, a line of output per chunk."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream

from .producers import producers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.contrib.auth.models import AbstractBaseUser

LIBRARY = Path(sysconfig.get_path("stdlib"))
# Installed beside the library, not of it, or made of files that are wrong on purpose.
NOT_COMPILED = {"site-packages", "dist-packages", "test", "lib2to3", "__pycache__"}
BROKEN_SOURCE = 'alice = ("<b>Curiouser</b> and curiouser!"\n'
KILL_SECONDS = 3.0


@dataclass(frozen=True)
class Program:
    """A program that can be run: its title, and its arguments, given a scratch directory."""

    title: str
    arguments: Callable[[Path], list[str]]


def _compile_library(scratch: Path) -> list[str]:
    """Compile every module of Python's standard library, three times over: it takes a while."""
    sources = sorted(
        path.name
        for path in LIBRARY.iterdir()
        if path.name not in NOT_COMPILED and (path.suffix == ".py" or (path / "__init__.py").exists())
    )
    return _compileall(scratch, "-o", "0", "-o", "1", "-o", "2", *sources)


def _compile_broken(scratch: Path) -> list[str]:
    """Compile a few packages, and a file that cannot be compiled."""
    broken = scratch / "broken.py"
    broken.write_text(BROKEN_SOURCE, encoding="utf-8")
    return _compileall(scratch, "json", "logging", "http", "email", str(broken))


def _compileall(scratch: Path, *arguments: str) -> list[str]:
    # The prefix keeps every compiled file in the scratch directory: nothing installed is changed.
    options = ["-P", "-u", "-X", f"pycache_prefix={scratch}", "-m", "compileall", "-f"]
    return [sys.executable, *options, *arguments]


PROGRAMS = {
    "library": Program("Compile Python's standard library", _compile_library),
    "broken": Program("Compile a few packages and a broken file (fails)", _compile_broken),
}


def start_run(owner: AbstractBaseUser, program: str) -> Stream:
    """Create the stream of a run of `PROGRAMS[program]` and start the thread that runs it."""
    stream = Stream.objects.create(
        key=f"log/{secrets.token_hex(6)}",
        owner=owner,
        metadata={
            "program": program,
            "title": PROGRAMS[program].title,
            "writer": producers.writer(),
        },
    )
    producers.start(stream, write_run)
    return stream


def write_run(stream: Stream) -> None:
    """Run the program, append each line as it comes, and close the stream as the exit code says."""
    with tempfile.TemporaryDirectory(prefix="pgstreams-demo-") as scratch:
        arguments = PROGRAMS[stream.metadata["program"]].arguments(Path(scratch))
        with _running(arguments) as process:
            threading.Thread(target=_terminate_at_the_end, args=(stream.key, process), daemon=True).start()
            for line in process.stdout:
                stream.append({"at": time.time(), "text": line.rstrip("\n")})
            code = process.wait()
    if code == 0:
        stream.close()
    else:
        stream.fail(f"The program ended with exit code {code}.")


@contextlib.contextmanager
def _running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The program, running in the library's directory; it is gone when the block ends."""
    process = subprocess.Popen(
        arguments,
        cwd=LIBRARY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        # A Ctrl-C in the terminal is for the demo, which then ends its programs.
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _terminate_at_the_end(key: str, process: subprocess.Popen[str]) -> None:
    """Follow the stream, so that Stop ends even a program that prints nothing."""
    for _ in subscribe(key):
        pass
    process.terminate()
