from __future__ import annotations

import datetime
import itertools
import random
from typing import Any

import pytest
from django.db import connection, transaction

from django_pgstreams import pages, sql
from django_pgstreams.models import Stream
from tests.following import store as append_quietly
from tests.following import trim

EARLIER = datetime.datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=datetime.UTC)
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
BINARY_TIMES = {EARLIER: (-1).to_bytes(8, "big", signed=True), NOW: (820_540_800_000_000).to_bytes(8, "big")}


def row(
    first_stored: int | None, payloads: list[bytes] | None = None, *, tail: int = 10, first: int = 0
) -> tuple[Any, ...]:
    """What `sql.PAGES` returns for one stream: stored at or after the position, and what of it fits."""
    times = None if payloads is None else BINARY_TIMES[NOW] * len(payloads)
    return (1, 4, "epoch", "application/json", "open", "", tail, first, first_stored, payloads, times)


def page(position: int, *what: Any, **more: int) -> pages.Page:
    [found] = pages.from_rows([position], [row(*what, **more)])
    return found


def offsets(found: pages.Page) -> list[int]:
    return [chunk.offset for chunk in found.chunks]


def test_a_stream_that_does_not_exist_has_a_page_without_a_row():
    [found] = pages.from_rows([3], [(1, *[None] * 10)])
    assert found == pages.Page(3, None, pages.Run(3, [], []), None)
    assert found.at_tail


def test_a_page_begins_at_its_position():
    found = page(3, 3, [b"a", b"b"])
    assert list(found.chunks) == [pages.StoredChunk(3, b"a", NOW), pages.StoredChunk(4, b"b", NOW)]
    assert found.gap_to is None
    assert (found.next, found.at_tail) == (5, False)
    assert found.row == pages.StreamRow(4, "epoch", "application/json", "open", "", 10, 0)


def test_a_chunk_has_the_time_at_which_it_was_stored():
    times = BINARY_TIMES[EARLIER] + BINARY_TIMES[NOW]
    [found] = pages.from_rows([3], [(*row(3, [])[:9], [b"a", b"b"], times)])
    assert found.chunks.created_at() == [EARLIER, NOW]


def test_the_page_that_reaches_the_tail_says_so():
    assert page(8, 8, [b"a", b"b"]).at_tail


@pytest.mark.parametrize("position", [10, 11])
def test_at_or_beyond_the_tail_there_is_no_gap(position):
    found = page(position, None)
    assert (offsets(found), found.gap_to, found.at_tail) == ([], None, True)


def test_trimmed_chunks_are_a_gap_and_the_page_holds_nothing():
    found = page(2, 5, first=5)
    assert (offsets(found), found.gap_to) == ([], 5)
    found = page(2, 2, [b"being trimmed"], first=5)
    assert (offsets(found), found.gap_to) == ([], 5)


def test_a_hole_that_no_counter_tells_of_is_a_gap_too():
    assert page(2, 5).gap_to == 5


def test_a_stream_without_a_chunk_left_has_a_gap_up_to_its_tail():
    assert page(2, None, first=10).gap_to == 10
    assert page(2, None).gap_to == 10


def test_a_page_for_which_the_bytes_did_not_suffice_is_empty():
    found = page(2, 2)
    assert (offsets(found), found.gap_to, found.at_tail) == ([], None, False)


def test_pages_come_in_the_order_in_which_they_were_wanted():
    found = pages.from_rows([1, 4], [row(1, [b"a"]), row(4, [b"b", b"c"])])
    assert [offsets(one) for one in found] == [[1], [4, 5]]


def seen_from(position: int, before: int | None, *, tail: int = 10) -> pages.Page:
    """An empty page, with the time of the chunk before it."""
    found = pages.from_rows(
        [position], [(*row(None, tail=tail), None if before is None else before.to_bytes(8, "big"))]
    )
    return found[0]


@pytest.mark.parametrize(
    ("found", "before", "continues"),
    [
        (seen_from(5, 700), 700, True),
        (seen_from(5, 700), 800, False),
        (seen_from(5, 700), None, True),
        (seen_from(5, None), 700, True),
        (seen_from(5, 700, tail=4), 700, False),
        (seen_from(5, None, tail=4), None, False),
    ],
    ids=["same", "another", "nothing known", "trimmed", "beyond the tail", "beyond it, unknown"],
)
def test_a_page_continues_what_was_read_if_the_chunk_before_it_is_the_same(found, before, continues):
    assert found.continues(before) == continues


def test_a_page_knows_the_time_before_each_of_its_positions():
    times = BINARY_TIMES[EARLIER] + BINARY_TIMES[NOW]
    [found] = pages.from_rows([3], [(*row(3, [])[:9], [b"a", b"b"], times, (700).to_bytes(8, "big"))])
    assert [found.before_at(position) for position in (3, 4, 5)] == [700, -1, 820_540_800_000_000]


@pytest.fixture
def stored(live):
    made = [Stream.objects.create(key=f"pages/{number}") for number in range(3)]
    for stream in made:
        append_quietly(stream, 20)
    return made


def read(streams: list[Stream], positions: list[int], **bounds: int) -> list[pages.Page]:
    bounds = {"max_chunks": 1000, "max_bytes": 1_000_000, **bounds}
    with connection.cursor() as cursor:
        cursor.execute(sql.PAGES, pages.parameters([stream.pk for stream in streams], positions, **bounds))
        return pages.from_rows(positions, cursor.fetchall())


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

    def test_a_hole_longer_than_a_page_is_one_gap_up_to_what_is_stored(self, stored):
        with connection.cursor() as cursor:
            cursor.execute(
                'DELETE FROM pgstreams_chunk WHERE stream_id = %s AND "offset" BETWEEN 2 AND 14',
                [stored[0].pk],
            )
        found = read([stored[0]] * 4, [0, 2, 12, 15], max_chunks=5)
        assert [offsets(one) for one in found] == [[0, 1], [], [], [15, 16, 17, 18, 19]]
        assert [one.gap_to for one in found] == [None, 15, 15, None]
        [far] = read([stored[0]], [2**63 - 1], max_chunks=5)
        assert far.gap_to is None

    def test_a_hole_is_passed_at_once_however_long_it_is(self, stored):
        far = 10**15
        with connection.cursor() as cursor:
            cursor.execute("UPDATE pgstreams_stream SET next_offset = %s WHERE id = %s", [far, stored[0].pk])
        stored[0].refresh_from_db()
        stored[0].append("beyond")
        [one] = read([stored[0]], [20], max_chunks=5)
        assert (offsets(one), one.gap_to) == ([], far)

    def test_bytes_are_bounded_for_all_together_and_one_chunk_always_comes(self, stored):
        for stream in stored:
            stream.append_many(["x" * 98] * 5)  # 100 bytes each
        assert [offsets(one) for one in read(stored, [20, 20, 20], max_bytes=1)] == [[20], [], []]
        assert [offsets(one) for one in read(stored, [20, 20, 20], max_bytes=450)] == [
            [20, 21, 22, 23, 24],
            [],
            [],
        ]

    def test_each_page_has_its_share_of_the_bytes(self, stored):
        for stream in stored:
            stream.append_many(["x" * 98] * 5)  # 100 bytes each
        assert [offsets(one) for one in read(stored, [20, 23, 20], max_bytes=500, max_page_bytes=201)] == [
            [20, 21, 22],
            [23, 24],
            [],
        ]

    def test_rows_beyond_the_tail_are_not_of_the_stream_yet(self, stored):
        with connection.cursor() as cursor:
            cursor.executemany(
                'INSERT INTO pgstreams_chunk (stream_id, "offset", payload, created_at) '
                "VALUES (%s, %s, %s, now())",
                [(stored[0].pk, 20, b"stray"), (stored[1].pk, 22, b"stray")],
            )
        found = read(stored[:1] * 2 + stored[1:2], [18, 20, 18])
        assert [offsets(one) for one in found] == [[18, 19], [], [18, 19]]
        assert [(one.gap_to, one.at_tail) for one in found] == [(None, True)] * 3

    def test_no_page_is_ever_read_across_a_hole(self, stored):
        chance = random.Random(15)
        for _ in range(30):
            gone = set(chance.sample(range(20), chance.randrange(8)))
            first = chance.choice([0, 0, 3, 20])
            limit = chance.randint(1, 25)
            with transaction.atomic(), connection.cursor() as cursor:
                gone |= set(range(first))
                cursor.execute('DELETE FROM pgstreams_chunk WHERE "offset" = ANY(%s)', [list(gone)])
                cursor.execute("UPDATE pgstreams_stream SET first_offset = %s", [first])
                found = read(stored[:1] * 23, range(23), max_chunks=limit)
                transaction.set_rollback(True)
            for position, one in enumerate(found):
                left = [offset for offset in range(position, 20) if offset not in gone]
                run = itertools.takewhile(lambda pair: pair[0] == pair[1], enumerate(left, position))
                assert offsets(one) == [offset for _, offset in run][:limit]
                if position >= 20 or position in left:
                    assert one.gap_to is None
                else:
                    seen = [offset for offset in left if offset < max(position, first) + limit]
                    assert one.gap_to == min(seen, default=min(20, max(position, first) + limit))

    def test_missing_trimmed_and_closed_streams_answer_too(self, stored):
        trim(stored[0], 7)
        stored[1].fail("broken")
        gone = Stream(pk=0)
        found = read([stored[0], stored[1], gone], [3, 20, 0])
        assert found[0].gap_to == 7
        assert (found[1].row.state, found[1].row.reason) == ("failed", "broken")
        assert found[2].row is None
