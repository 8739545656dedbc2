"""What a reader may be sent before he acknowledges, counted without a socket."""

from __future__ import annotations

import random

from django_pgstreams.flow import Flow


def test_a_reader_who_acknowledges_nothing_gets_the_bound_and_no_more():
    flow = Flow(5, 100)
    taken = [flow.take(position, 30) for position in (6, 7, 8, 9)]
    assert taken == [True, True, True, False]
    assert (flow.sent, flow.acked, flow.unacked_bytes) == (8, 0, 90)
    assert flow.take(9, 10)
    assert not flow.take(10, 1)


def test_a_frame_larger_than_the_bound_is_sent_alone():
    flow = Flow(0, 100)
    assert flow.take(1, 5000)
    assert not flow.take(2, 1)
    assert not flow.has_room(1)
    assert flow.acknowledge(1)
    assert flow.has_room(5000)
    assert flow.take(2, 1)
    assert not flow.take(3, 5000)
    assert not flow.has_room(5000)


def test_an_acknowledgement_makes_room_for_the_frames_that_it_covers():
    flow = Flow(0, 100)
    for position in (10, 20, 30, 40):
        assert flow.take(position, 25)
    assert flow.acknowledge(19)  # in the middle of the second frame
    assert flow.unacked_bytes == 75
    assert flow.acknowledge(30)
    assert flow.unacked_bytes == 25
    assert flow.acknowledge(40)
    assert flow.unacked_bytes == 0
    assert flow.acked == flow.sent == 40


def test_an_old_acknowledgement_is_no_progress():
    flow = Flow(0, 100)
    flow.take(10, 50)
    assert flow.acknowledge(5)
    assert not flow.acknowledge(5)
    assert not flow.acknowledge(0)
    assert (flow.acked, flow.unacked_bytes) == (5, 50)


def test_only_what_was_sent_can_be_acknowledged():
    flow = Flow(7, 100)
    assert flow.was_sent(7)
    assert not flow.was_sent(8)
    flow.take(9, 1)
    assert flow.was_sent(9)
    assert not flow.was_sent(10)


def test_going_on_waits_until_half_is_free():
    flow = Flow(0, 100)
    for position in range(1, 11):
        assert flow.take(position, 10)
    for position in range(1, 5):
        flow.acknowledge(position)
        assert not flow.has_room(10)
    flow.acknowledge(5)
    assert flow.has_room(10)
    assert not flow.has_room(60)
    flow.acknowledge(6)
    assert flow.has_room(60)


def test_a_gap_is_acknowledged_as_what_was_sent():
    flow = Flow(0, 100)
    flow.take(10, 100)
    flow.skip(50)
    assert flow.was_sent(50)
    assert flow.acknowledge(50)
    assert flow.take(60, 100)


def test_a_restart_owes_nothing_and_forgives_what_was_on_its_way():
    flow = Flow(0, 100)
    flow.take(10, 100)
    flow.restart()
    assert (flow.sent, flow.acked, flow.unacked_bytes) == (0, 0, 0)
    assert flow.was_sent(10)
    assert not flow.was_sent(11)


def test_what_was_not_sent_in_this_life_is_acknowledged_for_the_last_one_only():
    flow = Flow(0, 100)
    flow.take(10, 100)
    flow.restart()
    assert flow.take(1, 100)
    assert not flow.acknowledge(10)
    assert (flow.acked, flow.unacked_bytes) == (0, 100)
    assert not flow.take(2, 1)
    assert flow.acknowledge(1)
    assert flow.take(2, 1)


def test_what_is_kept_does_not_grow_with_the_frames():
    flow = Flow(0, 1_000_000)
    for position in range(1, 100_001):
        assert flow.take(position, 10)
    assert flow.unacked_bytes == 1_000_000
    assert len(flow._ends) <= 2 * 64 + 1


def test_sizes_add_up_whatever_is_sent_and_acknowledged():
    numbers = random.Random(11)
    for max_bytes in (1, 100, 10_000):
        flow = Flow(0, max_bytes)
        sizes = {}
        for _ in range(5000):
            size = numbers.choice([1, 7, 60, 3000])
            if numbers.random() < 0.7:
                if flow.take(flow.sent + 1, size):
                    sizes[flow.sent] = size
            else:
                flow.acknowledge(numbers.randint(flow.acked, flow.sent))
            owed = sum(size for position, size in sizes.items() if position > flow.acked)
            # Frames that count as one are all owed until the last of them is acknowledged.
            assert owed <= flow.unacked_bytes <= owed + max_bytes / 64
            assert flow.unacked_bytes <= max_bytes or owed == flow.unacked_bytes
        flow.acknowledge(flow.sent)
        assert flow.unacked_bytes == 0
        assert flow._ends == []
