"""Who may do what with a stream: the default policy, and the call of the project's hook.

A hook is `(user, stream, action) -> bool`, sync or async; `PGSTREAMS["PERMISSION"]` names it. Actions are
`"view"` and `"cancel"`. It is also called, with an unsaved `Stream`, for keys that do not exist, so that the
time a refusal takes does not tell them apart; the answer is ignored then. Only True allows; raising refuses.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError
from django.utils.module_loading import import_string

from . import conf, turns
from .models import Stream

logger = logging.getLogger(__name__)

Hook = Callable[[Any, Stream, str], bool | Awaitable[bool]]

_PERMISSIONS = {"view": "pgstreams.view_stream", "cancel": "pgstreams.change_stream"}


def owner_or_model_permission(user: Any, stream: Stream, action: str) -> bool:
    """The default policy: the active owner, or an active user with the object's or the model's permission."""
    if not user.is_active:
        return False
    if stream.owner_id is not None and stream.owner_id == user.pk:
        return True
    permission = _PERMISSIONS.get(action)
    return permission is not None and (user.has_perm(permission, stream) or user.has_perm(permission))


def hook() -> Hook:
    """The project's hook. Raises `ImproperlyConfigured` if the setting names nothing that can be called."""
    path = conf.get().PERMISSION
    try:
        found = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"PGSTREAMS['PERMISSION'] = {path!r} cannot be imported: {error}."
        ) from error
    if not callable(found):
        raise ImproperlyConfigured(f"PGSTREAMS['PERMISSION'] = {path!r} cannot be called.")
    return found  # type: ignore[no-any-return]


async def allowed(user: Any, stream: Stream, action: str) -> bool:
    """Ask the hook; whatever goes wrong refuses, and is logged.

    Raises `OperationalError` or `InterfaceError` when the database is away, which says nothing of the stream.
    """
    try:
        answer = await _ask(hook(), user, stream, action)
    except (OperationalError, InterfaceError):
        raise
    except Exception:
        logger.exception("The permission hook failed for stream %r; access is refused", stream.key)
        return False
    if answer and answer is not True:
        logger.warning(
            "The permission hook answered %r for stream %r; only True allows, access is refused",
            type(answer).__name__,
            stream.key,
        )
    return answer is True


async def _ask(policy: Hook, user: Any, stream: Stream, action: str) -> Any:
    """The answer of a hook: a function or a callable object; sync, async, or returning an awaitable."""
    if inspect.iscoroutinefunction(policy) or inspect.iscoroutinefunction(type(policy).__call__):
        answer = policy(user, stream, action)
    else:
        answer = await turns.run(policy, user, stream, action)
    return await answer if inspect.isawaitable(answer) else answer
