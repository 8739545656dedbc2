"""The relay of `chaos`: `manage.py pgstreams relay`."""

from __future__ import annotations

from django.core.management import call_command

import benchmarks.chaos_setup  # noqa: F401 - before any model

if __name__ == "__main__":
    call_command("pgstreams", "relay")
