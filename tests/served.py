"""What a server that a test starts serves: the example project's websockets, and a look into its process."""

from __future__ import annotations

import json
from typing import Any

from channels.routing import ProtocolTypeRouter

# First: it loads the apps.
from example_project.asgi import application as example  # isort: skip
from django_pgstreams import hub
from tests.visits import tasks


async def look(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with the number of followers, and the names of the app's tasks for sockets."""
    seen = {"followers": hub.get("default").followers, "tasks": sorted(tasks())}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


application = ProtocolTypeRouter({"http": look, "websocket": example.application_mapping["websocket"]})
