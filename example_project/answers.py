"""Questions and their answers: text/plain streams, a token of the language model per chunk."""

from __future__ import annotations

import secrets
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from django_pgstreams.models import Stream

from .ngram import NgramModel
from .producers import producers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.contrib.auth.models import AbstractBaseUser

CORPUS = Path(__file__).parent / "corpus" / "alice.txt"


@cache
def language_model() -> NgramModel:
    """The demo's model, trained on first use."""
    return NgramModel(CORPUS.read_text(encoding="utf-8"))


def start_answer(owner: AbstractBaseUser, prompt: str, *, tokens_per_second: float, length: int) -> Stream:
    """Create the stream of an answer and start the thread that writes it."""
    stream = Stream.objects.create(
        key=f"ask/{secrets.token_hex(6)}",
        owner=owner,
        content_type="text/plain",
        metadata={
            "prompt": prompt,
            "length": length,
            "seed": secrets.randbits(32),
            "tokens_per_second": tokens_per_second,
            "writer": producers.writer(),
        },
    )
    producers.start(stream, write_answer)
    return stream


def tokens(stream: Stream) -> Iterator[str]:
    """The whole answer of an answer's stream, as the model gives it."""
    asked = stream.metadata
    return language_model().answer(asked["prompt"], seed=asked["seed"], length=asked["length"])


def write_answer(stream: Stream) -> None:
    """Append the answer at the rate that was asked for, and close the stream."""
    interval = 1 / stream.metadata["tokens_per_second"]
    due = time.monotonic()
    for token in tokens(stream):
        if producers.stopping.wait(max(0, due - time.monotonic())):
            return
        stream.append(token)
        # A late token shifts the ones behind it: no burst to catch up.
        due = max(due + interval, time.monotonic())
    stream.close()
