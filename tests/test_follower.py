"""What a feed tells those who wait for it; how followers get on is tested with the hub."""

from __future__ import annotations

import asyncio
import datetime

import pytest

from django_pgstreams.follower import Closed, Feed
from django_pgstreams.pages import Page, Run, StreamRow
from django_pgstreams.window import Window

ROW = StreamRow(1, "epoch", "application/json", "open", "", 2, 0)
NOTHING = Run(2, [], [])
QUIET = Page(2, ROW, NOTHING, None)
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
async def feed():
    """The feed of a stream that has been read up to its tail, where somebody waits."""
    feed = Feed(1)
    feed.row, feed.window = ROW, Window(2)
    feed.waiting.add(asyncio.get_running_loop().create_future())
    return feed


async def test_a_read_that_brings_nothing_new_wakes_nobody(feed):
    feed.take(QUIET, 1000)
    [future] = feed.waiting
    assert not future.done()
    older = ROW._replace(next_offset=1)
    feed.take(Page(1, older, Run(1, [], []), None), 1000)
    assert not future.done()


@pytest.mark.parametrize(
    "page",
    [
        Page(2, ROW._replace(next_offset=3), Run(2, [b"3"], [NOW]), None),
        Page(2, ROW._replace(next_offset=3), NOTHING, None),
        Page(2, ROW, Run(2, [b"3"], [NOW]), None),
        Page(2, ROW._replace(state="completed"), NOTHING, None),
        Page(2, ROW._replace(first_offset=2), NOTHING, None),
        Page(2, ROW._replace(epoch="another"), NOTHING, None),
        Page(2, ROW, NOTHING, 5),
        Page(2, None, NOTHING, None),
    ],
    ids=["chunk", "tail", "chunk that was known of", "end", "trim", "epoch", "gap", "deletion"],
)
async def test_a_read_that_brings_news_wakes_everybody(feed, page):
    [future] = feed.waiting
    feed.take(page, 1000)
    assert future.done()
    assert not feed.waiting


async def test_whoever_is_to_learn_that_it_is_live_is_woken_by_any_read_once(feed):
    [future] = feed.waiting
    feed.live_is_news = True
    feed.take(QUIET, 1000)
    assert future.done()
    feed.waiting.add(later := asyncio.get_running_loop().create_future())
    feed.take(QUIET, 1000)
    assert not later.done()


async def test_a_page_of_other_chunks_empties_the_window_and_wakes_everybody(feed):
    [future] = feed.waiting
    feed.window = Window(2, 10)
    feed.take(Page(2, ROW, NOTHING, None, 11), 1000)
    assert feed.window is None
    assert future.done()


async def test_the_end_of_other_chunks_is_not_a_readers_end(feed):
    feed.take(Page(2, ROW._replace(state="completed"), NOTHING, None, 11), 1000)
    assert feed.end_at(2, 10) is None
    assert feed.end_at(2, 11) == feed.end_at(2, None) == Closed(2, "completed", "")


async def test_only_what_was_known_once_is_lost():
    feed = Feed(1)
    feed.take(QUIET, 1000)
    assert feed.losses == 0
    feed.take(Page(2, ROW._replace(epoch="another"), NOTHING, None), 1000)
    assert feed.losses == 1
