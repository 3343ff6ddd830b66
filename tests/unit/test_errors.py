"""celery_redislock.errors: one tree, and every error arrives as it was sent."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import BaseBackend
from celery.exceptions import ImproperlyConfigured
from kombu.utils import json as kombu_json

import celery_redislock
from celery_redislock import errors
from celery_redislock.errors import (
    LockConfigError,
    LockConflict,
    LockKeyError,
    LockLost,
    LockUnavailable,
    RedisLockError,
)

KEY, HOLDER = "redislock:{proj.sync}:v1-0", "task 8c1f on celery@web1 pid 4711"

ALL = [
    RedisLockError("something"),
    LockConflict("proj.sync: held"),
    LockConflict("proj.sync: held", KEY),
    LockConflict("proj.sync: held", KEY, HOLDER),
    LockConflict("proj.sync: held", holder=HOLDER, key=KEY),
    LockLost("proj.sync: gone"),
    LockLost("proj.sync: gone", KEY, "taken"),
    LockUnavailable("the lock store can't be used: TimeoutError"),
    LockKeyError("proj.sync: argument 'x' has no stable form"),
    LockConfigError("proj.sync: lock_ttl=0 is too short"),
    LockConflict("zürich \U0001f512\n", "k", ""),
]
every_error = pytest.mark.parametrize("error", ALL, ids=repr)


def told(error: BaseException) -> tuple[Any, ...]:
    """All that a receiver can see of an error."""
    return type(error), error.args, str(error), vars(error)


# --- the tree


def test_the_tree_is_the_one_that_is_drawn() -> None:
    drawn = errors.__doc__ or ""
    found = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert set(found) == set(errors.__all__)
    for name, error in found.items():
        assert issubclass(error, Exception)
        assert error is RedisLockError or RedisLockError in error.__bases__
        assert name in drawn


def test_a_config_error_is_celerys_improperly_configured() -> None:
    assert issubclass(LockConfigError, ImproperlyConfigured)
    with pytest.raises(ImproperlyConfigured, match="too short"):
        raise LockConfigError("too short")


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_public_and_documented(name: str) -> None:
    assert getattr(celery_redislock, name) is getattr(errors, name)
    assert name in celery_redislock.__all__
    assert getattr(errors, name).__doc__


# --- what they say


def test_the_message_alone_is_what_is_printed() -> None:
    assert str(LockConflict("held", KEY, HOLDER)) == "held"
    assert str(LockLost("gone", KEY, "taken")) == "gone"
    for error in ALL:
        assert str(error) == error.args[0]


def test_key_and_holder_and_reason_can_be_read() -> None:
    conflict, lost = LockConflict("held", KEY, HOLDER), LockLost("gone", KEY, "taken")
    assert (conflict.key, conflict.holder) == (KEY, HOLDER)
    assert (lost.key, lost.reason) == (KEY, "taken")
    bare = LockConflict("held"), LockLost("gone")
    assert (bare[0].key, bare[0].holder, bare[1].key, bare[1].reason) == (None,) * 4


# --- how they travel


@every_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_each_pickle_protocol(error: RedisLockError, protocol: int) -> None:
    assert told(pickle.loads(pickle.dumps(error, protocol))) == told(error)


@every_error
def test_an_error_survives_copying(error: RedisLockError) -> None:
    assert told(copy.copy(error)) == told(error)
    assert told(copy.deepcopy(error)) == told(error)


@every_error
def test_an_error_is_rebuilt_from_its_args_after_json(error: RedisLockError) -> None:
    assert told(type(error)(*json.loads(json.dumps(error.args)))) == told(error)


@every_error
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_an_error_survives_celerys_result_backend(error: RedisLockError, serializer: str) -> None:
    app = Celery("errors", set_as_current=False)
    app.conf.update(result_serializer=serializer, accept_content=["json", "pickle"])
    backend = BaseBackend(app)
    stored = backend.prepare_exception(error)
    wire = kombu_json.loads(kombu_json.dumps(stored)) if serializer == "json" else pickle.loads(pickle.dumps(stored))
    assert told(backend.exception_to_python(wire)) == told(error)
