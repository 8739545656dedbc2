"""The default policy, and what becomes of a project's hook: only True allows."""

from __future__ import annotations

import functools
import logging

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import AnonymousUser, Group, Permission, User
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError, connections

from django_pgstreams import permissions
from django_pgstreams.models import Stream
from django_pgstreams.permissions import owner_or_model_permission

# The default policy --------------------------------------------------------------------------------


class OneStreamBackend:
    """An object permission backend: whoever is named in a stream's metadata may do what it says there."""

    def authenticate(self, request, **credentials):
        return None

    def has_perm(self, user, permission, obj=None):
        return obj is not None and permission in obj.metadata.get(user.get_username(), [])


@pytest.fixture
def owner(db):
    return User.objects.create_user("owner")


@pytest.fixture
def visitor(db):
    return User.objects.create_user("visitor")


@pytest.fixture
def stream(owner):
    return Stream.objects.create(key="a/b", owner=owner)


def grant(to, codename):
    permission = Permission.objects.get(content_type__app_label="pgstreams", codename=codename)
    (to.permissions if isinstance(to, Group) else to.user_permissions).add(permission)


def allowed_actions(user, stream):
    return {
        action
        for action in ("view", "cancel", "delete", "")
        if owner_or_model_permission(user, stream, action)
    }


def test_the_owner_may_view_and_cancel(owner, stream):
    assert allowed_actions(owner, stream) >= {"view", "cancel"}


def test_somebody_else_may_nothing(visitor, stream):
    assert allowed_actions(visitor, stream) == set()


def test_staff_alone_means_nothing(visitor, stream):
    visitor.is_staff = True
    assert allowed_actions(visitor, stream) == set()


def test_nobody_owns_a_stream_without_owner(visitor, db):
    ownerless = Stream.objects.create(key="a")
    assert allowed_actions(visitor, ownerless) == set()
    assert allowed_actions(AnonymousUser(), ownerless) == set()


def test_nobody_owns_an_unknown_stream(visitor, owner):
    assert allowed_actions(visitor, Stream(key="unknown")) == set()
    assert allowed_actions(owner, Stream(key="unknown")) == set()


def test_anonymous_may_nothing(stream):
    assert allowed_actions(AnonymousUser(), stream) == set()


@pytest.mark.parametrize("codename", ["view_stream", "change_stream"])
def test_an_inactive_user_may_nothing(owner, stream, codename):
    grant(owner, codename)
    owner.is_active = False
    owner.is_superuser = True
    assert allowed_actions(owner, stream) == set()


def test_the_model_permission_to_view_allows_to_view_every_stream_and_no_more(visitor, stream):
    grant(visitor, "view_stream")
    assert allowed_actions(visitor, stream) == {"view"}
    assert allowed_actions(visitor, Stream.objects.create(key="other")) == {"view"}


def test_the_model_permission_to_change_allows_to_cancel_and_no_more(visitor, stream):
    grant(visitor, "change_stream")
    assert allowed_actions(visitor, stream) == {"cancel"}


@pytest.mark.parametrize("codename", ["add_stream", "delete_stream", "view_chunk", "change_chunk"])
def test_other_model_permissions_allow_nothing(visitor, stream, codename):
    grant(visitor, codename)
    assert allowed_actions(visitor, stream) == set()


def test_a_group_gives_its_permission(visitor, stream):
    group = Group.objects.create(name="watchers")
    grant(group, "view_stream")
    visitor.groups.add(group)
    assert allowed_actions(visitor, stream) == {"view"}


def test_a_superuser_may_view_and_cancel(visitor, stream):
    visitor.is_superuser = True
    assert allowed_actions(visitor, stream) == {"view", "cancel"}


def test_an_object_permission_is_for_its_stream_alone(visitor, stream, settings):
    settings.AUTHENTICATION_BACKENDS = [
        "django.contrib.auth.backends.ModelBackend",
        f"{__name__}.OneStreamBackend",
    ]
    stream.metadata = {"visitor": ["pgstreams.view_stream"]}
    assert allowed_actions(visitor, stream) == {"view"}
    assert allowed_actions(visitor, Stream(key="other")) == set()
    stream.metadata = {"visitor": ["pgstreams.change_stream"]}
    assert allowed_actions(visitor, stream) == {"cancel"}


# Hooks ---------------------------------------------------------------------------------------------

seen = []


def allow(user, stream, action):
    return True


def refuse(user, stream, action):
    return False


def remember(user, stream, action):
    seen.append((user, stream, action))
    return True


async def allow_async(user, stream, action):
    return True


async def refuse_async(user, stream, action):
    return False


class Policy:
    def __call__(self, user, stream, action):
        return True

    def method(self, user, stream, action):
        return True

    async def method_async(self, user, stream, action):
        return True


class AsyncPolicy:
    async def __call__(self, user, stream, action):
        return True


class RefusingPolicy:
    async def __call__(self, user, stream, action):
        return False


@functools.wraps(allow_async)
def decorated(*arguments):
    return allow_async(*arguments)


def query(user, stream, action):
    return User.objects.filter(username="owner").exists()


async def query_async(user, stream, action):
    return await User.objects.filter(username="owner").aexists()


policy = Policy()
async_policy = AsyncPolicy()
refusing_policy = RefusingPolicy()
policy_method = policy.method
policy_method_async = policy.method_async
partial = functools.partial(allow)
partial_async = functools.partial(allow_async)


class NoPolicy:
    """A class that takes what a hook takes: its instance is no answer."""

    def __init__(self, user, stream, action):
        self.user = user


def answers_none(user, stream, action):
    return None


def answers_one(user, stream, action):
    return 1


def answers_text(user, stream, action):
    return "yes"


def answers_user(user, stream, action):
    return user


def answers_function(user, stream, action):
    return allow_async


async def answers_one_async(user, stream, action):
    return 1


def raises(user, stream, action):
    raise RuntimeError("the policy is broken")


async def raises_async(user, stream, action):
    raise RuntimeError("the policy is broken")


def takes_too_little(user):
    return True


def database_is_away(user, stream, action):
    raise OperationalError("the database is away")


async def connection_is_closed(user, stream, action):
    raise InterfaceError("connection already closed")


@pytest.fixture
def hook(settings):
    """Set the project's hook to a function of this module, or to a path."""

    def set_hook(name):
        settings.PGSTREAMS = {"PERMISSION": name if "." in name else f"{__name__}.{name}"}

    return set_hook


async def answer(user="anybody", action="view"):
    return await permissions.allowed(user, Stream(key="a/b"), action)


@pytest.mark.parametrize(
    "name",
    [
        *("allow", "allow_async", "policy", "async_policy", "policy_method", "policy_method_async"),
        *("partial", "partial_async", "decorated"),
    ],
)
async def test_a_hook_of_any_shape_can_allow(hook, name, caplog):
    hook(name)
    assert await answer() is True
    assert caplog.records == []


@pytest.mark.parametrize("name", ["refuse", "refuse_async", "refusing_policy", "answers_none"])
async def test_a_hook_can_refuse_without_a_word_in_the_log(hook, name, caplog):
    hook(name)
    assert await answer() is False
    assert caplog.records == []


@pytest.mark.parametrize(
    "name",
    ["answers_one", "answers_text", "answers_user", "answers_one_async", "answers_function", "NoPolicy"],
)
async def test_an_answer_that_is_merely_truthy_refuses_and_says_so(hook, name, caplog):
    hook(name)
    assert await answer() is False
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "only True allows" in record.getMessage()


@pytest.mark.parametrize(
    "name",
    ["raises", "raises_async", "takes_too_little", "no_such_function", "seen", "no.such.module"],
)
async def test_a_hook_that_fails_refuses_and_is_logged(hook, name, caplog):
    hook(name)
    assert await answer() is False
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "'a/b'" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("name", ["database_is_away", "connection_is_closed"])
async def test_a_database_that_is_away_is_no_answer(hook, name):
    hook(name)
    with pytest.raises((OperationalError, InterfaceError)):
        await answer()


async def test_a_hook_gets_user_stream_and_action(hook):
    hook("remember")
    seen.clear()
    stream = Stream(key="x")
    assert await permissions.allowed("somebody", stream, "cancel") is True
    assert seen == [("somebody", stream, "cancel")]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ["query", "query_async"])
async def test_a_hook_may_use_the_database(hook, name):
    hook(name)
    assert await answer() is False
    await User.objects.acreate(username="owner")
    assert await answer() is True
    await sync_to_async(connections.close_all)()


@pytest.mark.parametrize("name", ["no_such_function", "seen", "no.such.module"])
def test_a_hook_that_cannot_be_called_is_named(hook, name):
    hook(name)
    with pytest.raises(ImproperlyConfigured, match=r"PGSTREAMS\['PERMISSION'\] = '.*(no_such|seen|no\.such)"):
        permissions.hook()


def test_without_a_setting_the_default_policy_is_the_hook(settings):
    settings.PGSTREAMS = {}
    assert permissions.hook() is owner_or_model_permission
