"""One tree of errors, each of which Django and task queues can handle as their own."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
from django.core.exceptions import ObjectDoesNotExist, ValidationError

from django_pgstreams import exceptions
from django_pgstreams.models import Stream

ERRORS = [
    exceptions.StreamClosed("closed 100%", state="failed", reason="no disk"),
    exceptions.StreamMissing("missing"),
    exceptions.StreamBusy("busy"),
    exceptions.OffsetConflict("elsewhere", expected=3, actual=5),
    exceptions.AppendFailed("not stored"),
    exceptions.AppendUnknown("stored, or not"),
    exceptions.WriterFull("full"),
    exceptions.InvalidKey("bad key %s"),
    exceptions.InvalidPayload("bad payload {x}"),
    exceptions.ChunkImmutable("immutable"),
    exceptions.ManagedField("managed"),
    exceptions.StreamGap("gap", requested=1, first=501),
    exceptions.StreamReset("reset", epoch="e"),
]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


def test_the_list_above_is_the_whole_tree():
    public = {
        value
        for name, value in vars(exceptions).items()
        if inspect.isclass(value) and value.__module__ == exceptions.__name__ and name[0] != "_"
    }
    assert public == {type(error) for error in ERRORS} | {exceptions.PGStreamsError}
    assert all(issubclass(error, exceptions.PGStreamsError) for error in public)


def test_the_tree_in_the_modules_docstring_names_all():
    for error in ERRORS:
        assert f" ├─ {type(error).__name__} " in exceptions.__doc__.replace("└", "├")


@each_error
def test_its_text_is_its_message(error):
    message = error.message if isinstance(error, ValidationError) else error.args[0]
    assert str(error) == message
    assert type(error).__name__ in repr(error)


@each_error
@pytest.mark.parametrize(
    "copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"]
)
def test_it_survives_pickling_and_copying(error, copied):
    other = copied(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    for name in ("state", "reason", "expected", "actual", "requested", "first", "epoch", "code"):
        assert getattr(other, name, None) == getattr(error, name, None)


def test_a_missing_stream_is_djangos_does_not_exist():
    assert Stream.DoesNotExist is exceptions.StreamMissing
    assert issubclass(exceptions.StreamMissing, ObjectDoesNotExist)


@pytest.mark.django_db
def test_a_lookup_raises_it():
    with pytest.raises(exceptions.StreamMissing):
        Stream.objects.get(key="nowhere")


@pytest.mark.parametrize("error", [exceptions.InvalidKey("x"), exceptions.InvalidPayload("x")])
def test_invalid_values_are_validation_errors_with_a_code(error):
    assert isinstance(error, ValidationError)
    assert error.messages == ["x"]
    assert error.code == error.error_code
