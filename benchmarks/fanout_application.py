"""The example project's ASGI application in a process set up as the README advises for busy servers."""

from __future__ import annotations

from benchmarks.fanout_load import spare_the_collector
from example_project.asgi import application

__all__ = ["application"]

spare_the_collector()
