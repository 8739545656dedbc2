"""Durable, resumable, low-latency streams for Django on Postgres alone."""

__version__ = "0.1.0"
