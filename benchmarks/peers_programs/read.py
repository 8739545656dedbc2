"""Follows all streams of a peer: `python -m benchmarks.peers_programs.read PLAN`, PLAN as JSON.

It talks JSON lines: it says `following`; then `live` once the first chunk of each stream has arrived; waits
to be told what is `acknowledged` and when writing `ended`; and says what arrived, when all has, or when
nothing more comes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from typing import Any

from benchmarks.shared.talking import hear, say, settle

from .peer import load
from .received import Received
from .work import STREAMS

PATIENCE_SECONDS = 30.0
QUIET_SECONDS = 3.0
"""What has not come when nothing came for so long is lost: longer than any peer's polling."""


def main(plan: dict[str, Any]) -> None:
    peer = load(plan)
    received = Received()

    def read() -> None:
        try:
            peer.read(received, plan)  # returns where streams end by themselves
        except BaseException:  # noqa: BLE001 - whatever it was, it is printed, and ends the program
            if not received.finished:
                traceback.print_exc()
                os._exit(1)  # without its reader the program has nothing to report

    threading.Thread(target=read, name="peer-reader", daemon=True).start()
    if not received.following.wait(PATIENCE_SECONDS):
        sys.exit("The reader does not get to follow.")
    say("following")
    if not received.wait_for([1] * STREAMS, quiet_seconds=PATIENCE_SECONDS):
        sys.exit(f"The first chunks do not arrive: {received.counts}")
    settle()
    say("live")
    told = hear()
    received.wait_for(told["acknowledged"], quiet_seconds=QUIET_SECONDS)
    received.finished = True
    say(received.report(told["ended"]))
    hear()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
