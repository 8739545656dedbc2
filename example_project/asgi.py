"""The example project's ASGI application: Django's pages, and the streams' websockets."""

from __future__ import annotations

import os

from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
# Before the imports below: it loads the apps, whose models the routing needs.
django_application = get_asgi_application()

from django_pgstreams.auth import AuthMiddlewareStack  # noqa: E402
from django_pgstreams.routing import websocket_urlpatterns  # noqa: E402

application = ProtocolTypeRouter(
    {
        "http": django_application,
        "websocket": AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns))),
    }
)
