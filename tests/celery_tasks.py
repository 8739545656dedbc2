"""A Celery application whose tasks append, as does its worker before it forks; the broker is a directory."""

from __future__ import annotations

import os
from typing import Any

import django
from celery import Celery
from celery.signals import worker_init
from django.apps import apps

if not apps.ready:
    django.setup()

from django_pgstreams.hub import subscribe
from django_pgstreams.models import Stream
from django_pgstreams.writer import StreamWriter

KEY = "celery"
app = Celery("tests", broker="filesystem://", task_ignore_result=True)


def use_broker(directory: str) -> None:
    """Pass messages as files in a directory."""
    app.conf.broker_transport_options = {
        "data_folder_in": directory,
        "data_folder_out": directory,
        "control_folder": f"{directory}/control",
    }


if directory := os.environ.get("CELERY_BROKER_DIRECTORY"):
    use_broker(directory)


@worker_init.connect
def prepare(**given: Any) -> None:
    """In the worker's first process: threads run and connections are open when it forks."""
    stream = Stream.objects.get(key=KEY)
    stream.append("prepared")
    StreamWriter(stream).append("prepared")
    next(iter(subscribe(stream)))


@app.task
def append(number: int) -> None:
    """Append in both ways, the last time without waiting for an answer; then the process may end."""
    stream = Stream.objects.get(key=KEY)
    stream.append([number, "appended", os.getpid()])
    writer = StreamWriter(stream)
    writer.append([number, "written", os.getpid()])
    writer.append_nowait([number, "written at last", os.getpid()])
