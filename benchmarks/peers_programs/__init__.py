"""The programs of the `peers` benchmark: one small module per peer, each a `peer.PeerModule`.

`prepare` makes the streams; `write` runs the writers of one process (`work.Work`); `read` follows all streams
from before the first write on, and hands what comes to `received.Received`. The programs of these names run
them. `catalogue` says what the peers are.
"""
