from __future__ import annotations

import random

import pytest

from django_pgstreams.pages import Page, Run, StreamRow
from django_pgstreams.window import Window

NOW = 820_540_800_000_000  # microseconds, as Postgres counts them
PLENTY = 1_000_000


def run(first: int, count: int, size: int = 10) -> Run:
    return Run(first, [b"x" * size] * count, [NOW] * count)


def offsets(chunks: Run) -> list[int]:
    return [chunk.offset for chunk in chunks]


def test_a_new_window_is_empty_at_its_start():
    window = Window(7)
    assert (window.start, window.end, window.size_bytes) == (7, 7, 0)
    assert not window.slice(7, 10, PLENTY)


def test_it_grows_at_its_end_by_what_is_contiguous():
    window = Window(5)
    window.extend(run(5, 3), PLENTY)
    window.extend(run(6, 4), PLENTY)  # overlaps: 6 and 7 are there already
    assert (window.start, window.end) == (5, 10)
    assert offsets(window.slice(5, 100, PLENTY)) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("first", [0, 3, 9])
def test_a_run_that_does_not_continue_it_changes_nothing(first):
    window = Window(5)
    window.extend(run(5, 3), PLENTY)
    window.extend(run(first, 2), PLENTY)
    assert (window.start, window.end) == (5, 8)


def test_the_oldest_chunks_leave_it_beyond_the_bound():
    window = Window(0)
    window.extend(run(0, 10), 35)
    assert (window.start, window.end, window.size_bytes) == (7, 10, 30)
    assert not window.slice(6, 10, PLENTY)
    assert offsets(window.slice(7, 10, PLENTY)) == [7, 8, 9]


def test_the_newest_chunk_stays_however_large_it_is():
    window = Window(0)
    window.extend(run(0, 2), 100)
    window.extend(run(2, 1, size=5000), 100)
    assert (window.start, window.end) == (2, 3)
    assert offsets(window.slice(2, 10, 10)) == [2]


def test_a_slice_is_bounded_by_count_and_bytes_but_has_one_chunk_at_least():
    window = Window(0)
    window.extend(run(0, 10), PLENTY)
    assert offsets(window.slice(2, 3, PLENTY)) == [2, 3, 4]
    assert offsets(window.slice(2, 100, 25)) == [2, 3]
    assert offsets(window.slice(2, 100, 1)) == [2]
    assert not window.slice(10, 100, PLENTY)


def test_it_is_a_plain_list_with_a_bound_whatever_happens():
    chance = random.Random(8)
    for _ in range(300):
        start = chance.randrange(5)
        window = Window(start)
        stored = [b"x" * chance.choice([0, 1, 10, 60]) for _ in range(200)]
        times = [NOW + number for number in range(200)]
        end = start
        for _ in range(40):
            max_bytes = chance.choice([1, 50, 200])
            first = max(0, end + chance.randint(-4, 2))
            count = chance.randrange(8)
            window.extend(Run(first, stored[first : first + count], times[first : first + count]), max_bytes)
            if first <= end:
                end = max(end, min(first + count, 200))
            assert window.end == end
            held = stored[window.start : window.end]
            assert window.size_bytes == sum(map(len, held))
            if len(held) > 1 and count and first <= end:
                assert window.size_bytes <= 200
            position = chance.randrange(end + 3)
            limit = chance.randint(1, 6)
            ends = min(position + limit, end) if window.start <= position else position
            expected = Run(position, stored[position:ends], times[position:ends])
            assert window.slice(position, limit, PLENTY) == expected


def test_all_who_wait_for_the_latest_run_are_given_that_one():
    window = Window(5)
    window.extend(run(5, 2), PLENTY)
    latest = run(7, 3)
    window.extend(latest, PLENTY)
    assert window.slice(7, 3, PLENTY) is latest
    assert offsets(window.slice(7, 2, PLENTY)) == [7, 8]
    assert offsets(window.slice(7, 3, 20)) == [7, 8]
    assert offsets(window.slice(8, 3, PLENTY)) == [8, 9]


def test_a_latest_run_that_has_left_it_in_part_is_not_kept():
    window = Window(0)
    window.extend(run(0, 10), 50)
    assert (window.start, window.size_bytes) == (5, 50)
    assert not window.slice(0, 10, PLENTY)
    assert offsets(window.slice(5, 10, PLENTY)) == [5, 6, 7, 8, 9]
    assert window._latest is None


def test_what_has_left_it_takes_no_memory():
    window = Window(0)
    for first in range(0, 10_000, 10):
        window.extend(run(first, 10), 100)
    assert len(window._payloads) == len(window._times) <= 2 * (window.end - window.start) + 2


def timed(first: int, *times: int) -> Run:
    return Run(first, [b"x"] * len(times), list(times))


def page(first: int, *times: int, before: int | None = None, tail: int = 20) -> Page:
    return Page(first, StreamRow(1, "", "", "open", "", tail, 0), timed(first, *times), None, before)


def test_it_knows_the_time_before_each_position_also_before_what_it_has_dropped():
    window = Window(5, 40)
    window.extend(timed(5, 50, 60, 70), PLENTY)
    assert [window.before(position) for position in range(4, 10)] == [None, 40, 50, 60, 70, None]
    window.extend(timed(8, 80), 2)
    assert (window.start, window.before(7)) == (7, 60)


@pytest.mark.parametrize(
    ("found", "agrees"),
    [
        (page(8, 80, before=70), True),
        (page(8, 80, before=71), False),
        (page(8, before=None), True),
        (page(6, 60, 70, 80, before=50), True),
        (page(6, 60, 71, 81, before=50), False),
        (page(6, 61, before=50), False),
        (page(8, before=None, tail=7), False),
        (page(9, 91, before=81), True),
        (page(2, 21, 31), True),
        (page(2, 20, 30, 41), False),
        (page(3, 30, 40, 50), True),
        (page(3, 30, 40, 50, 60, 71, 81), False),
    ],
    ids=[
        "goes on",
        "goes on otherwise",
        "before is trimmed",
        "overlaps",
        "overlaps otherwise",
        "lies within otherwise",
        "beyond the tail",
        "lies behind",
        "lies before",
        "ends where it begins, otherwise",
        "begins before",
        "surrounds it otherwise",
    ],
)
def test_a_page_agrees_with_it_if_the_last_chunk_of_both_is_the_same(found, agrees):
    window = Window(5, 40)
    window.extend(timed(5, 50, 60, 70), PLENTY)
    assert window.agrees(found) == agrees
