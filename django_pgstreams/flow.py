"""Flow control of one subscription over a websocket: what was sent and is not acknowledged; pure.

Invariant: no more than `max_bytes` are unacknowledged, unless a single frame is larger; and what is kept to
know that does not grow with the number of frames.

The interleaving that matters: an acknowledgement is on its way when the stream goes on at 0 in another life.
It names a position and no life. Beyond what was sent in this life it is of the last one, and counts for
nothing. One that is not beyond that cannot be told from this life's, and counts. So near its beginning a life
may be sent ahead by more than `max_bytes`, until the reader has come to the reset: by what lies before the
position that the last life had been sent up to.
"""

from __future__ import annotations

_ENDS = 64
"""Neighbouring frames count as one while they have less than this fraction of the bound together."""


class Flow:
    """How far one reader was sent, and has acknowledged. Positions only grow, until `restart`."""

    def __init__(self, position: int, max_bytes: int) -> None:
        self.sent = position
        """The position after the last chunk that was sent."""
        self.acked = 0
        """The position that was acknowledged."""
        self.unacked_bytes = 0
        self._max_bytes = max_bytes
        self._ends: list[tuple[int, int]] = []  # unacknowledged frames: the position after, the size
        self._forgotten = 0  # what was sent before a restart may still be acknowledged

    def take(self, position: int, size_bytes: int) -> bool:
        """Count a frame, up to a position, as sent; False, and it may not be, if there is no room for it."""
        unacked_bytes = self.unacked_bytes + size_bytes
        if unacked_bytes > self._max_bytes and self.unacked_bytes:
            return False
        self.sent = position
        self.unacked_bytes = unacked_bytes
        ends = self._ends
        if ends and (ends[-1][1] + size_bytes) * _ENDS <= self._max_bytes:
            ends[-1] = position, ends[-1][1] + size_bytes
        else:
            ends.append((position, size_bytes))
        return True

    def has_room(self, size_bytes: int) -> bool:
        """Whether it is worth going on after a frame of this size found no room.

        Half of the bound has to be free: whoever goes on reads anew what he could not send.
        """
        room = self._max_bytes - self.unacked_bytes
        return not self.unacked_bytes or room >= max(size_bytes, self._max_bytes // 2)

    def was_sent(self, position: int) -> bool:
        """Whether this position can be acknowledged."""
        return position <= max(self.sent, self._forgotten)

    def acknowledge(self, position: int) -> bool:
        """Take an acknowledgement, also one within a frame; whether it is a new one, of this life."""
        if not self.acked < position <= self.sent:
            return False
        self.acked = position
        done = 0
        for end, size_bytes in self._ends:
            if end > position:
                break
            self.unacked_bytes -= size_bytes
            done += 1
        del self._ends[:done]
        return True

    def skip(self, position: int) -> None:
        """Go on at a later position: what lies before is no longer stored."""
        self.sent = position

    def restart(self) -> None:
        """Go on at 0, in another life of the stream: nobody has to acknowledge what was of the last one."""
        self._forgotten = max(self._forgotten, self.sent)
        self.sent = self.acked = self.unacked_bytes = 0
        self._ends.clear()
