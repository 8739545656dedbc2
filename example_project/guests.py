"""Visitors of the demo: each browser session is logged in as a user of its own.

So the demo runs with the default permission policy (a stream is for its owner) and no hook.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import wraps

from django.conf import settings
from django.contrib.auth import get_user_model, login
from django.http import HttpRequest, HttpResponse

View = Callable[..., HttpResponse]


def for_guests(view: View) -> View:
    """A view whose visitors are logged in: as who they are, else as a new guest."""

    @wraps(view)
    def guest_view(request: HttpRequest, *args: object, **kwargs: object) -> HttpResponse:
        if not request.user.is_authenticated:
            guest = get_user_model().objects.create_user(username=f"guest-{secrets.token_hex(4)}")
            login(request, guest, backend=settings.AUTHENTICATION_BACKENDS[0])
        return view(request, *args, **kwargs)

    return guest_view
