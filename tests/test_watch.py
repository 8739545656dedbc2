from __future__ import annotations

import pytest

from django_pgstreams.buffer import WakeUp
from django_pgstreams.watch import Block, Watch


def look(watch: Watch, positions: dict[int, int], now: float = 0.0, accept: bool = True) -> list[WakeUp]:
    """What a look that finds these positions announces."""
    read: dict[int, Block] = {}
    for number in {stream_id >> 8 for stream_id in positions}:
        streams = {one: position for one, position in positions.items() if one >> 8 == number}
        read[number] = Block(repr(sorted(streams.items())), streams)
    changed = watch.changed({number: block.digest for number, block in read.items()})
    found = sorted(watch.wake_ups(changed, read))
    if accept:
        watch.accept(changed, read, now)
    return found


@pytest.fixture
def watch():
    made = Watch(mark=1000, now=0.0)
    look(made, {1: 5, 2: 0, 300: 7})
    return made


def test_what_stays_as_it_was_is_not_announced(watch):
    assert look(watch, {1: 5, 2: 0, 300: 7}) == []


def test_a_tail_that_moved_is_announced(watch):
    assert look(watch, {1: 6, 2: 3, 300: 7}) == [WakeUp(1, 6), WakeUp(2, 3)]
    assert look(watch, {1: 6, 2: 3, 300: 7}) == []


def test_a_new_stream_is_announced_unless_it_is_empty(watch):
    assert look(watch, {1: 5, 2: 0, 3: 0, 4: 9, 300: 7, 9000: 1}) == [WakeUp(4, 9), WakeUp(9000, 1)]


def test_a_stream_that_is_open_no_more_is_announced_as_changed(watch):
    assert look(watch, {1: 5, 2: 0}) == [WakeUp(300, 7, changed=True)]
    assert look(watch, {2: 0}) == [WakeUp(1, 5, changed=True)]
    assert look(watch, {}) == [WakeUp(2, 0, changed=True)]
    assert look(watch, {}) == []


def test_a_stream_that_ends_above_the_mark_is_announced_once_with_its_tail(watch):
    assert look(watch, {1: 5, 2: 0, 300: ~8}) == [WakeUp(300, 8, changed=True)]
    assert look(watch, {1: 5, 2: 0, 300: ~8}) == []


def test_when_it_falls_below_the_mark_nothing_is_announced(watch):
    look(watch, {1: 5, 2: 0, 300: ~8})
    assert look(watch, {1: 5, 2: 0}) == []


def test_a_stream_that_was_never_seen_open_is_announced(watch):
    everything = {1: 5, 2: 0, 300: 7}
    assert look(watch, everything | {1001: ~0, 1002: ~4}) == [WakeUp(1001, 0, True), WakeUp(1002, 4, True)]


def test_a_tail_that_went_back_is_announced_as_changed(watch):
    """After a restore, say."""
    assert look(watch, {1: 4, 2: 0, 300: 7}) == [WakeUp(1, 4, changed=True)]


def test_a_stream_that_is_open_again_is_announced_as_changed(watch):
    look(watch, {1: ~5, 2: 0, 300: 7})
    assert look(watch, {1: 5, 2: 0, 300: 7}) == [WakeUp(1, 5, changed=True)]


def test_what_was_not_accepted_is_found_again_with_what_came_since(watch):
    assert look(watch, {1: 6, 2: 0}, accept=False) == [WakeUp(1, 6), WakeUp(300, 7, changed=True)]
    assert look(watch, {1: 9, 2: 1}) == [WakeUp(1, 9), WakeUp(2, 1), WakeUp(300, 7, changed=True)]


def test_only_blocks_with_another_digest_are_asked_for(watch):
    assert watch.changed({0: "[(1, 5), (2, 0)]", 1: "[(300, 7)]"}) == []
    assert watch.changed({0: "other", 1: "[(300, 7)]"}) == [0]
    assert watch.changed({0: "[(1, 5), (2, 0)]"}) == [1]
    assert watch.changed({0: "[(1, 5), (2, 0)]", 1: "[(300, 7)]", 7: "new"}) == [7]


def test_a_block_that_is_empty_when_it_is_read_is_forgotten(watch):
    changed = watch.changed({0: "other", 1: "other"})
    assert sorted(watch.wake_ups(changed, {})) == [
        WakeUp(1, 5, True),
        WakeUp(2, 0, True),
        WakeUp(300, 7, True),
    ]
    watch.accept(changed, {}, 0.0)
    assert watch.streams == 0
    assert watch.changed({}) == []


def test_the_mark_follows_the_highest_id_ten_to_twenty_seconds_later(watch):
    look(watch, {2000: 1}, now=9.0)
    assert watch.mark == 1000
    look(watch, {2000: 2}, now=11.0)
    assert watch.mark == 1000
    look(watch, {3000: 1}, now=20.0)
    assert watch.mark == 1000
    look(watch, {3000: 2}, now=22.0)
    assert watch.mark == 2000
    look(watch, {3000: 3}, now=60.0)
    assert watch.mark == 3000


def test_memory_is_that_of_the_watched_streams():
    watch = Watch(mark=0, now=0.0)
    for start in range(0, 100_000, 10_000):
        look(watch, dict.fromkeys(range(start, start + 10_000), 1))
    assert watch.streams == 10_000
    assert len(watch._blocks) < 50
