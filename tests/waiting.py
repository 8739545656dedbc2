"""Waiting for a condition, with a deadline: what tests do instead of sleeping."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_SECONDS = 120.0
_POLL_SECONDS = 0.01


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition()`; fails the test when the deadline passes before."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"Waited {DEADLINE_SECONDS:g} s in vain: {what}.")
        time.sleep(_POLL_SECONDS)
    return value
