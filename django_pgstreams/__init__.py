"""Durable, resumable, low-latency streams for Django on Postgres alone."""

from __future__ import annotations

__version__ = "0.1.0"
