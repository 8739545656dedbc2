"""Fan-out over websockets: what does a frame cost on one server process, and how many can it send?

Two loads: all viewers on one stream, and each on a stream of its own; 10 chunks of 100 bytes a second to each
viewer, one per frame. The product serves them through the example project. Then a bare ASGI app on the same
server replays the frames that the product sent, one per wake-up of each socket, at the same rate, to the same
clients in another process: the physical limit. Then the rate is raised until p99 explodes or the server falls
behind. Latency counts from the moment a chunk is due in the writer (a frame, for the bare app) to its frame
in the client; what every frame holds is checked. CPU and memory are those of the server's process. Both
servers keep Python's collector from what lives long, as the README advises.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from benchmarks.fanout_load import Schedule, key_of
from benchmarks.shared.processes import Program, WebServer, daphne, uvicorn
from benchmarks.shared.results import Bar, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.shared.running import Run

SECONDS = 5.0
PACKAGES = ("asgiref", "autobahn", "Twisted")
VIEWERS = 1000
RATE = 10.0
STEPS = (1.5, 2, 3, 4)
"""The rate is raised to these multiples, until one is not held."""
MOST_TIMES_BARE = 2.0
MOST_P99_MS = 100.0

_LEAD_NS = 300_000_000  # for a phase's schedule to reach every program before it begins
_WARM_UP_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
_EXPLODED_MS = 250.0
_DELIVERED = 0.95
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SETTINGS = {"DJANGO_SETTINGS_MODULE": "benchmarks.fanout_settings"}
_PRODUCT = "benchmarks.fanout_application:application"
_BARE = "benchmarks.fanout_bare:application"

Server = Callable[..., AbstractContextManager[WebServer]]
SERVERS: dict[str, Server] = {"daphne": daphne, "uvicorn": uvicorn}
CHECKED = "daphne"  # the server whose figures have bars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--viewers", type=int, default=VIEWERS, help="websockets (%(default)d)")
    parser.add_argument("--server", choices=SERVERS, action="append", help="only this server")


def measure(run: Run) -> Result:
    """Serve both loads with each server, with the product and with the bare app."""
    viewers = run.options.viewers
    rows, bars, data = [], [], []
    with (
        run.database() as database,
        Program(database, "benchmarks.fanout_writer", str(viewers)) as writer,
        Program(database, "benchmarks.fanout_viewers") as crowd,
        tempfile.NamedTemporaryFile(suffix=".jsonl") as recording,
    ):
        session = writer.hear()["session"]
        for server in run.options.server or SERVERS:
            for streams in (1, viewers):
                case = Case(run, database, writer, crowd, session, SERVERS[server], streams, recording.name)
                product, bare = case.product(), case.bare()
                times = product["steps"][0]["cpu_us"] / bare["steps"][0]["cpu_us"]
                name = f"{server}, {'one stream' if streams == 1 else f'{streams:,} streams'}"
                rows += [row(name, "product", product, times), row(name, "bare app", bare, None)]
                data += [
                    {"case": name, "app": app, **found}
                    for app, found in (("product", product), ("bare app", bare))
                ]
                if server == CHECKED:
                    bars.append(
                        Bar(f"{name}: CPU per frame, of the bare app's", times, "<=", MOST_TIMES_BARE)
                    )
                    bars.append(Bar(f"{name}: p99", product["steps"][0]["p99_ms"], "<=", MOST_P99_MS, "ms"))
    return Result(rows, bars, {"measured": data})


def row(case: str, app: str, found: dict[str, Any], times_bare: float | None) -> dict[str, Any]:
    """A line of the table: the figures at the base rate, and how far the rate could be raised."""
    base = found["steps"][0]
    return {
        "case": case,
        "app": app,
        "frames/s": base["frames_per_second"],
        "p50 ms": base["p50_ms"],
        "p99 ms": base["p99_ms"],
        "CPU µs/frame": base["cpu_us"],
        "× bare": None if times_bare is None else round(times_bare, 2),
        "KiB/socket": found["kib_per_socket"],
        "connecting s": found["connecting_seconds"],
        "saturated at, chunks/s": saturation(found["steps"]),
    }


def saturation(steps: list[dict[str, Any]]) -> int:
    """The most chunks a second that were delivered while the server kept up, or at all if it never did."""
    held = [step["chunks_per_second"] for step in steps if is_held(step)]
    return int(max(held or [step["chunks_per_second"] for step in steps]))


def is_held(step: dict[str, Any]) -> bool:
    """Whether what was offered was delivered in time."""
    return bool(
        step["p99_ms"] <= _EXPLODED_MS
        and step["chunks_per_second"] >= _DELIVERED * step["offered_per_second"]
    )


@dataclass
class Case:
    """One load on one server."""

    run: Run
    database: str
    writer: Program
    crowd: Program
    session: str
    server: Server
    streams: int
    recording: str

    def product(self) -> dict[str, Any]:
        """The product; what it sends at the base rate is recorded."""
        with self.server(self.database, _PRODUCT, environment=_SETTINGS) as server:
            connected = self._connect(
                server, [f"/ws/streams/{key_of(one)}/?offset=tail" for one in self._watched()]
            )
            steps = self._steps(server, self._append, recording=self.recording)
            self._ask(do="leave")
        return connected | {"steps": steps}

    def bare(self) -> dict[str, Any]:
        """The bare app with what the product sent."""
        with self.server(self.database, _BARE, environment={"FANOUT_RECORDING": self.recording}) as server:
            paths = [f"/{number}/{stream}" for number, stream in enumerate(self._watched())]
            connected = self._connect(server, paths, replay=True)

            def play(schedule: Schedule) -> float:
                address = f"http://{urlsplit(server.url).netloc}/?schedule={quote(json.dumps(schedule))}"
                urllib.request.urlopen(address).close()
                return 0.0

            steps = self._steps(server, play)
            self._ask(do="leave")
        return connected | {"steps": steps}

    def _watched(self) -> list[int]:
        """The stream of each viewer."""
        return [number % self.streams for number in range(self.run.options.viewers)]

    def _append(self, schedule: Schedule) -> float:
        self.writer.tell(schedule)
        return float(self.writer.hear()["busy"])

    def _ask(self, **message: Any) -> Any:
        self.crowd.tell(message)
        return self.crowd.hear()

    def _connect(self, server: WebServer, paths: list[str], *, replay: bool = False) -> dict[str, Any]:
        where = urlsplit(server.url)
        before = resident_bytes(server.pid)
        seconds = self._ask(
            do="connect",
            host=where.hostname,
            port=where.port,
            paths=paths,
            streams=self._watched(),
            headers={"Cookie": f"sessionid={self.session}", "Origin": "http://127.0.0.1"},
            replay=replay,
        )["seconds"]
        grown = resident_bytes(server.pid) - before
        return {
            "connecting_seconds": round(seconds, 2),
            "kib_per_socket": round(grown / 1024 / len(paths), 1),
        }

    def _steps(
        self, server: WebServer, play: Callable[[Schedule], float], *, recording: str | None = None
    ) -> list[dict[str, Any]]:
        """The base rate, then higher ones as long as they are held."""
        self._step(server, play, RATE, _WARM_UP_SECONDS)  # opens the writer's and the notifier's connections
        steps = [self._step(server, play, RATE, self.run.seconds)]
        if recording:
            self._ask(do="record", file=recording)
        for multiple in STEPS:
            if not is_held(steps[-1]):
                break
            steps.append(self._step(server, play, RATE * multiple, self.run.seconds / 2))
        return steps

    def _step(
        self, server: WebServer, play: Callable[[Schedule], float], rate: float, seconds: float
    ) -> dict[str, Any]:
        """Send to each viewer so many chunks a second, for so long."""
        count = max(1, round(rate * seconds))
        schedule = Schedule(time.monotonic_ns() + _LEAD_NS, round(1e9 / rate), count, self.streams)
        cpu = cpu_seconds(server.pid)
        with self.run.progress(f"{self.streams} streams, {rate:g}/s", seconds):
            self.crowd.tell({"do": "watch", "schedule": schedule, "patience_seconds": _PATIENCE_SECONDS})
            writer_cores = play(schedule)
            seen = self.crowd.hear()
        cpu = max(cpu_seconds(server.pid) - cpu, 1 / _TICKS_PER_SECOND)
        return {
            "offered_per_second": round(rate * self.run.options.viewers),
            "chunks_per_second": round(seen["chunks"] / seen["seconds"]),
            "frames_per_second": round(seen["frames"] / seen["seconds"]),
            "p50_ms": round(seen["latency_ms"]["p50"], 2),
            "p99_ms": round(seen["latency_ms"]["p99"], 2),
            "max_ms": round(seen["latency_ms"]["max"], 2),
            "cpu_us": round(cpu * 1e6 / seen["frames"], 1),
            "server_cores": round(cpu / seen["seconds"], 2),
            "client_cores": round(seen["cores"], 2),
            "writer_cores": round(writer_cores, 2),
        }


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    """The memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def plot(figure: Figure, report: dict[str, Any]) -> None:
    """The cost of a frame, and p99 as the rate is raised."""
    cost, rates = figure.subplots(1, 2)
    rows = report["rows"]
    colors = {app: f"C{number}" for number, app in enumerate(dict.fromkeys(row["app"] for row in rows))}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for shift, (app, color) in zip((-0.2, 0.2), colors.items(), strict=True):
        of_app = [row for row in rows if row["app"] == app]
        cost.bar(
            [cases.index(row["case"]) + shift for row in of_app],
            [row["CPU µs/frame"] for row in of_app],
            width=0.4,
            color=color,
            label=app,
        )
    cost.set_xticks(range(len(cases)), [case.replace(", ", "\n") for case in cases], fontsize=8)
    cost.set_ylabel("CPU of the server per frame, µs")
    cost.legend()
    for one in report["data"]["measured"]:
        rates.plot(
            [step["offered_per_second"] for step in one["steps"]],
            [step["p99_ms"] for step in one["steps"]],
            marker=".",
            color=colors[one["app"]],
            linestyle=["-", "--", "-.", ":"][cases.index(one["case"]) % 4],
            label=f"{one['case']}: {one['app']}",
        )
    rates.set_yscale("log")
    rates.set_xlabel("chunks offered per second")
    rates.set_ylabel("p99, ms")
    rates.legend(fontsize=6)
