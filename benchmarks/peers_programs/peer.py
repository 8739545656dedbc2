"""Loads a peer's module in a program: with Django set up, where it lives in a Django project."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any, Protocol

import django

from .received import Received
from .work import Work


class PeerModule(Protocol):
    """What the modules of the peers have."""

    def prepare(self, plan: dict[str, Any]) -> None:
        """Make the tables and streams, once, before all else."""

    def write(self, work: Work, plan: dict[str, Any]) -> None:
        """Run the writers."""

    def read(self, received: Received, plan: dict[str, Any]) -> None:
        """Follow all streams for ever."""


def load(plan: dict[str, Any]) -> PeerModule:
    """The module that the plan names."""
    if plan["django"]:
        set_up_django(plan)
    return importlib.import_module(f"benchmarks.peers_programs.{plan['module']}")  # type: ignore[return-value]


def set_up_django(plan: dict[str, Any]) -> None:
    """Set Django up with the peer's settings."""
    os.environ["PEER_PLAN"] = json.dumps(plan)
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.peers_programs.django_settings"
    django.setup()
