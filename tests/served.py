"""What a server that a test starts serves: the example project's websockets, and a look into its process."""

from __future__ import annotations

import json
from typing import Any

from channels.routing import ProtocolTypeRouter
from django.db import connection

# First: it loads the apps.
from example_project.asgi import application as example  # isort: skip
from django_pgstreams import hub
from tests.visits import tasks

HOOK_LOCK = 4242
"""The advisory lock at which `patient` waits."""


def patient(user: Any, stream: Any, action: str) -> bool:
    """A permission hook that allows everything, as soon as nobody holds its lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", [HOOK_LOCK])
    return True


class Counted:
    """A part of the application, and how often it runs now."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        try:
            await self._part(scope, receive, send)
        finally:
            self.running -= 1


websockets = Counted(example.application_mapping["websocket"])


async def look(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with the number of sockets and followers, and the app's tasks for sockets."""
    followers = hub.get("default").followers
    seen = {"sockets": websockets.running, "followers": followers, "tasks": sorted(tasks())}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


application = ProtocolTypeRouter({"http": look, "websocket": websockets})
