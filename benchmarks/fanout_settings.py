"""The settings of the servers in `fanout`: the example project's, with database connections that are kept.

Else each of a thousand sockets that open would make three, which is what would be measured.
"""

from __future__ import annotations

from example_project.settings import *  # noqa: F403

DATABASES["default"]["CONN_MAX_AGE"] = 60  # noqa: F405
