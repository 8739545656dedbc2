"""The other end of a `Program`: JSON lines on standard input and output."""

from __future__ import annotations

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
