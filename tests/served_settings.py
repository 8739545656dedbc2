"""Settings of a server that a test starts: the tests' own, and what SERVED_SETTINGS (JSON) adds.

`DATABASE` there adds to the settings of the database.
"""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403

_given = json.loads(os.environ["SERVED_SETTINGS"])
DATABASES["default"].update(_given.pop("DATABASE", {}))  # noqa: F405
globals().update(_given)
