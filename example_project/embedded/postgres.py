"""Postgres itself: its binaries, its data directory, starting and stopping it.

Everything here but `is_ready` is for the keeper, which holds the cluster's keeper lock: nobody
else does any of it at the same time.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

from example_project.embedded.cluster import (
    PORT,
    EmbeddedPostgresError,
    become,
    package_binaries,
    package_version,
    run_as,
)
from example_project.embedded.locks import RETRY_SECONDS, try_exclusive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from example_project.embedded.cluster import Account, Cluster

SUPERUSER = "postgres"
START_SECONDS = 60.0
LOG_TAIL_BYTES = 4000

# postmaster.pid: the line on which Postgres writes its state, and the state that takes clients.
STATUS_LINE = 7
READY = "ready"

SETTINGS = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_preload_libraries": "pg_stat_statements",
    "logging_collector": "off",
}


def is_ready(cluster: Cluster) -> bool:
    """Whether Postgres takes connections now: by its own word, and by somebody answering."""
    try:
        lines = cluster.pid_file.read_text().splitlines()
    except FileNotFoundError:
        return False
    if len(lines) <= STATUS_LINE or lines[STATUS_LINE].strip() != READY:
        return False
    # A killed server leaves both files behind, but nobody listens on its socket.
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(cluster.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def start_or_adopt(cluster: Cluster, account: Account | None) -> Path:
    """Return, once Postgres takes connections, the directory of its programs.

    Waits for an earlier server's processes to be gone, unless that server is well.
    """
    open_to(cluster, account)
    binaries = usable_binaries(cluster, account)
    deadline = time.monotonic() + START_SECONDS
    while (postgres_lock := try_exclusive(cluster.postgres)) is None:
        if is_ready(cluster):
            return binaries
        if time.monotonic() > deadline:
            raise failure(cluster, "An earlier Postgres neither works nor ends.")
        time.sleep(RETRY_SECONDS)
    try:
        create_data(cluster, account, binaries, postgres_lock)
        # Nobody holds the lock, so no process of this cluster lives: these files are a dead
        # server's. The number in them may be that of a stranger by now, or of a dead process that
        # nobody has reaped yet; at the sight of either Postgres would refuse to start.
        for left_behind in (cluster.pid_file, cluster.socket_lock_file):
            left_behind.unlink(missing_ok=True)
        server = launch(cluster, account, binaries, postgres_lock)
    finally:
        os.close(postgres_lock)
    while not is_ready(cluster):
        if server.poll() is not None:
            raise failure(cluster, f"Postgres ended at its start ({server.returncode}).")
        if time.monotonic() > deadline:
            raise failure(cluster, f"Postgres was not ready in {START_SECONDS:.0f} s.")
        time.sleep(RETRY_SECONDS)
    return binaries


def open_to(cluster: Cluster, account: Account | None) -> None:
    """Let the server's account through our own directory, and check that it gets there."""
    if account is None:
        return
    os.chown(cluster.directory, -1, account.gid)
    cluster.directory.chmod(0o710)
    try:
        run_as(account, ["/bin/sh", "-c", 'cd "$1"', "sh", cluster.directory])
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedPostgresError(
            f"Postgres refuses to run as root, and the account {account.name} cannot be used or "
            f"cannot reach {cluster.directory}. Run as another user, or set DATABASE_URL."
        ) from error


def usable_binaries(cluster: Cluster, account: Account | None) -> Path:
    """The directory of programs that the server's account can run: the package's, or our copy."""
    binaries = package_binaries()
    if account is None or runs(account, binaries):
        return binaries
    copy = cluster.directory / f"binaries-{package_version()}"
    # The programs find their libraries and data by relative paths: the layout stays as it is.
    package = binaries.parents[1]
    copied_binaries = copy / binaries.relative_to(package.parent)
    if not copy.is_dir():
        copy_binaries(package, copy)
    if not runs(account, copied_binaries):
        raise EmbeddedPostgresError(
            f"The account {account.name} cannot run the programs in {copied_binaries}. "
            "Run as another user, or set DATABASE_URL."
        )
    return copied_binaries


def runs(account: Account, binaries: Path) -> bool:
    """Whether the account can run the programs in this directory."""
    try:
        run_as(account, [binaries / "initdb", "--version"])
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def copy_binaries(package: Path, copy: Path) -> None:
    """Copy what runs Postgres (40 MB), all or nothing, readable to the server's account."""
    unfinished = copy.with_name("binaries.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    headers_and_archives = shutil.ignore_patterns("include", "pgxs", "*.a", "*.py", "__pycache__")
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.is_dir():
            shutil.copytree(source, unfinished / source.name, ignore=headers_and_archives)
    for path in [unfinished, *unfinished.rglob("*")]:
        executable = path.is_dir() or path.parent.name == "bin"
        path.chmod(0o755 if executable else 0o644)
    unfinished.rename(copy)


def create_data(cluster: Cluster, account: Account | None, binaries: Path, postgres_lock: int) -> None:
    """Make the data directory if there is none: under another name until it is complete.

    initdb holds `postgres_lock` too: should this process be killed, the next one waits for its end.
    """
    if cluster.data.is_dir():
        return
    unfinished = cluster.directory / "data.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    if account is not None:
        os.chown(unfinished, account.uid, account.gid)
    options = ["--auth=trust", "--encoding=UTF8", f"--username={SUPERUSER}"]
    # Sorted alike everywhere: Postgres's own rules, not those of the machine's C library.
    options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"]
    try:
        command = [binaries / "initdb", f"--pgdata={unfinished}", *options]
        run_as(account, command, pass_fds=[postgres_lock])
    except subprocess.CalledProcessError as error:
        raise EmbeddedPostgresError(f"initdb failed:\n{error.stdout}") from error
    unfinished.rename(cluster.data)


def launch(
    cluster: Cluster, account: Account | None, binaries: Path, postgres_lock: int
) -> subprocess.Popen[bytes]:
    """Start the server in a session of its own; each of its processes holds `postgres_lock`."""
    if cluster.log.exists():
        cluster.log.rename(cluster.log.with_name("server.log.1"))
    command = [binaries / "postgres", "-D", cluster.data, "-k", cluster.data]
    return spawn(command, SETTINGS, cluster.log, account, pass_fds=[postgres_lock])


def spawn(
    command: Sequence[str | Path],
    settings: Mapping[str, str],
    log: Path,
    account: Account | None,
    *,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a server with settings, as `account`, in a session of its own: Ctrl-C is not for it."""
    options: dict[str, Any] = become(account)
    options["env"] |= environment or {}
    given = (argument for name, value in settings.items() for argument in ("-c", f"{name}={value}"))
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, *given],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
            pass_fds=pass_fds,
            **options,
        )


def request_stop(cluster: Cluster, account: Account | None, binaries: Path, mode: str) -> None:
    """Ask the server to stop, as the account it runs under; does not wait for it."""
    try:
        run_as(account, [binaries / "pg_ctl", "stop", "-D", cluster.data, "-m", mode, "-W"])
    except subprocess.CalledProcessError:
        return  # it is gone already


def failure(cluster: Cluster, reason: str) -> EmbeddedPostgresError:
    """The error for a server that does not start, with the end of its log."""
    try:
        tail = cluster.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    except FileNotFoundError:
        tail = "(none)"
    return EmbeddedPostgresError(
        f"{reason} Remove {cluster.directory} to begin with an empty database, or set "
        f"DATABASE_URL to another server. The end of its log, {cluster.log}:\n{tail}"
    )
