"""The ASGI application of the servers in `chaos`: the example project's."""

from __future__ import annotations

import benchmarks.chaos_setup  # noqa: F401 - before any model
from example_project.asgi import application

__all__ = ["application"]
