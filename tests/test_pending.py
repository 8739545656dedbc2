from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from django_pgstreams.pending import Append, End, Pending, Segment

MANY = 10**9
COMPLETED = End("completed", "")


def append(stream_id, payload=b"x", expected_offset=None, **more):
    return Append(stream_id, str(stream_id), payload, more.pop("reply", None), None, expected_offset, **more)


def fill(pending, *appends):
    for one in appends:
        pending.add(one)
    return list(appends)


def contents(batch):
    return [(segment.lane.stream_id, segment.payloads) for segment in batch]


@pytest.fixture
def pending():
    return Pending(MANY)


# Batches -------------------------------------------------------------------------------------------


def test_a_batch_holds_what_waits_in_the_order_of_the_streams_ids(pending):
    fill(pending, append(3, b"a"), append(1, b"b"), append(3, b"c"), append(2, b"d"))
    assert contents(pending.take_batch(2000, MANY)) == [(1, [b"b"]), (2, [b"d"]), (3, [b"a", b"c"])]
    assert not pending.is_ready
    assert pending.take_batch(2000, MANY) == []


def test_a_stream_is_in_one_batch_at_a_time_and_goes_on_where_it_was(pending):
    fill(pending, append(1, b"a"))
    [segment] = pending.take_batch(2000, MANY)
    fill(pending, append(1, b"b"), append(2, b"c"))
    [other] = pending.take_batch(2000, MANY)
    assert contents([other]) == [(2, [b"c"])]
    pending.finish(segment, 1)
    assert contents(pending.take_batch(2000, MANY)) == [(1, [b"b"])]
    pending.finish(other, 1)
    assert pending


def test_what_a_batch_did_not_store_comes_back_to_the_front(pending):
    fill(pending, *(append(1, bytes([number])) for number in range(4)))
    [segment] = pending.take_batch(2000, MANY)
    fill(pending, append(1, b"\x04"))
    pending.finish(segment, 2)
    assert contents(pending.take_batch(2000, MANY)) == [(1, [b"\x02", b"\x03", b"\x04"])]


def test_each_stream_gets_its_share_of_a_batch_and_then_what_is_left(pending):
    fill(pending, *(append(1) for _ in range(100)), append(2), append(3), append(3))
    batch = pending.take_batch(9, MANY)
    assert [len(segment.payloads) for segment in batch] == [6, 1, 2]
    for segment in batch:
        pending.finish(segment, len(segment.appends))
    assert contents(pending.take_batch(2000, MANY)) == [(1, [b"x"] * 94)]


def test_more_streams_than_a_batch_holds_take_turns(pending):
    fill(pending, *(append(number) for number in range(5)))
    first = pending.take_batch(3, MANY)
    assert [segment.lane.stream_id for segment in first] == [0, 1, 2]
    fill(pending, append(0))
    for segment in first:
        pending.finish(segment, 1)
    assert [segment.lane.stream_id for segment in pending.take_batch(3, MANY)] == [0, 3, 4]


def test_a_batch_is_bounded_in_bytes_but_for_its_first_chunk(pending):
    fill(pending, append(1, b"x" * 60), append(1, b"y" * 60), append(2, b"z" * 60))
    sizes = []
    while pending:
        batch = pending.take_batch(2000, 100)
        sizes.append(sum(segment.size_bytes for segment in batch))
        for segment in batch:
            pending.finish(segment, len(segment.appends))
    assert sum(sizes) == 180
    assert max(sizes) <= 160
    fill(pending, append(1, b"x" * 1000))
    [segment] = pending.take_batch(2000, 100)
    assert segment.size_bytes == 1000


# Ends, markers, expected offsets -------------------------------------------------------------------


def test_the_end_of_a_stream_is_the_last_thing_in_its_segment(pending):
    fill(pending, append(1, b"a"), append(1, None, end=COMPLETED), append(1, b"late"))
    [segment] = pending.take_batch(2000, MANY)
    assert (segment.payloads, segment.end, segment.is_empty) == ([b"a"], COMPLETED, False)
    pending.finish(segment, 2)
    [rest] = pending.take_batch(2000, MANY)
    assert (rest.payloads, rest.end) == ([b"late"], None)


def test_a_marker_needs_no_database_and_keeps_its_place(pending):
    marker = append(1, None)
    fill(pending, marker)
    [segment] = pending.take_batch(2000, MANY)
    assert (segment.appends, segment.is_empty) == ([marker], True)
    pending.finish(segment, 1)
    assert not pending
    fill(pending, append(1, b"a"), append(1, None), append(1, b"b"))
    [segment] = pending.take_batch(1, MANY)
    assert [one.payload for one in segment.appends] == [b"a", None]


def test_expected_offsets_that_fit_each_other_share_a_batch(pending):
    fill(pending, append(1, expected_offset=5), append(1), append(1, expected_offset=7), append(1))
    [segment] = pending.take_batch(2000, MANY)
    assert (segment.expected_offset, len(segment.payloads)) == (5, 4)


@pytest.mark.parametrize("expected", [[None, 5], [5, 5], [5, 7], [5, None, 6]])
def test_an_expected_offset_that_does_not_follow_begins_a_batch_of_its_own(pending, expected):
    fill(pending, *(append(1, expected_offset=offset) for offset in expected))
    [segment] = pending.take_batch(2000, MANY)
    assert len(segment.payloads) == len(expected) - 1
    pending.finish(segment, len(segment.appends))
    [segment] = pending.take_batch(2000, MANY)
    assert segment.expected_offset == expected[-1]


# Parked lanes --------------------------------------------------------------------------------------


def test_a_parked_lane_is_in_no_batch_and_keeps_its_order_and_since_when(pending):
    fill(pending, append(1, b"a"), append(2, b"x"))
    locked, other = pending.take_batch(2000, MANY)
    pending.park(locked, 10.0)
    pending.finish(other, 1)
    fill(pending, append(1, b"b"))
    assert not pending.is_ready
    assert pending.parked == 1
    segment = pending.take_parked(2000, MANY)
    assert (segment.payloads, segment.lane.parked_at) == ([b"a", b"b"], 10.0)
    assert pending.take_parked(2000, MANY) is None
    pending.park(segment, 11.0)
    segment = pending.take_parked(2000, MANY)
    assert segment.lane.parked_at == 10.0
    pending.finish(segment, 1)
    assert contents(pending.take_batch(2000, MANY)) == [(1, [b"b"])]


def test_parked_lanes_are_tried_in_turn(pending):
    fill(pending, append(1), append(2))
    for segment in pending.take_batch(2000, MANY):
        pending.park(segment, 0.0)
    turns = []
    for _ in range(4):
        segment = pending.take_parked(2000, MANY)
        turns.append(segment.lane.stream_id)
        pending.park(segment, 1.0)
    assert turns == [1, 2, 1, 2]


def test_a_segment_can_take_its_whole_lane_to_be_refused(pending):
    made = fill(pending, *(append(1, bytes([number])) for number in range(5)))
    [segment] = pending.take_batch(2, MANY)
    segment.take_lane()
    assert segment.appends == made
    late = append(1, b"late")
    pending.add(late)
    pending.finish(segment, 5)
    [segment] = pending.take_batch(2, MANY)
    assert segment.appends == [late]


def test_all_that_is_in_no_batch_can_be_taken(pending):
    fill(pending, append(1), append(2), append(3), append(3))
    in_a_batch, parked = pending.take_batch(2, MANY)
    pending.park(parked, 0.0)
    taken = pending.take_all()
    assert {(one.lane.stream_id, len(one.appends)) for one in taken} == {(2, 1), (3, 2)}
    for segment in taken:
        pending.finish(segment, len(segment.appends))
    assert pending
    pending.finish(in_a_batch, 1)
    assert not pending
    assert pending.size_bytes == 0


# Bounded memory ------------------------------------------------------------------------------------


def test_what_does_not_fit_stands_outside_in_its_order():
    pending = Pending(1500)
    made = fill(pending, *(append(number % 2, b"x" * 100) for number in range(10)))
    assert pending.is_full
    order = []
    while pending:
        assert pending.size_bytes < 1500 + 500
        batch = pending.take_batch(1, MANY)
        for segment in batch:
            order += segment.appends
            pending.finish(segment, len(segment.appends))
    assert [one for one in order if one.stream_id] == [one for one in made if one.stream_id]
    assert [one for one in order if not one.stream_id] == [one for one in made if not one.stream_id]
    assert not pending.is_full


def test_a_small_append_does_not_overtake_one_that_stands_outside():
    pending = Pending(1000)
    fill(pending, append(1, b"x" * 500), append(1, b"x" * 500), append(1, b"y" * 500))
    batch = pending.take_batch(1, MANY)
    fill(pending, append(1, b"z"))
    pending.finish(batch[0], 1)
    payloads = []
    while pending:
        [segment] = pending.take_batch(1, MANY)
        payloads.append(segment.payloads[0][:1])
        pending.finish(segment, 1)
    assert payloads == [b"x", b"y", b"z"]


def test_who_was_cancelled_outside_is_not_let_in():
    pending = Pending(100)
    cancelled = Future()
    cancelled.cancel()
    fill(pending, append(1))
    gone = append(1, b"gone", reply=cancelled)
    gone.loop = object()
    fill(pending, gone, append(1, b"stays"))
    [segment] = pending.take_batch(2000, MANY)
    pending.finish(segment, 1)
    assert contents(pending.take_batch(2000, MANY)) == [(1, [b"stays"])]


def test_whatever_happens_each_stream_keeps_its_order_and_nothing_is_lost():
    for seed in range(200):
        chance = random.Random(seed)
        pending = Pending(chance.choice([600, 3000, MANY]))
        made: dict[int, list[Append]] = {number: [] for number in range(5)}
        done: dict[int, list[Append]] = {number: [] for number in range(5)}
        held: list[Segment] = []
        for _ in range(300):
            match chance.randrange(6):
                case 0 | 1:
                    one = append(chance.randrange(5), chance.choice([b"x", b"y" * 50, None]))
                    made[one.stream_id].append(one)
                    pending.add(one)
                case 2:
                    held += pending.take_batch(chance.randrange(1, 6), chance.randrange(1, 200))
                case 3:
                    if (parked := pending.take_parked(3, 100)) is not None:
                        held.append(parked)
                case _ if held:
                    segment = held.pop(chance.randrange(len(held)))
                    if chance.random() < 0.3:
                        pending.park(segment, 0.0)
                        continue
                    if chance.random() < 0.1:
                        segment.take_lane()
                    answered = chance.randrange(len(segment.appends) + 1)
                    done[segment.lane.stream_id] += segment.appends[:answered]
                    pending.finish(segment, answered)
        while pending or held:
            held += [*pending.take_batch(7, 300), *filter(None, [pending.take_parked(7, 300)])]
            for segment in held:
                done[segment.lane.stream_id] += segment.appends
                pending.finish(segment, len(segment.appends))
            held = []
        assert done == made
        assert (pending.size_bytes, pending.is_full) == (0, False)
