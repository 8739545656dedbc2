"""Every kind of fault that `chaos` knows."""

from __future__ import annotations

from benchmarks.chaos_context import Fault
from benchmarks.chaos_faults_network import BlackHole, ConnectionsReset, LostAtCommit
from benchmarks.chaos_faults_notifications import NotificationsFail, NotificationsLost, QueueFull
from benchmarks.chaos_faults_processes import (
    ReaderKilled,
    ReaderStopped,
    RelayKilled,
    ServerKilled,
    WriterKilled,
)
from benchmarks.chaos_faults_resources import DiskSlow, RowsLocked
from benchmarks.chaos_faults_servers import (
    FailedOver,
    RestartedFast,
    RestartedImmediately,
    SessionFrozen,
    SessionKilled,
    SessionsTerminated,
)

FAULTS: tuple[type[Fault], ...] = (
    *(WriterKilled, ServerKilled, RelayKilled, ReaderKilled, ReaderStopped),
    *(SessionsTerminated, SessionKilled, SessionFrozen, RestartedFast, RestartedImmediately, FailedOver),
    *(BlackHole, ConnectionsReset, LostAtCommit),
    *(NotificationsFail, NotificationsLost, QueueFull),
    *(RowsLocked, DiskSlow),
)
