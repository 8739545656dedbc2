"""The tests' settings with another user model, hence with another database."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403

INSTALLED_APPS = ["tests.members", *INSTALLED_APPS]  # noqa: F405
AUTH_USER_MODEL = "members.Member"
DATABASES["default"]["TEST"] = {"NAME": f"test_members_{os.environ.get('TEST_DB', '')}"}  # noqa: F405
