"""What `manage.py check` says of a project that could not work."""

from __future__ import annotations

import pytest
from django.core.checks.registry import registry
from django.core.management import CommandError, call_command
from django.db import connections

from django_pgstreams import checks
from tests.aliases import alias


def found() -> list[tuple[str, str]]:
    """What the app's own checks say."""
    checked = (checks.check_settings, checks.check_database, checks.check_listen_database)
    return [(problem.id, problem.msg) for check in checked for problem in check(None)]


class ToElsewhere:
    """A database router that sends streams to the alias of the fixture `elsewhere`."""

    alias = ""

    def db_for_write(self, model, **hints):
        return self.alias if model._meta.app_label == "pgstreams" else None


async def async_hook(user, stream, action):
    return True


@pytest.fixture
def elsewhere():
    """A second alias, of SQLite, which nothing connects to."""
    with alias("elsewhere", ENGINE="django.db.backends.sqlite3", NAME=":memory:") as ToElsewhere.alias:
        yield ToElsewhere.alias


def test_a_sound_project_passes(settings):
    settings.PGSTREAMS = {"POLL_INTERVAL_SECONDS": 1, "PERMISSION": f"{__name__}.async_hook"}
    assert found() == []


def test_the_checks_are_among_those_that_always_run():
    assert {checks.check_settings, checks.check_database, checks.check_listen_database} <= set(
        registry.get_checks()
    )


def test_the_checks_do_not_query():
    """This test has no access to the database."""
    assert found() == []


def test_each_problem_of_the_settings_is_an_error(settings):
    settings.PGSTREAMS = {"POLL_INTERVAL": 1, "MAX_CHUNK_BYTES": "1", "CHANNEL": "x" * 64}
    assert [check_id for check_id, _ in found()] == ["pgstreams.E001"] * 3
    with pytest.raises(CommandError, match="has no setting 'POLL_INTERVAL'"):
        call_command("check")


def test_settings_that_are_no_dict_are_an_error(settings):
    settings.PGSTREAMS = ["CHANNEL"]
    assert found() == [("pgstreams.E001", "PGSTREAMS must be a dict, not list.")]


@pytest.mark.parametrize(
    "path",
    ["nowhere.hook", "nowhere", "", "django_pgstreams.permissions.nothing", "django_pgstreams.conf.math"],
)
def test_a_hook_that_cannot_be_called_is_an_error(settings, path):
    settings.PGSTREAMS = {"PERMISSION": path}
    [(check_id, message)] = found()
    assert check_id == "pgstreams.E002"
    assert repr(path) in message


def test_streams_on_another_database_than_postgres_are_an_error(settings, elsewhere):
    settings.DATABASE_ROUTERS = [f"{__name__}.ToElsewhere"]
    [(check_id, message)] = found()
    assert check_id == "pgstreams.E003"
    assert f"'{elsewhere}', which is sqlite" in message


@pytest.mark.parametrize("alias", ["", "default"])
def test_listening_by_the_streams_own_alias_passes(settings, alias):
    settings.PGSTREAMS = {"LISTEN_DATABASE": alias}
    assert found() == []


def test_listening_by_an_alias_that_there_is_not_is_an_error(settings):
    settings.PGSTREAMS = {"LISTEN_DATABASE": "direkt"}
    [(check_id, message)] = found()
    assert check_id == "pgstreams.E004"
    assert "'direkt', an alias that DATABASES does not have" in message


def test_listening_by_an_alias_of_another_kind_of_database_is_an_error(settings, elsewhere):
    settings.PGSTREAMS = {"LISTEN_DATABASE": elsewhere}
    [(check_id, message)] = found()
    assert check_id == "pgstreams.E004"
    assert f"'{elsewhere}', which is sqlite" in message


@pytest.mark.parametrize(("name", "problems"), [(None, []), ("another", ["pgstreams.W001"])])
def test_listening_to_what_seems_another_database_is_a_warning(settings, name, problems):
    with alias("direct", NAME=name or connections.settings["default"]["NAME"]) as direct:
        settings.PGSTREAMS = {"LISTEN_DATABASE": direct}
        assert [check_id for check_id, _ in found()] == problems
