from __future__ import annotations

import math
import threading

import pytest

from django_pgstreams.polling import Finds, Schedule, Tally


def polls(schedule, until, *, hears, since=0.0):
    """The times at which polls were due, looking four times a second."""
    times = [since + step / 4 for step in range(int((until - since) * 4) + 1)]
    return [time for time in times if schedule.is_due(time, hears=hears)]


def test_it_polls_slowly_where_wake_ups_are_heard():
    first, *others = polls(Schedule(5, 0.25, now=0), 20, hears=True)
    assert 2.5 <= first <= 5.25
    assert others == [first + 5, first + 10] + [first + 15] * (first <= 5)


def test_processes_that_start_together_spread_their_polls():
    assert len({Schedule(5, 0.25, now=0).due_at for _ in range(10)}) > 1


def test_it_polls_fast_while_they_are_not_and_at_once_not_after_a_slow_interval():
    schedule = Schedule(300, 0.25, now=0)
    assert polls(schedule, 10, hears=True) == []
    assert polls(schedule, 12, hears=False, since=10.25)[:2] == [10.5, 10.75]
    assert polls(schedule, 100, hears=True, since=12.25) == [12.25]


def test_the_fast_rate_is_never_slower_than_the_slow_one():
    assert len(polls(Schedule(1, 60, now=0), 10, hears=False)) >= 9


@pytest.fixture
def finds():
    """A poll of the streams 1 and 2 has begun, and found the first to have moved to 10."""
    made = Finds()
    assert made.polled([1, 2]) == 0
    made.read(1, 10)
    made.read(2, None)
    return made


def test_what_nothing_announces_counts_with_the_next_poll_and_once(finds):
    assert finds.polled([1, 2]) == 1
    assert finds.polled([1, 2]) == 0


@pytest.mark.parametrize(("tail", "changed", "counted"), [(9, False, 1), (10, False, 0), (9, True, 0)])
def test_what_is_announced_late_does_not_count(finds, tail, changed, counted):
    finds.announced(1, tail, changed=changed)
    assert finds.polled([]) == counted


def test_what_was_announced_before_it_was_read_does_not_count():
    finds = Finds()
    finds.polled([1])
    finds.announced(1, math.inf, changed=False)
    finds.read(1, 10)
    assert finds.polled([1]) == 0


def test_what_is_read_without_a_poll_does_not_count(finds):
    finds.read(1, 20)
    finds.read(3, 5)
    assert finds.polled([]) == 1


def test_a_tally_counts_for_all_threads():
    tally = Tally()
    threads = [threading.Thread(target=lambda: [tally.add(1) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.found == 4000
    assert tally.last_poll is not None
