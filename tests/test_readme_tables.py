"""What README.md says of names, settings, frames and codes is what the code has."""

from __future__ import annotations

import ast
import inspect
import json
import pydoc
import re
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
from django.db import connection

from django_pgstreams import codec, conf, consumers, exceptions, health, sockets, wire
from django_pgstreams.models import Stream
from tests.fresh_project import README, readme_blocks

if TYPE_CHECKING:
    from typing import Any

    from django.contrib.auth.models import User

ERRORS = "| error code | meaning | subscription over? |"


def table(heading: str) -> list[list[str]]:
    """The rows of the README's table under this heading row, each a list of cells."""
    _, _, after = README.read_text().partition(f"\n{heading}\n|---")
    assert after, f"README.md has no table {heading}"
    lines = after.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    """The words in code marks of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_settings_table_is_that_of_the_code() -> None:
    documented = {
        name.strip("`"): ast.literal_eval(default.strip("`"))
        for name, default, _ in table("| name | default | meaning |")
    }
    assert documented == {field.name: field.default for field in fields(conf.Settings)}


def test_the_fields_of_health_are_those_of_the_code() -> None:
    documented = [names(field)[0] for field, _ in table("| field | meaning |")]
    assert documented == [field.name for field in fields(health.Health)]


def test_every_error_is_documented() -> None:
    documented = {names(error)[0] for error, _ in table("| error | when |")}
    errors = {
        name
        for name, value in vars(exceptions).items()
        if inspect.isclass(value)
        and issubclass(value, exceptions.PGStreamsError)
        and value is not exceptions.PGStreamsError
        and not name.startswith("_")
    }
    assert documented == errors


@pytest.mark.parametrize(
    "frame", [names(frame)[0] for frame, _ in table("| frame from the client | meaning |")]
)
def test_every_documented_frame_of_a_client_is_understood(frame: str) -> None:
    text = frame.replace(": key", ': "notes/1"').replace(": n", ": 3").replace(": e", ': "abc"')
    kind = json.loads(text)["type"]
    assert wire.parse(text).type == kind


def test_the_frames_of_the_server_are_those_of_the_code() -> None:
    rows = table("| frame from the server | meaning |")
    documented = {re.match(r'`\{"type": "(\w+)"', frame)[1] for frame, _ in rows}
    source = inspect.getsource(consumers) + inspect.getsource(wire)
    sent = set(re.findall(r'wire\.frame\(\s*"(\w+)"', source)) | set(re.findall(r'"type":"(\w+)"', source))
    assert documented == sent


def test_the_error_codes_are_those_of_the_code() -> None:
    documented = {names(code)[0] for code, _, _ in table(ERRORS)}
    assert documented == error_codes(consumers)


def test_the_errors_that_end_a_subscription_are_those_of_the_code() -> None:
    over = {names(code)[0]: cell for code, _, cell in table(ERRORS)}
    consumer = consumers.StreamConsumer
    ending = error_codes(consumer._serve, consumer._follow)
    of_cancelling = error_codes(consumer._cancel, consumer._cancel_stream)
    for code, cell in over.items():
        if code in ("bad_request", "too_many"):  # no subscription has begun
            assert cell != "no"
        else:
            assert (cell != "no") == (code in ending), code
        if cell != "no":
            assert (cell == "with `subscribe`") == (code in of_cancelling), code


def error_codes(*parts: Any) -> set[str]:
    """The codes of the error frames that these send."""
    return {code for part in parts for code in re.findall(r'_error\(\s*"(\w+)"', inspect.getsource(part))}


def test_the_close_codes_are_those_of_the_code() -> None:
    documented = {
        int(code) for code, _, _ in table("| close code | meaning | try again? |") if code.isdecimal()
    }
    named = vars(sockets) | vars(consumers)
    assert documented == {value for name, value in named.items() if name.startswith("CLOSE_")}


def test_the_number_of_bad_frames_is_that_of_the_code() -> None:
    text = README.read_text()
    numbers = [*re.findall(r"(\d+) (?:such )?frames in a row", text), *re.findall(r"(\d+)th bad frame", text)]
    assert numbers == [str(consumers.MAX_BAD_FRAMES)] * 3


def test_what_a_silent_socket_and_the_largest_frame_cost_is_what_the_defaults_make_it() -> None:
    text = " ".join(README.read_text().split())
    defaults = conf.Settings()
    mib = 1024 * 1024
    unread = defaults.MAX_SUBSCRIPTIONS * defaults.MAX_UNACKED_BYTES // mib
    assert f"`MAX_SUBSCRIPTIONS` × `MAX_UNACKED_BYTES`, {unread} MiB with the default settings" in text
    assert f"`MAX_CHUNK_BYTES`, {defaults.MAX_CHUNK_BYTES // mib} MiB by default" in text


@pytest.mark.parametrize(
    ("content_type", "payload", "said", "factor"),
    [
        ("application/json", b'"' + b"x" * 2_999_998 + b'"', "as much for JSON", 1),
        ("application/octet-stream", b"x" * 3_000_000, "4/3 × that for base64", 4 / 3),
        ("text/plain", b"\x01" * 3_000_000, "6 × that for `text/…`", 6),
    ],
)
def test_the_largest_frame_is_as_large_as_documented(
    content_type: str, payload: bytes, said: str, factor: float
) -> None:
    assert said in README.read_text()
    made = wire.chunk_frames("a/b", 0, [codec.splice(content_type, payload)], conf.get().MAX_FRAME_BYTES)
    ((text, _),) = made
    assert 0 <= len(text) - factor * len(payload) < 200


def test_every_name_that_the_readme_imports_or_mentions_exists() -> None:
    text = README.read_text()
    imported = [
        f"{module}.{name.strip()}"
        for module, found in re.findall(
            r"^from (django_pgstreams[\w.]*) import ([\w, ]+)", text, re.MULTILINE
        )
        for name in found.split(",")
    ]
    mentioned = re.findall(r"`(django_pgstreams(?:\.\w+)+)", text)
    assert len(imported) > 5
    assert len(mentioned) > 3
    assert [name for name in [*imported, *mentioned] if pydoc.locate(name) is None] == []


def test_python_blocks_are_python() -> None:
    for block in readme_blocks():
        if block.language == "python":
            compile(block.text, block.title or "README.md", "exec")


@pytest.mark.django_db(transaction=True)
def test_the_examples_of_appending_and_following_run(
    django_user_model: type[User], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"user": django_user_model.objects.create_user("ada")}
    for start in ("from django_pgstreams.models import Chunk, Stream", "from django_pgstreams.hub import"):
        exec(example("python", start), names)
    assert capsys.readouterr().out == "0 Collecting sources\n\n1 Compiling\n\n2 Linking\n\n"


@pytest.mark.django_db
def test_the_example_in_sql_appends() -> None:
    stream = Stream.objects.create(key="builds/18")
    stream.append(0)
    with connection.cursor() as cursor:
        cursor.execute(example("sql", "SELECT pgstreams_append"))
        cursor.execute(example("sql", "SELECT pgstreams_append"))
    stream.append(3)
    by_sql = {"by": "SQL"}
    assert [(chunk.offset, chunk.data) for chunk in stream.read()] == [
        (0, 0),
        (1, by_sql),
        (2, by_sql),
        (3, 3),
    ]


def example(language: str, start: str) -> str:
    """The README's block that begins with these words."""
    (found,) = (
        block.text for block in readme_blocks() if block.language == language and block.text.startswith(start)
    )
    return found


def test_links_within_the_readme_lead_somewhere() -> None:
    text = README.read_text()
    headings = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings
        elif "://" not in target:
            assert (README.parent / target).exists(), target
