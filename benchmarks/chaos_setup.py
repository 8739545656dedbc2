"""Imported first by every process of the product in `chaos`: Django, and the defect if there is one."""

from __future__ import annotations

import django

django.setup()

from benchmarks import chaos_defective  # noqa: E402

chaos_defective.install()
