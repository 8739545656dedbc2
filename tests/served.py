"""What a server that a test starts serves: the example project's websockets, and a look into its process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from channels.routing import ProtocolTypeRouter

# First: it loads the apps.
from example_project.asgi import application as example  # isort: skip
from django_pgstreams import hub


async def look(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with the number of followers, and the names of the app's tasks for sockets."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    seen = {
        "followers": hub.get("default").followers,
        "tasks": sorted(name for name in names if name.startswith("pgstreams-") and name != "pgstreams-hub"),
    }
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(seen).encode()})


application = ProtocolTypeRouter({"http": look, "websocket": example.application_mapping["websocket"]})
