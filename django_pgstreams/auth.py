"""Channels' `AuthMiddlewareStack`, for servers to which crowds come back at once.

It does what Channels' does, but looks the session and the user of each socket up in a shared turn (`turns`).
"""

from __future__ import annotations

from typing import Any

from channels import auth
from channels.sessions import CookieMiddleware, SessionMiddleware

from . import turns

_get_user = auth.get_user.func  # type: ignore[attr-defined]  # the sync function that it wraps


class _AuthMiddleware(auth.AuthMiddleware):
    """Channels', whose look-up would open a connection of its own for each socket."""

    async def resolve_scope(self, scope: Any) -> None:
        scope["user"]._wrapped = await turns.run(_get_user, scope)


def AuthMiddlewareStack(inner: Any) -> Any:  # noqa: N802 - as Channels names it
    """Gives the websockets of `inner` their session and their user, by the session's cookie."""
    return CookieMiddleware(SessionMiddleware(_AuthMiddleware(inner)))
