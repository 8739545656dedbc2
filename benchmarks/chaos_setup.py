"""Imported first by every process of the product in `chaos`: it loads Django's apps."""

from __future__ import annotations

import django

django.setup()
