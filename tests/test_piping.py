from __future__ import annotations

from concurrent.futures import Future

import pytest

from django_pgstreams.exceptions import InvalidPayload, StreamClosed
from django_pgstreams.piping import Failed, Flow, Joiner

LIMIT = 1024 * 1024


# Joining -------------------------------------------------------------------------------------------


def joined(pieces, max_bytes):
    joiner = Joiner(max_bytes)
    values = [value for piece in pieces for value in joiner.add(piece)]
    return values, joiner.take()


def test_nothing_is_joined_without_a_size():
    assert joined(["a", "b", {"c": 1}], 0) == (["a", "b", {"c": 1}], [])


def test_strings_are_joined_until_they_are_as_long():
    assert joined(["ab", "cd", "ef", "g"], 4) == (["abcd"], ["efg"])


def test_a_string_that_would_make_it_longer_begins_the_next():
    assert joined(["abc", "de"], 4) == (["abc"], ["de"])


def test_length_is_that_of_the_bytes():
    assert joined(["ä", "ä", "ä"], 4) == (["ää"], ["ä"])


def test_a_long_string_is_left_as_it_is():
    assert joined(["a", "b" * 10, "c"], 4) == (["a", "b" * 10], ["c"])


def test_empty_strings_are_kept():
    assert joined(["", "a"], 4) == ([], ["a"])
    assert joined([""], 4) == ([], [""])


def test_bytes_are_joined_too_but_not_with_strings():
    assert joined([b"a", b"b", "c", b"d"], 9) == ([b"ab", "c"], [b"d"])


def test_anything_else_goes_alone_and_in_its_place():
    assert joined(["a", "b", {"c": 1}, "d", None, "e"], 9) == (["ab", {"c": 1}, "d", None], ["e"])


def test_text_that_cannot_be_stored_takes_none_with_it():
    assert joined(["a", "\ud800", "b"], 9) == (["a", "\ud800"], ["b"])


# The flow ------------------------------------------------------------------------------------------


class Timer:
    def __init__(self, seconds, function):
        self.seconds = seconds
        self.fire = function
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class Sent:
    """Stands where the writer is: what was sent, and the futures."""

    def __init__(self, **joins):
        self.values = []
        self.replies = []
        self.timers = []
        given = {"join_seconds": None, "join_bytes": None, "max_chunk_bytes": LIMIT, **joins}
        self.flow = Flow(self.send, self.start_timer, **given)

    def send(self, value):
        if value == "invalid":
            raise InvalidPayload("no")
        self.values.append(value)
        self.replies.append(Future())
        return self.replies[-1]

    def start_timer(self, seconds, function):
        self.timers.append(Timer(seconds, function))
        return self.timers[-1]

    def push(self, *pieces):
        for piece in pieces:
            self.flow.push(piece)


@pytest.mark.parametrize("nothing", [None, 0])
def test_pieces_are_sent_as_they_come(nothing):
    sent = Sent(join_seconds=nothing, join_bytes=nothing)
    sent.push("a", "b", 3)
    assert sent.values == ["a", "b", 3]
    assert sent.timers == []


def test_held_text_is_sent_by_its_timer_without_the_next_piece():
    sent = Sent(join_seconds=0.5)
    sent.push("a", "b")
    assert sent.values == []
    [timer] = sent.timers
    assert timer.seconds == 0.5
    timer.fire()
    assert sent.values == ["ab"]
    sent.push("c")
    assert len(sent.timers) == 2


def test_the_timer_counts_from_the_first_string_held():
    sent = Sent(join_seconds=0.5, join_bytes=4)
    sent.push("ab", "cd")
    assert sent.values == ["abcd"]
    assert sent.timers[0].is_cancelled
    sent.push("e", "f")
    assert len(sent.timers) == 2
    sent.timers[0].fire()  # it was on its way already
    assert sent.values == ["abcd", "ef"]
    assert sent.flow.wait_for(all_of_them=True) is sent.replies[0]


def test_text_joined_by_size_alone_waits_for_the_end():
    sent = Sent(join_bytes=100)
    sent.push("a", "b")
    assert (sent.values, sent.timers) == ([], [])
    sent.flow.flush()
    assert sent.values == ["ab"]


def test_text_joined_by_time_alone_is_bounded_all_the_same():
    sent = Sent(join_seconds=60)
    sent.push(*["x" * 1000] * 200)
    assert max(map(len, sent.values)) == 65_000


def test_joined_text_is_never_too_large_to_be_stored():
    sent = Sent(join_bytes=10_000, max_chunk_bytes=602)
    sent.push(*["\x01" * 30] * 20)
    sent.flow.flush()
    assert "".join(sent.values) == "\x01" * 600
    assert max(map(len, sent.values)) == 90
    tiny = Sent(join_bytes=10_000, max_chunk_bytes=3)
    tiny.push("a", "b")
    assert tiny.values == ["a", "b"]


def test_an_append_that_failed_is_found_at_the_next_piece_and_nothing_follows_it():
    sent = Sent()
    sent.push("a", "b")
    sent.replies[0].set_exception(StreamClosed("over"))
    sent.replies[1].set_result(1)
    with pytest.raises(Failed) as caught:
        sent.push("c")
    assert isinstance(caught.value.error, StreamClosed)
    sent.flow.flush()
    assert sent.values == ["a", "b", "c"]


def test_the_first_failure_is_the_one_that_is_told():
    sent = Sent()
    sent.push("a", "b")
    sent.replies[0].set_exception(InvalidPayload("first"))
    sent.replies[1].set_exception(InvalidPayload("second"))
    with pytest.raises(Failed, match="first"):
        sent.push("c")


def test_a_value_that_cannot_be_stored_fails_after_those_before_it():
    sent = Sent()
    sent.push("a")
    with pytest.raises(Failed, match="no"):
        sent.push("invalid")
    assert sent.values == ["a"]
    with pytest.raises(Failed, match="no"):
        sent.push("b")
    assert sent.values == ["a"]


def test_a_bounded_number_is_under_way():
    sent = Sent()
    sent.push(*range(256))
    assert sent.flow.wait_for() is None
    sent.push(256)
    assert sent.flow.wait_for() is sent.replies[0]
    sent.replies[0].set_result(0)
    sent.flow.settle()
    assert sent.flow.wait_for() is None
    assert sent.flow.wait_for(all_of_them=True) is sent.replies[1]
    sent.replies[1].set_exception(StreamClosed("over"))
    with pytest.raises(Failed):
        sent.flow.settle()


def test_what_is_done_needs_no_waiting():
    sent = Sent()
    for number in range(1000):
        sent.push(number)
        sent.replies[-1].set_result(number)
    assert sent.flow.wait_for() is None


def test_after_stop_nothing_is_sent_and_nobody_is_missed():
    sent = Sent(join_seconds=5)
    sent.push(1, "a")
    sent.flow.stop()
    [timer] = sent.timers
    assert timer.is_cancelled
    timer.fire()
    assert sent.values == [1]
    assert sent.flow.wait_for(all_of_them=True) is None
    sent.replies[0].set_exception(StreamClosed("over"))
