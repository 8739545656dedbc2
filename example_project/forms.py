"""What a visitor can ask the demo to do, and the bounds of it."""

from __future__ import annotations

from django import forms

from .producers import producers
from .programs import PROGRAMS

MAX_TOKENS_PER_SECOND = 200


class AskForm(forms.Form):
    """A question to the language model."""

    prompt = forms.CharField(
        max_length=300,
        widget=forms.Textarea(attrs={"rows": 2, "placeholder": "Why is a raven like a writing-desk?"}),
        label="Your question",
    )
    tokens_per_second = forms.FloatField(
        min_value=1,
        max_value=MAX_TOKENS_PER_SECOND,
        initial=lambda: f"{producers.tokens_per_second:g}",
        label="Tokens per second",
        widget=forms.NumberInput(attrs={"step": "any"}),
    )
    length = forms.IntegerField(min_value=10, max_value=1000, initial=160, label="Tokens, about")


class RunForm(forms.Form):
    """A program to run."""

    program = forms.ChoiceField(
        choices=[(name, program.title) for name, program in PROGRAMS.items()],
        widget=forms.RadioSelect,
        initial="library",
        label="Program",
    )
