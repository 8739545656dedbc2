"""Makes a peer's tables and streams: `python -m benchmarks.peers_programs.prepare PLAN`, PLAN as JSON."""

from __future__ import annotations

import json
import sys

from benchmarks.shared.talking import say

from .peer import load

if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    load(plan).prepare(plan)
    say("prepared")
