"""Websocket URLs, for `URLRouter`."""

from __future__ import annotations

from typing import Any

from django.urls import re_path

from .consumers import StreamConsumer

# Django's types know views only; `URLRouter` is what takes ASGI applications.
_consumer: Any = StreamConsumer.as_asgi()

websocket_urlpatterns = [
    # With or without the last slash, and whatever the key: the consumer answers a wrong one with a close
    # code; a path without a route is an error of the server's, which a client takes for a lost network.
    re_path(r"^ws/streams/?$", _consumer),
    re_path(r"^ws/streams/(?P<key>(?s:.*?))/?$", _consumer),
]
