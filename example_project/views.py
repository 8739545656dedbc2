"""The demo's pages. They show what is known when they load; the streams come over the websocket."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from django.shortcuts import get_object_or_404, redirect, render
from django.templatetags.static import static
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from django_pgstreams.exceptions import StreamClosed
from django_pgstreams.models import Stream

from .answers import start_answer
from .forms import AskForm, RunForm
from .guests import for_guests
from .programs import start_run

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

EARLIER = 8
IDEAS = [
    "Why is a raven like a writing-desk?",
    "Has anybody seen the Cheshire cat?",
    "Who lives at the bottom of the treacle-well?",
    "Where is the little golden key?",
]
CANCELLED = "Stopped by its reader."


@require_safe
@for_guests
def index(request: HttpRequest) -> HttpResponse:
    """What the demo shows, and where."""
    return render(request, "example_project/index.html")


@require_safe
def favicon(request: HttpRequest) -> HttpResponse:
    """The icon, for pages that name none."""
    return redirect(static("example_project/icon.svg"))


@require_http_methods(["GET", "HEAD", "POST"])
@for_guests
def ask(request: HttpRequest) -> HttpResponse:
    """A form for a question; posting it starts the answer and shows its page."""
    form = AskForm(request.POST or None)
    if form.is_valid():
        asked = form.cleaned_data
        stream = start_answer(
            request.user,
            asked["prompt"],
            tokens_per_second=asked["tokens_per_second"],
            length=asked["length"],
        )
        return redirect("answer", name=_name(stream))
    return _ask_page(request, form, None)


@require_safe
@for_guests
def answer(request: HttpRequest, name: str) -> HttpResponse:
    """One answer, while it is written and ever after."""
    stream = _own_stream(request, f"ask/{name}")
    asked = stream.metadata
    form = AskForm(
        initial={
            "tokens_per_second": f"{asked['tokens_per_second']:g}",
            "length": asked["length"],
        }
    )
    return _ask_page(request, form, stream)


@require_http_methods(["GET", "HEAD", "POST"])
@for_guests
def log(request: HttpRequest) -> HttpResponse:
    """A choice of programs; posting it starts one and shows its page."""
    form = RunForm(request.POST or None)
    if form.is_valid():
        stream = start_run(request.user, form.cleaned_data["program"])
        return redirect("run", name=_name(stream))
    return _log_page(request, form, None)


@require_safe
@for_guests
def run(request: HttpRequest, name: str) -> HttpResponse:
    """One run of a program, while it runs and ever after."""
    stream = _own_stream(request, f"log/{name}")
    return _log_page(request, RunForm(initial={"program": stream.metadata["program"]}), stream)


@require_POST
@for_guests
def stop(request: HttpRequest, kind: str, name: str) -> HttpResponse:
    """Cancel a stream of one's own: what the Stop button does when its websocket is not open."""
    with contextlib.suppress(StreamClosed):
        _own_stream(request, f"{kind}/{name}").cancel(CANCELLED)
    return redirect({"ask": "answer", "log": "run"}[kind], name=name)


def _ask_page(request: HttpRequest, form: AskForm, stream: Stream | None) -> HttpResponse:
    context = {
        "form": form,
        "stream": stream,
        "ideas": IDEAS,
        "earlier": _earlier(request, "ask/"),
    }
    return render(request, "example_project/ask.html", context)


def _log_page(request: HttpRequest, form: RunForm, stream: Stream | None) -> HttpResponse:
    context = {"form": form, "stream": stream, "earlier": _earlier(request, "log/")}
    return render(request, "example_project/log.html", context)


def _own_stream(request: HttpRequest, key: str) -> Stream:
    return get_object_or_404(Stream, key=key, owner=request.user)


def _earlier(request: HttpRequest, prefix: str) -> list[tuple[str, Stream]]:
    """The visitor's latest streams of a kind, each with the name in its address."""
    streams = Stream.objects.filter(owner=request.user, key__startswith=prefix)
    return [(_name(stream), stream) for stream in streams.order_by("-id")[:EARLIER]]


def _name(stream: Stream) -> str:
    return stream.key.partition("/")[2]
