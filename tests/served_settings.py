"""Settings of a server that a test starts: the tests' own, and what SERVED_SETTINGS (JSON) adds."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403

globals().update(json.loads(os.environ["SERVED_SETTINGS"]))
