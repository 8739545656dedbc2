"""The other end of a `Program`: JSON lines on standard input and output."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any


def say(message: Any) -> None:
    """Print a JSON line."""
    print(json.dumps(message, separators=(",", ":")), flush=True)


def hear() -> Any:
    """The next JSON line; leaves when whoever started this program is gone."""
    line = sys.stdin.readline()
    if not line:
        sys.exit("Nobody is there any more.")
    return json.loads(line)


def settle() -> None:
    """Be like a process that has run for a while: what was imported is collected, and not looked at again.

    Python would look at all of it (0.1 s and more) in the first seconds, and hardly ever later.
    """
    gc.collect()
    gc.freeze()
