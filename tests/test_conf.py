"""The settings: typed, read through, and wrong ones named."""

from __future__ import annotations

import dataclasses
import math

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_pgstreams import conf
from django_pgstreams.models import Stream

DEFAULTS = conf.Settings()
NAMES = [field.name for field in dataclasses.fields(conf.Settings)]
INTERVALS = [name for name in NAMES if name.endswith("_SECONDS")]
NUMBERS = [name for name in NAMES if not isinstance(getattr(DEFAULTS, name), str)]

WRONG = [
    ("POLL_INTERVAL_SECONDS", "5", "must be of type float, not '5'"),
    ("POLL_INTERVAL_SECONDS", None, "must be of type float, not None"),
    ("POLL_INTERVAL_SECONDS", True, "must be of type float, not True"),
    ("POLL_INTERVAL_SECONDS", 0, "must be above 0"),
    ("MAX_CHUNK_BYTES", 1.5, "must be of type int, not 1.5"),
    ("MAX_CHUNK_BYTES", False, "must be of type int, not False"),
    ("MAX_CHUNK_BYTES", -1, "must be above 0"),
    ("READ_POOL_SIZE", 1, "must be at least 2"),
    ("CHANNEL", 5, "must be of type str, not 5"),
    ("CHANNEL", b"pgstreams", "must be of type str"),
    ("CHANNEL", "", "must have 1 to 63 bytes, not 0"),
    ("CHANNEL", "x" * 64, "must have 1 to 63 bytes, not 64"),
    ("CHANNEL", "ü" * 32, "must have 1 to 63 bytes, not 64"),
    ("CHANNEL", "\ud800" * 22, "must have 1 to 63 bytes, not 66"),
    ("CHANNEL", "a\0b", r"must not hold NUL or lone surrogates, not 'a\x00b'"),
    ("CHANNEL", "a\ud800", r"must not hold NUL or lone surrogates, not 'a\ud800'"),
    ("PERMISSION", len, "must be of type str"),
    ("NOTIFIER", None, "must be of type str"),
    ("NOTIFIER", "", "must be 'thread' or 'relay', not ''"),
    ("NOTIFIER", "Thread", "must be 'thread' or 'relay', not 'Thread'"),
]


def test_without_settings_there_are_defaults(settings):
    settings.PGSTREAMS = {}
    assert conf.get() == DEFAULTS
    del settings.PGSTREAMS
    assert conf.get() == DEFAULTS
    assert conf.problems() == []


def test_settings_are_read_through(settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 1}
    assert conf.get() == dataclasses.replace(DEFAULTS, POLL_INTERVAL_SECONDS=1)
    settings.PGSTREAMS["POLL_INTERVAL_SECONDS"] = 2.5
    assert conf.get().POLL_INTERVAL_SECONDS == 2.5


def test_an_unknown_name_is_a_problem_but_stops_nobody(settings):
    settings.PGSTREAMS = {"POLL_INTERVAL": 1, "MAX_CHUNK_BYTES": 5}
    [problem] = conf.problems()
    assert "has no setting 'POLL_INTERVAL'" in problem
    assert "POLL_INTERVAL_SECONDS" in problem
    assert conf.get().MAX_CHUNK_BYTES == 5


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_value_is_refused_by_name(settings, name, value, message):
    settings.PGSTREAMS = {name: value}
    with pytest.raises(ImproperlyConfigured) as caught:
        conf.get()
    assert message in str(caught.value)
    assert conf.problems() == [str(caught.value)]
    assert f"PGSTREAMS['{name}']" in str(caught.value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_every_number_is_above_zero_and_finite(settings, name, value):
    settings.PGSTREAMS = {name: value}
    with pytest.raises(ImproperlyConfigured, match=name):
        conf.get()


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("value", [2_147_484, 3e6, 1e300])
def test_an_interval_longer_than_postgres_can_count_is_refused(settings, name, value):
    settings.PGSTREAMS = {name: value}
    with pytest.raises(ImproperlyConfigured, match=f"'{name}'. must be at most 2147483 s"):
        conf.get()
    assert len(conf.problems()) == 1


@pytest.mark.parametrize("seconds", [1e-9, conf.MAX_INTERVAL_SECONDS])
@pytest.mark.django_db
def test_postgres_takes_the_shortest_and_the_longest_interval(settings, seconds):
    settings.PGSTREAMS = dict.fromkeys(INTERVALS, seconds)
    assert conf.problems() == []
    stream = Stream.objects.create(key="a")
    stream.cancel()
    assert stream.state == "cancelled"


@pytest.mark.parametrize("value", ["x" * 63, "ü" * 31, "With Space"])
def test_a_channel_of_63_bytes_is_fine(settings, value):
    settings.PGSTREAMS = {"CHANNEL": value}
    assert conf.get() == dataclasses.replace(DEFAULTS, CHANNEL=value)


@pytest.mark.parametrize("value", ["thread", "relay"])
def test_wake_ups_are_sent_by_a_thread_or_by_the_relay(settings, value):
    settings.PGSTREAMS = {"NOTIFIER": value}
    assert value == conf.get().NOTIFIER
    assert conf.problems() == []


@pytest.mark.parametrize("value", [None, [], ["CHANNEL"], "CHANNEL", 5])
def test_only_a_dict_will_do(settings, value):
    settings.PGSTREAMS = value
    expected = f"PGSTREAMS must be a dict, not {type(value).__name__}."
    assert conf.problems() == [expected]
    with pytest.raises(ImproperlyConfigured, match=expected):
        conf.get()


def test_all_problems_are_told_at_once(settings):
    settings.PGSTREAMS = {"NOPE": 1, "MAX_CHUNK_BYTES": "1", "CHANNEL": ""}
    assert len(conf.problems()) == 3


def test_units_are_in_the_names():
    for name in NUMBERS:
        if isinstance(getattr(DEFAULTS, name), float):
            assert name.endswith("_SECONDS")
        else:
            assert name.endswith(("_BYTES", "_CHUNKS", "_SIZE", "_SUBSCRIPTIONS"))
