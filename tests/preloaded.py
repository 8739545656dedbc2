"""What a preforking server loads before it forks: an application that has appended and followed by then.

Its one view appends in both ways, and has its process follow the stream too.
"""

from __future__ import annotations

import os
import threading

from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.db import connections
from django.http import HttpRequest, JsonResponse
from django.urls import path

wsgi = get_wsgi_application()
asgi = get_asgi_application()

# The apps are loaded.
from django_pgstreams.hub import subscribe  # noqa: E402
from django_pgstreams.models import Stream  # noqa: E402
from django_pgstreams.writer import StreamWriter  # noqa: E402

_stream = Stream.objects.get(key="preloaded")
_stream.append("loaded")
_writer = StreamWriter(_stream)
_writer.append("loaded")
next(iter(subscribe(_stream)))
if hasattr(os, "register_at_fork"):
    # On its way while a child begins: stored and announced once, by the parent.
    os.register_at_fork(before=lambda: _writer.append_nowait("forking"))

_following: set[int] = set()


def follow() -> None:
    """Follow the stream to its end, and store what came."""
    heard = [chunk.data for chunk in subscribe(_stream)]
    Stream.objects.get(key="heard").append([os.getpid(), heard])
    connections.close_all()


def append(request: HttpRequest) -> JsonResponse:
    """Append in both ways."""
    process = os.getpid()
    if process not in _following:
        _following.add(process)
        threading.Thread(target=follow).start()
    _stream.append(f"appended {process}")
    _writer.append(f"written {process}")
    return JsonResponse(process, safe=False)


urlpatterns = [path("", append)]
