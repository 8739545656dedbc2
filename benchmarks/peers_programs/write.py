"""Writes to a peer: `python -m benchmarks.peers_programs.write PLAN`, PLAN as JSON.

It talks JSON lines: it says `ready` once its streams can be followed, and waits for a line to begin; says
`warm` once each has its first chunk; waits for the `seconds` to write; and says what is acknowledged.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.shared.talking import settle

from .peer import load
from .work import Work


def main(plan: dict[str, Any]) -> None:
    peer = load(plan)
    writers = range(plan["process"], plan["writers"], plan["processes"])
    settle()
    peer.write(Work(writers, plan["writers"], plan["in_flight"]), plan)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
