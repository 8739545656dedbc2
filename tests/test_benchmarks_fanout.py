"""The benchmark of fan-out runs, and its viewers notice a frame that is lost, doubled, swapped or altered."""

from __future__ import annotations

import json

import pytest
from matplotlib.figure import Figure

from benchmarks import fanout
from benchmarks.__main__ import main
from benchmarks.fanout_load import CHUNK_BYTES, Schedule, as_stored, chunk_data, frame_of, key_of
from benchmarks.fanout_viewers import ReplayViewer, Viewer, WrongFrameError, frames
from django_pgstreams import wire

pytestmark = pytest.mark.once


def test_fanout_compares_the_product_with_the_bare_app(database_url, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fanout, "STEPS", (2,))
    code = main(
        ["fanout", "--seconds=0.4", "--viewers=4", "--database-url", database_url, f"--results={tmp_path}"]
    )
    printed = capfd.readouterr()
    assert (code, printed.err) == (0, "")
    assert printed.out.splitlines()[-1].startswith("fanout: daphne, one stream: CPU per frame")
    report = json.loads((tmp_path / "fanout.json").read_text())
    cases = [f"{name}, {load}" for name in ("daphne", "uvicorn") for load in ("one stream", "4 streams")]
    assert [(row["case"], row["app"]) for row in report["rows"]] == [
        (case, app) for case in cases for app in ("product", "bare app")
    ]
    assert all(row["frames/s"] > 0 and row["CPU µs/frame"] > 0 for row in report["rows"])
    assert len(report["bars"]) == 4
    assert {"fanout.py", "fanout_bare.py", "fanout_viewers.py"} <= set(report["scripts"])
    assert (tmp_path / "fanout.png").read_bytes().startswith(b"\x89PNG")


# Viewers -------------------------------------------------------------------------------------------


def websocket_frame(text: bytes) -> bytes:
    size = len(text)
    return b"\x81" + (bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big")) + text


@pytest.fixture
def viewer():
    viewer = Viewer(7)
    subscribed = {"type": "subscribed", "stream": key_of(7), "offset": 3}
    viewer.take(websocket_frame(json.dumps(subscribed).encode()), 0)
    return viewer


def test_frames_are_those_of_the_product():
    texts = [as_stored(chunk_data(7, offset)) for offset in (3, 4)]
    [(text, position)] = wire.chunk_frames(key_of(7), 3, texts, 10**6)
    assert (frame_of(7, 3, 5), position) == (text.encode(), 5)
    assert {len(as_stored(chunk_data(stream, 10**stream))) for stream in range(4)} == {CHUNK_BYTES}


def test_a_viewer_takes_what_comes_in_whatever_pieces(viewer):
    sent = b"".join(websocket_frame(frame_of(7, *place)) for place in ((3, 4), (4, 6), (6, 7)))
    for at in range(0, len(sent), 50):
        viewer.take(sent[at : at + 50], at)
    viewer.check()
    assert viewer.position == 7
    assert [(offset, position) for _, offset, position, _ in viewer.received] == [(3, 4), (4, 6), (6, 7)]


@pytest.mark.parametrize(
    "places",
    [[(4, 5)], [(3, 4), (3, 4)], [(3, 4), (5, 6)], [(3, 5), (4, 6)]],
    ids=["the first is lost", "doubled", "lost", "overlapping"],
)
def test_a_viewer_notices_chunks_that_do_not_follow(viewer, places):
    with pytest.raises(WrongFrameError, match="goes on at"):
        viewer.take(b"".join(websocket_frame(frame_of(7, *place)) for place in places), 0)


@pytest.mark.parametrize(
    "text",
    [
        frame_of(7, 3, 4).replace(b'"stream":7', b'"stream":8'),
        frame_of(8, 3, 4),
        frame_of(7, 3, 5).replace(b'"next":5', b'"next":4'),
        frame_of(7, 3, 4)[:-3] + b"y]}",
    ],
    ids=["another's chunk", "another stream", "one too many", "altered"],
)
def test_a_viewer_notices_what_a_frame_must_not_hold(viewer, text):
    viewer.take(websocket_frame(text), 0)
    with pytest.raises(WrongFrameError, match="cannot be"):
        viewer.check()


def test_a_viewer_notices_an_error_and_an_end(viewer):
    with pytest.raises(WrongFrameError, match="was sent"):
        viewer.take(websocket_frame(b'{"type":"gap"}'), 0)
    with pytest.raises(WrongFrameError, match="closes"):
        viewer.take(b"\x88\x02\x03\xe8", 0)


def test_a_viewer_of_the_bare_app_notices_what_was_not_recorded():
    viewer = ReplayViewer(7, [b"a", b"b"])
    for text in (b"a", b"b", b"a"):
        viewer.take(websocket_frame(text), 0)
    viewer.check()
    viewer.take(websocket_frame(b"a"), 0)
    with pytest.raises(WrongFrameError, match="Frame 3"):
        viewer.check()


@pytest.mark.parametrize("size", [0, 125, 126, 65_535])
def test_frames_of_any_size_are_found(size):
    sent = websocket_frame(b"x" * size)
    assert list(frames(sent + sent[:-1] if size else sent)) == [(1, b"x" * size, len(sent))]


# Figures -------------------------------------------------------------------------------------------


def test_chunks_are_due_one_per_interval_the_streams_spread():
    schedule = Schedule(1_000, 100, 3, 4)
    assert [schedule.due(0, nth) for nth in range(3)] == [1_000, 1_100, 1_200]
    assert [schedule.due(stream, 0) for stream in range(4)] == [1_000, 1_025, 1_050, 1_075]
    assert Schedule(0, 10**8, 30, 1).seconds == 3


def step(offered: int, delivered: int, p99_ms: float) -> dict[str, float]:
    return {"offered_per_second": offered, "chunks_per_second": delivered, "p99_ms": p99_ms}


def test_saturation_is_the_most_that_was_delivered_in_time():
    steps = [step(1_000, 1_001, 20), step(2_000, 1_980, 90), step(3_000, 2_400, 200)]
    assert fanout.saturation(steps) == 1_980
    assert fanout.saturation([step(1_000, 990, 20), step(2_000, 1_990, 400)]) == 990
    assert fanout.saturation([step(1_000, 700, 2_000)]) == 700


def test_the_plot_takes_any_number_of_cases():
    found = {"steps": [step(10, 10, 1.0)]}
    rows = [{"case": "a, b", "app": app, "CPU µs/frame": 2.0} for app in ("product", "bare app")]
    measured = [{"case": "a, b", "app": app, **found} for app in ("product", "bare app")]
    fanout.plot(Figure(), {"rows": rows, "data": {"measured": measured}})
