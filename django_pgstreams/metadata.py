"""The field of a stream's metadata, in models and in their forms.

Invariant: what passes a form or `full_clean()` can be stored. Django's own JSON fields let through what
`jsonb` refuses, and fail on what Python cannot read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import models
from django.forms.fields import InvalidJSONInput

from . import codec

if TYPE_CHECKING:
    _JSONField = models.JSONField[Any, Any]
else:
    _JSONField = models.JSONField


class MetadataFormField(forms.JSONField):
    """Django's, for any text."""

    def to_python(self, value: Any) -> Any:
        """Django's; a number that is too long for Python, or a nest too deep, is an error of the form too."""
        try:
            return super().to_python(value)
        except (ValueError, RecursionError) as error:
            raise ValidationError(self.error_messages["invalid"], code="invalid") from error

    def bound_data(self, data: Any, initial: Any) -> Any:
        """What was typed, as it was: what it stands for may have no form that can be sent."""
        return initial if self.disabled or data is None else InvalidJSONInput(data)


class MetadataField(_JSONField):
    """JSON that a `jsonb` column can hold; null is `{}`."""

    # None is empty to Django, which would leave it as it is.
    empty_values = ()

    def to_python(self, value: Any) -> Any:
        """The value, or `{}` for None."""
        return {} if value is None else super().to_python(value)

    def validate(self, value: Any, model_instance: models.Model | None) -> None:
        """Raise `ValidationError`, with the place that is wrong, unless the value can be stored."""
        codec.check_metadata(value)
        super().validate(value, model_instance)

    def formfield(self, **kwargs: Any) -> Any:
        """Django's, with `MetadataFormField`."""
        return super().formfield(**{"form_class": MetadataFormField, **kwargs})
