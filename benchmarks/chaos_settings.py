"""The settings of all that `chaos` runs: the example project's, with the deadlines of a hasty world.

Connections are kept, as those of a busy site. What is shortened is what would only make the run longer.
"""

from __future__ import annotations

from example_project.settings import *  # noqa: F403

DATABASES["default"]["CONN_MAX_AGE"] = 60  # noqa: F405
DATABASES["default"]["CONN_HEALTH_CHECKS"] = True  # noqa: F405
DATABASES["default"]["OPTIONS"] |= {"application_name": "chaos-django", "connect_timeout": 5}  # noqa: F405

PGSTREAMS = {
    "PERMISSION": "benchmarks.chaos_settings.anybody",
    "HEALTH_CHECK_SECONDS": 3.0,
    "QUERY_TIMEOUT_SECONDS": 5.0,
    "IDLE_SECONDS": 5.0,
    # Small, so that they are full at once, and slow readers fall out of them.
    "WINDOW_BYTES": 32_768,
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"timed": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "timed"}},
    "loggers": {"django_pgstreams": {"handlers": ["console"], "level": "INFO"}},
}


def anybody(user: object, stream: object, action: str) -> bool:
    """Everybody may follow: who the readers are is not what is tested."""
    return True
