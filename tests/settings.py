"""The example project's settings, with what tests change.

Tests have databases of their own (`test_…`), so a running demo is not disturbed.
"""

from __future__ import annotations

from example_project.settings import *  # noqa: F403

DEBUG = False
SECRET_KEY = "tests"
# Hashing passwords slowly is for real users.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
