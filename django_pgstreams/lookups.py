"""Looking streams up for sockets: one query for all who ask at the same moment, an instance for each.

Invariant: nothing is kept from one moment to the next, so whoever asks sees what is stored now.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Collection
from functools import partial
from weakref import WeakKeyDictionary

from .models import Stream
from .turns import LookUp

_look_ups: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, LookUp[Stream]]] = WeakKeyDictionary()


async def stream(key: str, using: str) -> Stream | None:
    """The stream of a key in a database, or None."""
    by_alias = _look_ups.setdefault(asyncio.get_running_loop(), {})
    if using not in by_alias:
        by_alias[using] = LookUp(partial(_find, using))
    found = await by_alias[using].get(key)
    # Hooks and overrides may do with it what they like.
    return copy.copy(found)


def _find(using: str, keys: Collection[str]) -> dict[str, Stream]:
    return {found.key: found for found in Stream.objects.using(using).filter(key__in=keys)}
