"""Check an installed wheel: it holds the package's files, all of them and nothing else, and works.

Arguments: the wheel, and a file that lists what belongs to the package, one path a line. Runs in an
environment where the wheel and a Postgres driver are installed, and nothing of the checkout is.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import zipfile
from pathlib import Path

import django
from django.conf import settings
from django.contrib.staticfiles import finders
from django.template.loader import get_template

PACKAGE = "django_pgstreams"


def packed_files(wheel: str) -> set[str]:
    """The wheel's files without its own metadata."""
    names = set(zipfile.ZipFile(wheel).namelist())
    return {name for name in names if not name.split("/")[0].endswith(".dist-info")}


def load_everything(files: set[str]) -> None:
    """Set up Django with the app, import each module, find each template and static file."""
    apps = ["admin", "auth", "contenttypes", "messages", "sessions", "staticfiles"]
    settings.configure(
        INSTALLED_APPS=[*(f"django.contrib.{app}" for app in apps), PACKAGE],
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "unused"}},
        STATIC_URL="static/",
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
    )
    django.setup()
    package = importlib.import_module(PACKAGE)
    if "site-packages" not in Path(package.__file__).parts:
        sys.exit(f"{PACKAGE} was imported from {package.__file__}, not from the wheel.")
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        importlib.import_module(module.name)
    for file in files:
        _, _, template = file.partition("/templates/")
        _, _, static = file.partition("/static/")
        if template:
            get_template(template)
        if static and finders.find(static) is None:
            sys.exit(f"The static file {static} is not found.")


def main(wheel: str, listing: str) -> None:
    expected = set(Path(listing).read_text().split("\n")) - {""}
    packed = packed_files(wheel)
    if packed != expected:
        sys.exit(f"missing: {sorted(expected - packed)}, too much: {sorted(packed - expected)}")
    for needed in ("py.typed", "migrations/0001_initial.py", "templates/", "static/"):
        if not any(name.startswith(f"{PACKAGE}/{needed}") for name in packed):
            sys.exit(f"The wheel has no {needed}")
    load_everything(packed)
    print(f"{Path(wheel).name}: {len(packed)} files, all there, all loaded")


if __name__ == "__main__":
    main(*sys.argv[1:])
