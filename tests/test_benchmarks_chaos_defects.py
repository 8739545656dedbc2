"""The benchmark `chaos` fails on a product with a defect, and says where: each is put into a real run."""

from __future__ import annotations

import contextlib
import json
import re

import pytest

from benchmarks import chaos, chaos_run, chaos_schedule
from benchmarks.__main__ import main
from benchmarks.chaos_defects import DEFECTS
from benchmarks.chaos_disk import disk
from benchmarks.chaos_faults_network import LostAtCommit
from benchmarks.chaos_faults_servers import SessionFrozen, SessionsTerminated
from benchmarks.shared.cluster import cluster

pytestmark = pytest.mark.once

FINDS = {
    "wake-up-dropped": "gaps",
    "announced-early": "gaps",
    "offset-skipped": "gaps",
    "no-fence": "duplicates",
    "stored-twice": "duplicates",
    "forgotten": "lost",
    "delivered-twice": "duplicates",
}
"""What each defect leads to."""
SHOWN_BY = {"no-fence": (SessionFrozen, 2), "stored-twice": (LostAtCommit, 2)}
"""The fault without which a defect does no harm, and for how many seconds it comes again."""


@pytest.fixture(scope="module")
def servers():
    """The disk, and the servers on it."""
    with disk() as slow_disk, cluster(synchronous=True, environment=slow_disk.environment) as made:
        yield slow_disk, made


@pytest.fixture
def _small(monkeypatch, servers):
    """A run of few processes, on servers that are there already."""
    slow_disk, made = servers
    monkeypatch.setattr(chaos, "disk", lambda: contextlib.nullcontext(slow_disk))
    monkeypatch.setattr(chaos, "cluster", lambda **_: contextlib.nullcontext(made))
    monkeypatch.setattr(chaos_run, "STREAMS", 16)
    monkeypatch.setattr(chaos_run, "SHARES", {"threads": 0.4})
    monkeypatch.setattr(chaos_run, "READERS", {"async": ("benchmarks.chaos_readers", 0, 1)})
    monkeypatch.setattr(chaos_run, "SERVERS", ())
    monkeypatch.setattr(chaos_run, "READERS_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(chaos_schedule, "RECOVERY_PATIENCE_SECONDS", 1.0)


def test_each_defect_is_known():
    assert FINDS.keys() == DEFECTS.keys()


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("defect", DEFECTS)
def test_the_run_fails_and_says_where(defect, monkeypatch, tmp_path, capfd):
    fault, seconds = SHOWN_BY.get(defect, (SessionsTerminated, 0.5))
    monkeypatch.setattr(chaos, "FAULTS", (fault,))
    code = main(["chaos", f"--seconds={seconds}", "--seed=1", f"--defect={defect}", f"--results={tmp_path}"])
    printed = capfd.readouterr()
    assert code == 1
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert FINDS[defect] in [bar["name"] for bar in report["bars"] if not bar["holds"]]
    what = FINDS[defect].removesuffix("s")
    assert re.search(rf"^{what}: stream 'chaos/\d+', offset \d+: ", printed.err, re.MULTILINE)
