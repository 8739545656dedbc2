"""The chaos benchmark: its checker finds what was fabricated, and a short run keeps every promise."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import chaos
from benchmarks.__main__ import main
from benchmarks.chaos_check import DUPLICATE, GAP, LOST, STORED_FIELDS, WRONG, Reading, Tables, check
from benchmarks.chaos_ledger import (
    FIELDS,
    RECORD_BYTES,
    Epochs,
    Kind,
    Lane,
    Ledger,
    Streams,
    data_of,
    key_of,
    lane_of,
    last_positions,
    stream_of,
    token_of,
)
from benchmarks.chaos_run import Ended
from benchmarks.chaos_schedule import Occurrence
from benchmarks.chaos_watch import Growing, Watch

# The checker -----------------------------------------------------------------------------------------

ONE, OTHER = Lane(1, 0).take(5), Lane(2, 0).take(5)
"""Tokens of two writers."""
REFUSED, UNKNOWN, ROLLED_BACK = Lane(3, 0).take(3)
STORED = [(1, 0, ONE[0]), (1, 1, OTHER[0]), (1, 2, ONE[1]), (2, 0, ONE[2]), (2, 1, UNKNOWN)]


def records(*entries):
    """A ledger of `(stream, kind, offset, token)`."""
    return np.array([(*entry, 0.0) for entry in entries], FIELDS)


class World:
    """A small run in which all is as promised; tests change it."""

    def __init__(self):
        self.stored = list(STORED)
        self.tails = {1: 3, 2: 2}
        self.states = {1: "completed", 2: "completed"}
        self.writing = [
            *((stream, Kind.ATTEMPT, -1, token) for stream, _, token in STORED),
            *((stream, Kind.STORED, offset, token) for stream, offset, token in STORED[:-1]),
            (2, Kind.UNKNOWN, -1, UNKNOWN),
            (1, Kind.ATTEMPT, -1, REFUSED),
            (1, Kind.ENDED, -1, REFUSED),
            (1, Kind.ATTEMPT, -1, ROLLED_BACK),
            (1, Kind.ROLLED_BACK, -1, ROLLED_BACK),
            (1, Kind.CLOSED, 3, -1),
        ]
        self.reading = [
            *((stream, Kind.READ, offset, token) for stream, offset, token in STORED),
            (1, Kind.END_SEEN, 3, -1),
            (2, Kind.END_SEEN, 2, -1),
        ]

    def findings(self):
        """What the checker says: what, stream, offset."""
        tables = Tables(np.array(sorted(self.stored), STORED_FIELDS), self.tails, self.states)
        found = check(
            tables, {"orm": records(*self.writing)}, {"async": Reading(records(*self.reading), 0, 1)}
        )
        return {(finding.what, finding.stream, finding.offset) for finding in found}


@pytest.fixture
def world():
    return World()


def test_a_run_in_which_all_is_as_promised_has_no_finding(world):
    assert world.findings() == set()


def test_an_acknowledged_chunk_that_is_not_stored_is_lost(world):
    world.stored.remove((1, 2, ONE[1]))
    world.tails[1] = 2
    assert (LOST, 1, 2) in world.findings()


def test_an_acknowledged_chunk_that_is_stored_elsewhere_is_lost(world):
    world.stored[0], world.stored[2] = (1, 0, ONE[1]), (1, 2, ONE[0])
    assert {(LOST, 1, 0), (LOST, 1, 2)} <= world.findings()


def test_a_piped_chunk_may_be_anywhere_but_must_be_stored(world):
    world.writing.remove((1, Kind.STORED, 2, ONE[1]))
    world.writing.append((1, Kind.STORED, -1, ONE[1]))
    assert world.findings() == set()
    world.writing += [(1, Kind.ATTEMPT, -1, ONE[4]), (1, Kind.STORED, -1, ONE[4])]
    assert world.findings() == {(LOST, 1, -1)}


def test_a_chunk_that_is_stored_twice_is_a_duplicate(world):
    world.stored.append((1, 3, ONE[0]))
    world.tails[1] = 4
    assert (DUPLICATE, 1, 3) in world.findings()


def test_an_unknown_chunk_may_be_stored_once_or_not_but_not_twice(world):
    world.stored.append((2, 2, UNKNOWN))
    world.tails[2] = 3
    assert (DUPLICATE, 2, 2) in world.findings()


def test_a_chunk_that_is_acknowledged_twice_is_a_duplicate(world):
    world.writing.append((1, Kind.STORED, 0, ONE[0]))
    assert world.findings() == {(DUPLICATE, 1, 0)}


def test_a_hole_in_the_table_is_a_gap(world):
    world.stored[2] = (1, 3, ONE[1])
    world.tails[1] = 4
    assert (GAP, 1, 2) in world.findings()


def test_a_tail_beyond_what_is_stored_is_a_gap(world):
    world.tails[2] = 5
    assert (GAP, 2, 2) in world.findings()
    world.tails = {1: 3, 2: 2, 3: 1}
    world.states[3] = "completed"
    assert (GAP, 3, 0) in world.findings()


@pytest.mark.parametrize("token", [-1, ONE[4]], ids=["of no payload", "of nobody"])
def test_a_chunk_that_nobody_wrote_is_wrong(world, token):
    world.stored.append((1, 3, token))
    world.reading.insert(0, (1, Kind.READ, 3, token))
    assert (WRONG, 1, 3) in world.findings()


def test_a_chunk_in_another_stream_than_it_was_meant_for_is_wrong(world):
    world.stored.append((2, 2, ONE[4]))
    world.writing.append((1, Kind.ATTEMPT, -1, ONE[4]))
    assert (WRONG, 2, 2) in world.findings()


@pytest.mark.parametrize("token", [REFUSED, ROLLED_BACK])
def test_a_chunk_that_is_stored_although_it_was_refused_is_wrong(world, token):
    world.stored.append((1, 3, token))
    assert (WRONG, 1, 3) in world.findings()


def test_a_writer_whose_appends_changed_places_is_noticed(world):
    world.stored[0], world.stored[2] = (1, 0, ONE[1]), (1, 2, ONE[0])
    assert (WRONG, 1, 2) in world.findings()


def test_a_stream_that_has_not_ended_or_has_another_tail_is_wrong(world):
    world.states[2] = "open"
    world.writing.append((2, Kind.CLOSED, 1, -1))
    assert world.findings() == {(WRONG, 2, 2), (WRONG, 2, 1)}


def test_what_a_reader_was_not_given_is_a_gap(world):
    world.reading.remove((1, Kind.READ, 1, OTHER[0]))
    assert world.findings() == {(GAP, 1, 1)}


def test_what_a_reader_did_not_live_to_see_is_a_gap(world):
    world.reading.remove((1, Kind.READ, 2, ONE[1]))
    assert world.findings() == {(GAP, 1, 2)}


def test_what_a_reader_was_given_again_is_a_duplicate(world):
    world.reading.insert(1, (1, Kind.READ, 0, ONE[0]))
    assert world.findings() == {(DUPLICATE, 1, 0)}


def test_a_reader_that_was_given_the_wrong_order_is_noticed(world):
    world.reading[0], world.reading[1] = world.reading[1], world.reading[0]
    assert {(GAP, 1, 0), (DUPLICATE, 1, 0)} <= world.findings()


def test_a_reader_that_was_given_something_else_than_is_stored_is_noticed(world):
    world.reading[0] = (1, Kind.READ, 0, OTHER[4])
    assert world.findings() == {(WRONG, 1, 0)}


@pytest.mark.parametrize("seen", [[], [(2, Kind.END_SEEN, 1, -1)], [(2, Kind.END_SEEN, 2, -1)] * 2])
def test_a_reader_that_sees_no_end_or_another_or_two_is_noticed(world, seen):
    world.reading.remove((2, Kind.END_SEEN, 2, -1))
    world.reading += seen
    assert world.findings() == {(GAP, 2, 2)}


@pytest.mark.parametrize("kind", [Kind.RESET, Kind.GAP])
def test_a_reader_that_is_told_to_begin_anew_is_noticed(world, kind):
    world.reading.append((2, kind, 1, -1))
    assert world.findings() == {(GAP, 2, 1)}


def test_a_reader_without_a_stream_that_is_its_own_is_noticed(world):
    world.reading = [*world.reading[:3], (1, Kind.END_SEEN, 3, -1)]
    assert world.findings() == {(GAP, 2, 0), (GAP, 2, 2)}


# Ledgers ---------------------------------------------------------------------------------------------


def test_a_ledger_that_was_cut_short_by_a_kill_goes_on_with_whole_records(tmp_path):
    path = tmp_path / "async.ledger"
    Ledger(path).write(Kind.READ, 7, [(0, ONE[0]), (1, ONE[1])])
    with path.open("ab") as file:
        file.write(b"\0" * (RECORD_BYTES - 1))
    assert last_positions(path) == {7: 2}
    assert len(Growing(path).read()) == 2
    Ledger(path).write(Kind.END_SEEN, 7, [(2, -1)])
    assert [int(kind) for kind in Growing(path).read()["kind"]] == [Kind.READ, Kind.READ, Kind.END_SEEN]
    assert last_positions(path) == {7: -1}


def test_tokens_are_unique_and_tell_their_lane_and_their_data():
    lanes = [Lane(1, 0), Lane(1, 1), Lane(2, 0)]
    tokens = [token for lane in lanes for _ in range(2) for token in lane.take(3)]
    assert len(set(tokens)) == len(tokens)
    assert [len(set(map(lane_of, tokens[at : at + 6]))) for at in (0, 6, 12)] == [1, 1, 1]
    assert [token_of(data_of(token)) for token in tokens] == tokens
    assert token_of(data_of(tokens[0]) | {"text": "else"}) == token_of("text") == token_of({}) == -1
    assert stream_of(key_of(17)) == 17


def test_what_is_kept_of_streams_is_there_for_the_next_life(tmp_path):
    streams = Streams(tmp_path)
    for stream in (1, 2):
        streams.begun(stream)
    streams.ended(1)
    assert Streams(tmp_path).news() == [1, 2, -1]
    assert streams.news() == [1, 2, -1]
    assert streams.news() == []
    epochs = Epochs(tmp_path / "epochs")
    epochs.note(1, "first")
    epochs.note(1, "second")
    assert Epochs(tmp_path / "epochs").get(1) == "first"
    assert not streams.is_finished
    Streams(tmp_path).finish()
    assert streams.is_finished


def test_recovery_waits_for_each_writer_and_then_for_each_reader(tmp_path):
    writer, reader = (Ledger(tmp_path / f"{name}.ledger") for name in ("orm", "async"))
    with Watch(tmp_path, ["orm"], {"async": (1, 2)}) as watch:
        assert watch.recovery(0, ["orm"], 0.0) == (0.0, "orm", False)
        writer.write(Kind.STORED, 1, [(0, ONE[0])])
        writer.write(Kind.STORED, 2, [(0, ONE[1])])  # no stream of this reader
        writer.write(Kind.UNKNOWN, 1, [(-1, ONE[2])])
        watch.look()
        assert (watch.acknowledged(), watch.errors("orm"), watch.lag("async")) == (2, 1, 1)
        assert watch.recovery(0, ["orm"], 0.0).is_well is False
        reader.write(Kind.READ, 1, [(0, ONE[0])])
        assert watch.recovery(0, ["orm"], 1e9).is_well
        assert watch.received("async") == 1


# The report ------------------------------------------------------------------------------------------


def ended(**changes):
    """A run of two minutes in which all went well."""
    whole = Ended(
        [],
        stored=200_000,
        acknowledged=200_000,
        unknown=9,
        received=400_000,
        streams=70,
        acknowledged_at=np.arange(10.0),
    )
    return replace(whole, memory={"daphne": (80.0, 90.0)}, **changes)


def occurrences(count=17, **changes):
    """So many faults, each of another kind as long as there are some."""
    whole = Occurrence("", True, 1.0, "orm", 0, 0.0, 1.0)
    kinds = [kind.kind for kind in chaos.FAULTS]
    return [replace(whole, kind=kinds[place % len(kinds)], **changes) for place in range(count)]


def missed(found, faults, seconds=120.0):
    return [bar.name for bar in chaos.bars(seconds, faults, found) if not bar.holds]


def test_a_good_run_misses_no_bar():
    assert missed(ended(), occurrences()) == []


def test_floors_grow_with_the_time():
    assert missed(ended(), occurrences(), 1200.0) == ["chunks checked", "faults observed", "least of a kind"]


@pytest.mark.parametrize(
    ("found", "faults", "name"),
    [
        (ended(), occurrences(observed=False), "faults observed"),
        (ended(), occurrences(recovery_seconds=7.1), "worst recovery"),
        (ended(stored=10), occurrences(), "chunks checked"),
        (ended(left_open={"pgstreams-reader": 1}), occurrences(), "connections left open"),
        (ended(above_budget={"pgstreams-listener": 1}), occurrences(), "connections above the budget"),
    ],
)
def test_each_bar_is_missed_by_what_is_beyond_it(found, faults, name):
    assert name in missed(found, faults)


def test_a_standstill_is_the_longest_time_without_an_acknowledgement():
    fault = Occurrence("", True, 2.0, "orm", 0, began=100.0, seconds=8.0)
    for times, standstill in [
        ([90, 101, 105, 109, 120], 4),
        ([90, 109, 120], 9),
        ([101, 104], 6),
        ([], 10),
    ]:
        assert fault.standstill_seconds(np.array(times, float)) == standstill


def test_rows_say_what_each_kind_of_fault_did():
    kind = chaos.FAULTS[0].kind
    faults = [*occurrences(1, errors=3), *occurrences(1, recovery_seconds=2.0, observed=False)]
    assert chaos.rows(faults, ended()) == [
        {
            "fault": kind,
            "made": 2,
            "observed": 1,
            "errors": 3,
            "standstill, worst s": 1.0,
            "recovery, median s": 1.5,
            "worst": 2.0,
        }
    ]


def test_the_plot_has_each_fault_and_each_recovery():
    figure = Figure()
    faults = occurrences()
    report = {
        "data": {
            "occurrences": [vars(fault) for fault in faults],
            "findings": [],
            "chunks": {"stored": 1},
        }
    }
    chaos.plot(figure, report)
    over_time, by_kind = figure.axes
    assert len(over_time.lines) == len(faults)
    assert len(by_kind.lines) == len(faults) + 1


# The command -----------------------------------------------------------------------------------------


QUICK = ("restart, fast", "session's process killed", "connections reset", "disk slow", "reader stopped")
"""Faults that are over soon and cannot go unobserved."""


@pytest.mark.once
def test_a_short_run_keeps_every_promise(tmp_path, monkeypatch, capfd):
    # How fast it is says nothing about a machine that others use as well.
    monkeypatch.setattr(chaos, "RECOVERY_SECONDS", 60.0)
    monkeypatch.setattr(chaos, "CHUNKS_FLOOR", 200_000)
    faults = [f"--fault={kind}" for kind in QUICK]
    code = main(["chaos", "--seconds=8", "--seed=1", *faults, f"--results={tmp_path}"])
    printed = capfd.readouterr()
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert code == 0, printed
    assert printed.out.splitlines()[-1].startswith("chaos: lost 0; duplicates 0; gaps 0;")
    assert report["data"]["findings"] == []
    assert report["data"]["chunks"]["received"] > report["data"]["chunks"]["stored"]
    assert any(row["observed"] for row in report["rows"])
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")
