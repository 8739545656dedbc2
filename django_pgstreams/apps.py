"""Wiring: receivers and checks. Nothing connects and no thread starts here."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from django.apps import AppConfig
from django.db.backends.signals import connection_created
from django.db.models import Model
from django.db.models.signals import post_save, pre_delete
from django.utils.translation import gettext_lazy as _


class PGStreamsConfig(AppConfig):
    """The app `pgstreams`."""

    name = "django_pgstreams"
    label = "pgstreams"
    verbose_name = _("Streams")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks, receivers, signals  # noqa: F401, PLC0415
        from .models import Chunk, Stream  # noqa: PLC0415

        post_save.connect(receivers.chunk_saved, sender=Chunk, dispatch_uid="pgstreams.saved")
        for model in _with_subclasses(Stream):  # Django names the proxy as the sender
            pre_delete.connect(receivers.stream_deleting, sender=model, dispatch_uid="pgstreams.deleting")
        signals.chunks_appended.connect(receivers.chunks_appended, dispatch_uid="pgstreams.appended")
        signals.stream_closed.connect(receivers.stream_closed, dispatch_uid="pgstreams.closed")
        connection_created.connect(receivers.maintenance_connected, dispatch_uid="pgstreams.maintenance")
        if celery_signals := sys.modules.get("celery.signals"):  # in a worker it is there by now
            celery_signals.worker_process_shutdown.connect(receivers.celery_child_ends, weak=False)


def _with_subclasses(model: type[Model]) -> Iterator[type[Model]]:
    yield model
    for subclass in model.__subclasses__():
        yield from _with_subclasses(subclass)
