"""The example project's settings, with what tests change.

Tests have databases of their own (`test_…`), so a running demo is not disturbed.
"""

from __future__ import annotations

import os

from example_project.settings import *  # noqa: F403

DEBUG = False
SECRET_KEY = "tests"
# Hashing passwords slowly is for real users.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# Runs that share a server at the same time each name a database of their own.
if os.environ.get("TEST_DB"):
    DATABASES["default"]["TEST"] = {"NAME": f"test_{os.environ['TEST_DB']}"}  # noqa: F405
