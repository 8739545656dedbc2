"""Typed settings: the dict `PGSTREAMS` in the user's settings, read through on each access.

Intervals end in `_SECONDS`, sizes in `_BYTES`. A name that is not listed here is refused by a system
check (`django_pgstreams.checks`), so a misspelt setting cannot pass in silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured


@dataclass(frozen=True, slots=True)
class Settings:
    """One documented field per setting, with its default."""

    CHANNEL: str = "pgstreams"
    """The `NOTIFY` channel, at most 63 bytes (Postgres cuts longer names in silence)."""
    PERMISSION: str = "django_pgstreams.permissions.owner_or_model_permission"
    """Dotted path of the hook `(user, stream, action) -> bool`, sync or async."""
    NOTIFIER: str = "thread"
    """Who sends wake-ups: a `"thread"` of each process that appends, or the `"relay"` (a command) alone."""
    LISTEN_DATABASE: str = ""
    """Alias that `LISTEN` connects by, where the streams' own goes through a pooler; `""`: the same."""

    MAX_CHUNK_BYTES: int = 1024 * 1024
    """A larger payload is refused on append."""
    MAX_FRAME_BYTES: int = 256 * 1024
    """A websocket frame holds no more payload than this, unless a single chunk does."""
    MAX_SUBSCRIPTIONS: int = 100
    """Streams that one websocket may follow at a time."""
    MAX_UNACKED_BYTES: int = 1024 * 1024
    """A websocket is sent so much of a stream that its client has not acknowledged, but always one frame."""
    PAGE_CHUNKS: int = 1000
    """Chunks that one read of a stream brings at the most."""
    PAGE_BYTES: int = 1024 * 1024
    """Payload that one read brings at most, all its streams together (but always one chunk)."""
    WINDOW_BYTES: int = 1024 * 1024
    """Recent payload kept for each stream that is followed in this process."""
    WINDOWS_BYTES: int = 64 * 1024 * 1024
    """Bound on all windows of one event loop together: each stream gets its share."""

    FLUSH_INTERVAL_SECONDS: float = 0.01
    """Under load at most one flush of wake-ups in this time."""
    POLL_INTERVAL_SECONDS: float = 5.0
    """Followed streams are looked at this often even when no wake-up arrives."""
    FAST_POLL_INTERVAL_SECONDS: float = 0.25
    """Followed streams are looked at this often while wake-ups cannot be heard."""
    HEALTH_CHECK_SECONDS: float = 15.0
    """The listening connection proves that it is alive this often."""
    HEARTBEAT_SECONDS: float = 25.0
    """A websocket is sent a `ping` frame this often."""
    STALL_SECONDS: float = 60.0
    """A websocket that waits this long for its client to acknowledge, or to read, is closed."""
    LOCK_TIMEOUT_SECONDS: float = 2.0
    """`Stream.cancel()` waits this long for the stream's row, then raises `StreamBusy`."""
    QUERY_TIMEOUT_SECONDS: float = 15.0
    """A read or flush that takes longer is given up and tried again."""
    IDLE_SECONDS: float = 30.0
    """Raw connections that nobody uses are closed after this time."""
    EXIT_FLUSH_SECONDS: float = 2.0
    """A process that ends spends at most this long on its last flush."""

    WRITER_LOCK_TIMEOUT_SECONDS: float = 30.0
    """A `StreamWriter` waits this long for a stream's row that another transaction holds."""
    WRITER_OUTAGE_SECONDS: float = 60.0
    """A `StreamWriter` keeps appends this long while the database is away, then fails them."""
    WRITER_MAX_PENDING_BYTES: int = 64 * 1024 * 1024
    """What all `StreamWriter`s of a process may hold that is not stored yet."""

    READ_POOL_SIZE: int = 4
    """Connections that one event loop reads with at the most (one is kept for live reads)."""


_DEFAULTS = Settings()
_TYPES: dict[str, type] = {field.name: type(getattr(_DEFAULTS, field.name)) for field in fields(Settings)}
MAX_INTERVAL_SECONDS = 2_147_483
"""Postgres and the operating system's waits count milliseconds in 32 bits."""
_POSTGRES_NAME_BYTES = 63
_CHOICES = {"NOTIFIER": ("thread", "relay")}


def get() -> Settings:
    """The settings as they are now; raises `ImproperlyConfigured` for a wrong type or value.

    Unknown names are left to the system check, so that a deployment with a newer setting still runs.
    """
    given = getattr(settings, "PGSTREAMS", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured(_not_a_dict(given))
    if not given:
        return _DEFAULTS
    return Settings(**{name: _checked(name, given[name]) for name in given if name in _TYPES})


def problems() -> list[str]:
    """Everything that is wrong with `PGSTREAMS`, a sentence each."""
    given = getattr(settings, "PGSTREAMS", {})
    if not isinstance(given, dict):
        return [_not_a_dict(given)]
    found = []
    for name, value in given.items():
        if name not in _TYPES:
            found.append(f"PGSTREAMS has no setting {name!r}; it has {', '.join(sorted(_TYPES))}.")
            continue
        try:
            _checked(name, value)
        except ImproperlyConfigured as error:
            found.append(str(error))
    return found


def _not_a_dict(given: object) -> str:
    return f"PGSTREAMS must be a dict, not {type(given).__name__}."


def _checked(name: str, value: Any) -> Any:
    """The value if it has the setting's type and range, else `ImproperlyConfigured`."""
    wanted = _TYPES[name]
    right_type = isinstance(value, int | float if wanted is float else wanted)
    if not right_type or isinstance(value, bool):
        raise ImproperlyConfigured(f"PGSTREAMS[{name!r}] must be of type {wanted.__name__}, not {value!r}.")
    if wanted is not str and not 0 < value < math.inf:
        raise ImproperlyConfigured(f"PGSTREAMS[{name!r}] must be above 0 and finite, not {value!r}.")
    if wanted is float and value > MAX_INTERVAL_SECONDS:
        raise ImproperlyConfigured(
            f"PGSTREAMS[{name!r}] must be at most {MAX_INTERVAL_SECONDS} s (24 days), not {value!r}: "
            "Postgres can wait no longer."
        )
    if name in _CHOICES and value not in _CHOICES[name]:
        choices = " or ".join(map(repr, _CHOICES[name]))
        raise ImproperlyConfigured(f"PGSTREAMS[{name!r}] must be {choices}, not {value!r}.")
    if name == "READ_POOL_SIZE" and value < 2:
        raise ImproperlyConfigured(
            "PGSTREAMS['READ_POOL_SIZE'] must be at least 2: one connection serves live reads, "
            "the others catch-up."
        )
    if name == "CHANNEL":
        _check_channel(value)
    return value


def _check_channel(name: str) -> None:
    size_bytes = len(name.encode(errors="surrogatepass"))
    if not 0 < size_bytes <= _POSTGRES_NAME_BYTES:
        raise ImproperlyConfigured(
            f"PGSTREAMS['CHANNEL'] must have 1 to {_POSTGRES_NAME_BYTES} bytes, not {size_bytes}: Postgres "
            "would cut it, and nobody would be woken."
        )
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in name):
        raise ImproperlyConfigured(
            f"PGSTREAMS['CHANNEL'] must not hold NUL or lone surrogates, not {name!r}: Postgres takes none."
        )
