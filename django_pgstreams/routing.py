"""Websocket URLs, for `URLRouter`."""

from __future__ import annotations

from django.urls import re_path

from .consumers import StreamConsumer

websocket_urlpatterns = [
    re_path(r"^ws/streams/$", StreamConsumer.as_asgi()),
    re_path(r"^ws/streams/(?P<key>.+)/$", StreamConsumer.as_asgi()),
]
