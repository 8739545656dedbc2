"""The package's shape: floors, imports, public names, version."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import models

import django_pgstreams
from django_pgstreams.models import Chunk, Stream

PACKAGE = Path(django_pgstreams.__file__).parent
ROOT = PACKAGE.parent

# A module imports from lower floors only, and stands as low as that allows.
FLOORS = [
    {
        *["arrays", "background", "buffer", "conf", "exceptions", "flow", "pages", "pending", "signals"],
        *["sockets", "sql"],
    },
    {"codec", "database", "keys", "piping", "polling", "store", "watch", "window"},
    {"managers", "metadata", "settling", "turns", "wire"},
    {"answers", "auth", "models", "notifier", "relay"},
    {"follower", "listener", "lookups", "permissions", "previews"},
    {"admin", "checks", "subscription"},
    {"hub"},
    {"committer", "consumers"},
    {"health", "receivers", "routing", "writer"},
    {"apps"},
]
FLOOR_OF = {module: number for number, modules in enumerate(FLOORS) for module in modules}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
each_module = pytest.mark.parametrize("module", MODULES)

PUBLIC = {
    "auth": {"AuthMiddlewareStack"},
    "consumers": {"StreamConsumer"},
    "exceptions": {
        *["PGStreamsError", "StreamClosed", "StreamMissing", "StreamBusy", "OffsetConflict", "InvalidKey"],
        *["AppendFailed", "AppendUnknown", "WriterFull"],
        *["InvalidPayload", "ChunkImmutable", "ManagedField", "StreamGap", "StreamReset"],
    },
    "health": {"Health", "get"},
    "hub": {"subscribe"},
    "models": {"Chunk", "Stream"},
    "permissions": {"owner_or_model_permission"},
    "routing": {"websocket_urlpatterns"},
    "signals": {"chunks_appended", "stream_closed"},
    "writer": {"StreamWriter"},
}

STREAM_FIELDS = {
    *["id", "key", "epoch", "content_type", "owner", "owner_id", "metadata", "state", "reason"],
    *["next_offset", "first_offset", "created_at", "appended_at", "closed_at", "expires_at"],
}
STREAM_METHODS = {
    "append": "(self, data, *, expected_offset=None, close=False)",
    "aappend": "(self, data, *, expected_offset=None, close=False)",
    "append_many": "(self, values, *, expected_offset=None, close=False)",
    "aappend_many": "(self, values, *, expected_offset=None, close=False)",
    "close": "(self, *, lock_timeout_seconds=None)",
    "aclose": "(self, *, lock_timeout_seconds=None)",
    "fail": "(self, reason)",
    "afail": "(self, reason)",
    "cancel": "(self, reason='', *, lock_timeout_seconds=None)",
    "acancel": "(self, reason='', *, lock_timeout_seconds=None)",
    "read": "(self, offset=0, limit=None)",
    "aread": "(self, offset=0, limit=None)",
}


def parsed(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[str]:
    """The package's own modules that run when this code runs: not what is there for annotations alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from (name for part in child.orelse for name in imported(part))
            continue
        if isinstance(child, ast.ImportFrom) and (
            child.level or (child.module or "").startswith(PACKAGE.name)
        ):
            assert child.level == 1, (
                f"line {child.lineno}: the package's own modules are imported with one dot"
            )
            yield from [child.module] if child.module else [alias.name for alias in child.names]
        assert not (
            isinstance(child, ast.Import)
            and any(alias.name.startswith(PACKAGE.name) for alias in child.names)
        ), "the package's own modules are imported with one dot"
        yield from imported(child)


def test_every_module_has_its_floor():
    assert set(MODULES) == set(FLOOR_OF)
    assert sum(map(len, FLOORS)) == len(FLOOR_OF)


@each_module
def test_a_module_imports_from_lower_floors_only(module):
    above = {name for name in imported(parsed(module)) if FLOOR_OF[name] >= FLOOR_OF[module]}
    assert not above


@each_module
def test_a_module_stands_as_low_as_its_imports_allow(module):
    assert FLOOR_OF[module] == 1 + max((FLOOR_OF[name] for name in imported(parsed(module))), default=-1)


@each_module
def test_nothing_is_imported_within_functions_but_by_ready(module):
    functions = (
        node for node in ast.walk(parsed(module)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    hidden = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert hidden == ({"ready"} if module == "apps" else set())


@each_module
def test_a_module_says_what_it_is_for(module):
    assert ast.get_docstring(parsed(module))


@pytest.mark.parametrize(("module", "names"), PUBLIC.items(), ids=PUBLIC)
def test_the_documented_names_are_there(module, names):
    found = importlib.import_module(f"django_pgstreams.{module}")
    assert names <= set(vars(found))


@pytest.mark.parametrize("module", ["exceptions", "signals", "routing"])
def test_modules_of_public_names_hold_nothing_else(module):
    tree = parsed(module)
    made = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)} | {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    assert {name for name in made if not name.startswith("_")} == PUBLIC[module]


def plain_signature(function) -> str:
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize(("name", "signature"), STREAM_METHODS.items(), ids=STREAM_METHODS)
def test_a_streams_methods_take_what_is_documented(name, signature):
    method = getattr(Stream, name)
    assert plain_signature(method) == signature
    assert inspect.getdoc(method)


def test_a_stream_has_its_fields_and_methods_and_little_else():
    of_django = set(dir(models.Model)) | {"objects", "MultipleObjectsReturned", "DoesNotExist", "NotUpdated"}
    made_by_django = {"get_next_by_created_at", "get_previous_by_created_at", "get_state_display"}
    public = {name for name in vars(Stream) if not name.startswith("_")} - of_django - made_by_django
    inner = {"State", "chunks", "check_new", "take_counters"}
    assert public == STREAM_FIELDS | set(STREAM_METHODS) | inner
    assert set(Stream.State.values) == {"open", "completed", "failed", "cancelled"}


def test_a_chunk_has_its_fields_and_little_else():
    of_django = set(dir(models.Model)) | {"objects", "MultipleObjectsReturned", "DoesNotExist", "NotUpdated"}
    made_by_django = {"get_next_by_created_at", "get_previous_by_created_at"}
    public = {name for name in vars(Chunk) if not name.startswith("_")} - of_django - made_by_django
    inner = {"stored", "mark_stored", "check_new"}
    assert public == {"stream", "stream_id", "offset", "payload", "data", "created_at"} | inner


def test_the_package_itself_holds_the_version_only():
    names = {name for name in vars(django_pgstreams) if not name.startswith("_")}
    assert names <= {*MODULES, "management", "migrations", "annotations"}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert django_pgstreams.__version__ == version


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
