from __future__ import annotations

import datetime
import random
from typing import Any

import pytest

from django_pgstreams import pages, store
from django_pgstreams.models import Stream
from tests.following import store as append_quietly
from tests.following import trim

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def rows(
    chunks: list[tuple[int, bytes | None]], *, place: int = 1, tail: int = 10, first: int = 0
) -> list[tuple[Any, ...]]:
    """What `sql.PAGES` returns for one stream with these chunks at or after the position."""
    head = (place, 4, "epoch", "application/json", "open", "", tail, first)
    return [(*head, offset, payload, NOW) for offset, payload in chunks] or [(*head, None, None, None)]


def page(position: int, chunks: list[tuple[int, bytes | None]], **more: int) -> pages.Page:
    [found] = pages.from_rows([position], rows(chunks, **more))
    return found


def offsets(found: pages.Page) -> list[int]:
    return [chunk.offset for chunk in found.chunks]


def test_a_stream_that_does_not_exist_has_a_page_without_a_row():
    [found] = pages.from_rows([3], [(1, *[None] * 10)])
    assert found == pages.Page(3, None, [], None)
    assert found.at_tail


def test_a_page_begins_at_its_position():
    found = page(3, [(3, b"a"), (4, b"b")])
    assert offsets(found) == [3, 4]
    assert found.gap_to is None
    assert (found.next, found.at_tail) == (5, False)
    assert found.row == pages.StreamRow(4, "epoch", "application/json", "open", "", 10, 0)


def test_the_page_that_reaches_the_tail_says_so():
    assert page(8, [(8, b"a"), (9, b"b")]).at_tail


@pytest.mark.parametrize("position", [10, 11])
def test_at_or_beyond_the_tail_there_is_no_gap(position):
    found = page(position, [])
    assert (found.chunks, found.gap_to, found.at_tail) == ([], None, True)


def test_trimmed_chunks_are_a_gap_and_the_page_holds_nothing():
    found = page(2, [(5, b"a"), (6, b"b")], first=5)
    assert (found.chunks, found.gap_to) == ([], 5)


def test_a_hole_that_no_counter_tells_of_is_a_gap_too():
    assert page(2, [(5, b"a")]).gap_to == 5


def test_a_stream_without_a_chunk_left_has_a_gap_up_to_its_tail():
    assert page(2, [], first=10).gap_to == 10
    assert page(2, []).gap_to == 10


def test_rows_beyond_the_tail_are_not_of_the_stream_yet():
    assert offsets(page(8, [(8, b"a"), (9, b"b"), (10, b"stray")])) == [8, 9]
    found = page(10, [(10, b"stray")])
    assert (found.chunks, found.gap_to, found.at_tail) == ([], None, True)
    assert page(8, [(12, b"stray")]).gap_to == 10


def test_a_hole_inside_ends_the_page():
    assert offsets(page(2, [(2, b"a"), (3, b"b"), (5, b"c")])) == [2, 3]


def test_a_chunk_for_which_the_bytes_did_not_suffice_ends_the_page():
    found = page(2, [(2, b"a"), (3, None)])
    assert offsets(found) == [2]
    assert not found.at_tail
    assert offsets(page(2, [(2, None)])) == []
    assert page(2, [(2, None)]).gap_to is None


def test_pages_come_in_the_order_in_which_they_were_wanted():
    found = pages.from_rows([1, 4], [*rows([(1, b"a")], place=1), *rows([(4, b"b"), (5, b"c")], place=2)])
    assert [offsets(one) for one in found] == [[1], [4, 5]]


def test_no_page_is_ever_read_across_a_hole():
    chance = random.Random(15)
    for _ in range(2000):
        tail = chance.randrange(20)
        first = chance.randrange(tail + 1)
        stored = sorted(offset for offset in range(tail) if offset >= first or chance.random() < 0.3)
        stored = [offset for offset in stored if chance.random() < 0.8]
        position = chance.randrange(22)
        found = page(
            position,
            [(o, b"x" if chance.random() < 0.9 else None) for o in stored if o >= position],
            tail=tail,
            first=first,
        )
        assert offsets(found) == list(range(position, position + len(found.chunks)))
        assert set(offsets(found)) <= set(stored)
        if found.gap_to is not None:
            assert not found.chunks
            assert position < found.gap_to <= tail
            assert found.gap_to >= first


@pytest.fixture
def stored(live):
    made = [Stream.objects.create(key=f"pages/{number}") for number in range(3)]
    for stream in made:
        append_quietly(stream, 20)
    return made


def read(streams: list[Stream], positions: list[int], **bounds: int) -> list[pages.Page]:
    bounds = {"max_chunks": 1000, "max_bytes": 1_000_000, **bounds}
    return store.read_pages("default", [stream.pk for stream in streams], positions, **bounds)


@pytest.mark.usefixtures("live")
class TestOnTheServer:
    def test_one_statement_reads_every_stream_with_its_row(self, stored):
        found = read(stored, [0, 18, 20])
        assert [offsets(one) for one in found] == [list(range(20)), [18, 19], []]
        assert [one.row.stream_id for one in found] == [stream.pk for stream in stored]
        assert [one.row.next_offset for one in found] == [20, 20, 20]

    def test_the_same_stream_may_be_wanted_at_two_positions(self, stored):
        assert [offsets(one) for one in read([stored[0]] * 2, [19, 18])] == [[19], [18, 19]]

    def test_chunks_are_bounded_for_each_stream(self, stored):
        found = read(stored, [0, 5, 19], max_chunks=3)
        assert [offsets(one) for one in found] == [[0, 1, 2], [5, 6, 7], [19]]

    def test_bytes_are_bounded_for_all_together_and_one_chunk_always_comes(self, stored):
        for stream in stored:
            stream.append_many(["x" * 98] * 5)  # 100 bytes each
        assert [offsets(one) for one in read(stored, [20, 20, 20], max_bytes=1)] == [[20], [], []]
        assert [offsets(one) for one in read(stored, [20, 20, 20], max_bytes=650)] == [
            [20, 21, 22, 23, 24],
            [20, 21],
            [],
        ]

    def test_missing_trimmed_and_closed_streams_answer_too(self, stored):
        trim(stored[0], 7)
        stored[1].fail("broken")
        gone = Stream(pk=0)
        found = read([stored[0], stored[1], gone], [3, 20, 0])
        assert found[0].gap_to == 7
        assert (found[1].row.state, found[1].row.reason) == ("failed", "broken")
        assert found[2].row is None
