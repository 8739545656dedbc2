from __future__ import annotations

import random

from django_pgstreams.buffer import Batch, Buffer, WakeUp


def test_an_empty_buffer_is_false_and_gives_an_empty_batch():
    buffer = Buffer()
    assert not buffer
    assert buffer.take() == Batch((), everything=False)


def test_the_highest_tail_of_a_stream_stands_whatever_the_order():
    buffer = Buffer()
    buffer.add([WakeUp(1, 5), WakeUp(2, 1), WakeUp(1, 3)])
    buffer.add([WakeUp(1, 4)])
    assert set(buffer.take().wake_ups) == {WakeUp(1, 5), WakeUp(2, 1)}
    assert not buffer


def test_a_change_of_state_is_not_forgotten_when_later_tails_are_merged():
    buffer = Buffer()
    buffer.add([WakeUp(1, 5, changed=True), WakeUp(1, 6)])
    buffer.add([WakeUp(2, 2), WakeUp(2, 1, changed=True)])
    assert set(buffer.take().wake_ups) == {WakeUp(1, 6, changed=True), WakeUp(2, 2, changed=True)}


def test_a_batch_that_failed_is_merged_with_what_came_meanwhile():
    buffer = Buffer()
    buffer.add([WakeUp(1, 5, changed=True), WakeUp(2, 9)])
    failed = buffer.take()
    buffer.add([WakeUp(1, 7), WakeUp(2, 3), WakeUp(3, 1)])
    buffer.restore(failed)
    assert set(buffer.take().wake_ups) == {WakeUp(1, 7, changed=True), WakeUp(2, 9), WakeUp(3, 1)}


def test_past_its_bound_it_holds_everything_and_no_list():
    buffer = Buffer(max_streams=3)
    buffer.add(WakeUp(stream_id, 1) for stream_id in range(3))
    assert len(buffer) == 3
    buffer.add([WakeUp(3, 1)])
    assert len(buffer) == 0
    assert buffer
    assert buffer.take() == Batch((), everything=True)


def test_everything_comes_back_with_a_batch_that_failed():
    buffer = Buffer(max_streams=1)
    buffer.add([WakeUp(1, 1), WakeUp(2, 1)])
    failed = buffer.take()
    buffer.add([WakeUp(3, 4)])
    buffer.restore(failed)
    assert buffer.take() == Batch((WakeUp(3, 4),), everything=True)


def test_a_batch_that_comes_back_may_overflow_too():
    buffer = Buffer(max_streams=2)
    buffer.add([WakeUp(1, 1), WakeUp(2, 1)])
    failed = buffer.take()
    buffer.add([WakeUp(3, 1)])
    buffer.restore(failed)
    assert buffer.take() == Batch((), everything=True)


def test_nothing_that_was_added_is_lost_in_any_order_of_adding_taking_and_failing():
    chance = random.Random(4)
    for _ in range(200):
        buffer = Buffer(max_streams=chance.choice([3, 1000]))
        waiting: dict[int, WakeUp] = {}  # what no flush has sent
        taken: list[Batch] = []
        for _ in range(60):
            match chance.randrange(4):
                case 0 | 1:
                    new = WakeUp(chance.randrange(6), chance.randrange(50), chance.random() < 0.2)
                    old = waiting.get(new.stream_id, new)
                    waiting[new.stream_id] = WakeUp(
                        new.stream_id, max(old.tail, new.tail), old.changed or new.changed
                    )
                    buffer.add([new])
                case 2:
                    taken.append(buffer.take())
                case _ if taken:
                    buffer.restore(taken.pop())
        for failed in taken:
            buffer.restore(failed)
        batch = buffer.take()
        found = {wake_up.stream_id: wake_up for wake_up in batch.wake_ups}
        assert batch.everything or found == waiting
        assert len(found) <= 1000
