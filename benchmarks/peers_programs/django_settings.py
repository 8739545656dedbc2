"""The Django project in which the peers that need one live, as their documentation sets it up.

The programs put the plan into the environment.
"""

from __future__ import annotations

import json
import os
from typing import Any

from example_project.embedded.url import database_settings

PLAN = json.loads(os.environ["PEER_PLAN"])
OPTIONS = PLAN["options"]

SECRET_KEY = "of a benchmark, not a secret at all, nor kept"
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1"]
USE_TZ = True
OURS = ["django.contrib.auth", "django.contrib.contenttypes", "django_pgstreams"]
INSTALLED_APPS = OPTIONS.get("apps", OURS)
DATABASES = {"default": database_settings(PLAN["database"])}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = OPTIONS.get("urls", "")
RAKAIA_STORE = "durable"


def channel_layer(backend: str) -> dict[str, Any]:
    """The entry of CHANNEL_LAYERS, as the READMEs show it."""
    if backend.startswith("channels_postgres"):
        return {"BACKEND": backend, "CONFIG": DATABASES["default"]}
    return {"BACKEND": backend, "CONFIG": {"hosts": [PLAN["redis"]]}}


if "layer" in OPTIONS:
    CHANNEL_LAYERS = {"default": channel_layer(OPTIONS["layer"])}
if "channels_postgres" in INSTALLED_APPS:
    DATABASES["channels_postgres"] = DATABASES["default"]
