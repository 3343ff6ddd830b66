"""celery_redislock.options: what a task may say about its lock; what is wrong is refused where it is said."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redislock.errors import LockConfigError
from celery_redislock.options import (
    CONFLICT_POLICIES,
    MAX_DURATION,
    OPTION_NAMES,
    OUTAGE_POLICIES,
    PER_TASK,
    LockOptions,
    check_option,
    show,
    unknown_option,
)

DURATIONS = ("ttl", "max_hold", "min_hold", "retry_for", "wait", "done_ttl")
OR_NONE = ("max_hold", "retry_for")
OR_ZERO = ("min_hold", "wait", "done_ttl")
FLAGS = ("enabled", "renew")
TASK = "proj.sync"


class Policy(StrEnum):
    RETRY = "retry"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def template(account_id: int) -> str:
    return f"account:{account_id}"


def refusal(option: str, value: object, **kwargs: Any) -> str:
    with pytest.raises(LockConfigError) as caught:
        check_option(TASK, option, value, **kwargs)
    return str(caught.value)


# --- values


@pytest.mark.parametrize(
    ("option", "value", "normal"),
    [
        *((flag, value, value) for flag in FLAGS for value in (True, False)),
        *((option, 60, 60.0) for option in DURATIONS),
        *((option, 1.5, 1.5) for option in DURATIONS),
        *((option, timedelta(minutes=2), 120.0) for option in DURATIONS),
        *((option, MAX_DURATION, MAX_DURATION) for option in DURATIONS),
        *((option, timedelta(days=366), MAX_DURATION) for option in DURATIONS),
        *((option, None, None) for option in OR_NONE),
        *((option, 0, 0.0) for option in OR_ZERO),
        *((option, 0.0004, 0.0004) for option in (*OR_NONE, *OR_ZERO)),
        ("ttl", 0.1, 0.1),
        ("on", None, None),
        ("on", [], ()),
        ("on", ["account_id", "region"], ("account_id", "region")),
        ("on", ("region", "account_id"), ("region", "account_id")),
        ("on", {"region", "account_id"}, ("account_id", "region")),
        ("on", frozenset({"b", "a"}), ("a", "b")),
        ("key", None, None),
        ("key", "account:{account_id}", "account:{account_id}"),
        ("key", template, template),
        ("name", None, None),
        ("name", "accounts", "accounts"),
        *(("on_conflict", policy, policy) for policy in ("skip", "ignore", "raise", "retry", "wait")),
        ("on_conflict", Policy.RETRY, "retry"),
        *(("on_outage", policy, policy) for policy in ("retry", "run", "raise")),
        ("on_lost", "warn", "warn"),
        *(("skip_result", value, value) for value in (None, "skipped", 0, {"status": "skipped"})),
    ],
)
def test_a_good_value_is_taken_in_its_normal_form(option: str, value: object, normal: object) -> None:
    taken = check_option(TASK, option, value)
    assert taken == normal
    assert isinstance(taken, type(normal))


def test_every_duration_is_a_float_whatever_it_was_written_as() -> None:
    for option in DURATIONS:
        for value in (1, 1.0, timedelta(seconds=1)):
            assert type(check_option(TASK, option, value)) is float


@pytest.mark.parametrize("option", DURATIONS)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (True, "is not a duration: give seconds as a number, or a timedelta"),
        (False, "is not a duration"),
        ("60", "is not a duration"),
        (b"60", "is not a duration"),
        (Decimal(60), "is not a duration"),
        (60j, "is not a duration"),
        ([60], "is not a duration"),
        (math.nan, "is not a finite number of seconds"),
        (math.inf, "is not a finite number of seconds"),
        (-math.inf, "is not a finite number of seconds"),
        (-1, "is negative"),
        (-0.0004, "is negative"),
        (timedelta(seconds=-1), "is negative"),
        (10**12, "durations are in seconds, not milliseconds"),
        (1e300, "durations are in seconds, not milliseconds"),
        (MAX_DURATION + 1, "is more than 31622400 s (366 days)"),
        (timedelta.max, "(366 days)"),
        (timedelta.min, "is negative"),
        pytest.param(10**400, "(366 days)", id="an int beyond float"),
        pytest.param(-(10**400), "is negative", id="a negative int beyond float"),
        pytest.param(10**5000, "(366 days)", id="an int beyond repr"),
    ],
)
def test_what_is_no_duration_is_refused(option: str, value: object, why: str) -> None:
    assert why in refusal(option, value)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("ttl", None, "would never expire, and a dead holder would block for ever; give seconds, at least 0.1"),
        ("ttl", 0, "is too short; a lease takes at least 0.1 s"),
        ("ttl", 0.0004, "is too short"),
        ("ttl", 0.0999, "is too short"),
        ("ttl", timedelta(milliseconds=99), "is too short"),
        *((option, 0, "is no time at all; give seconds, or None for no limit") for option in OR_NONE),
        *((option, 0.0, "is no time at all") for option in OR_NONE),
        *((option, timedelta(0), "is no time at all") for option in OR_NONE),
        *((option, None, "is not a duration; write 0 for none") for option in OR_ZERO),
        *((flag, value, "is not True or False") for flag in FLAGS for value in (None, 0, 1, "yes", "False", [])),
        ("on", "account_id", "is a bare string; put it into a list"),
        ("on", "", "is a bare string"),
        ("on", b"account_id", "is not a list of argument names"),
        ("on", 1, "is not a list of argument names"),
        ("on", [1], "is not a list of argument names"),
        ("on", ["a", None], "is not a list of argument names"),
        ("on", {"a": 1}, "is not a list of argument names"),
        ("on", (name for name in "ab"), "is not a list of argument names"),
        ("on", ["a", "b", "a"], "names an argument twice"),
        *(("key", value, 'is not a template such as "account:{account_id}"') for value in ("", " ", 1, ["a"], b"key")),
        *(("name", value, "is not a name; give a non-empty string") for value in ("", "\t", 1, True, ["a"], b"name")),
        ("on_conflict", "skipp", "did you mean 'skip'?"),
        ("on_conflict", "SKIP", "did you mean 'skip'?"),
        ("on_conflict", "waits", "did you mean 'wait'?"),
        ("on_conflict", "drop", "is not one of skip, ignore, raise, retry, wait"),
        ("on_conflict", None, "is not one of skip, ignore, raise, retry, wait"),
        ("on_conflict", True, "is not one of"),
        ("on_conflict", ["skip"], "is not one of"),
        ("on_conflict", Unprintable(), "is not one of"),
        ("on_outage", "skip", "is not one of retry, run, raise"),
        ("on_outage", "runs", "did you mean 'run'?"),
        ("on_outage", None, "is not one of retry, run, raise"),
        ("on_lost", "terminate", "is not one of warn"),
        ("on_lost", "warning", "did you mean 'warn'?"),
    ],
)
def test_a_bad_value_is_refused_with_the_reason(option: str, value: object, why: str) -> None:
    assert why in refusal(option, value)


def test_no_hint_is_given_where_nothing_is_near() -> None:
    assert "did you mean" not in refusal("on_conflict", "xyzzy")
    assert "did you mean" not in refusal("on_conflict", 7)


@pytest.mark.parametrize(
    ("option", "value", "prefix", "message"),
    [
        ("ttl", "60", "lock_", "proj.sync: lock_ttl='60' is not a duration: give seconds as a number, or a timedelta"),
        ("wait", None, "redislock_", "proj.sync: redislock_wait=None is not a duration; write 0 for none"),
        (
            "on_conflict",
            "retri",
            "lock_",
            "proj.sync: lock_on_conflict='retri' is not one of skip, ignore, raise, retry, wait; did you mean 'retry'?",
        ),
    ],
)
def test_a_message_names_the_task_the_option_as_it_was_spelt_the_value_and_the_fix(
    option: str, value: object, prefix: str, message: str
) -> None:
    assert refusal(option, value, prefix=prefix) == message


def test_the_policies_are_those_that_can_be_said() -> None:
    assert CONFLICT_POLICIES == ("skip", "ignore", "raise", "retry", "wait")
    assert OUTAGE_POLICIES == ("retry", "run", "raise")


# --- names


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("lock_tll", "lock_ttl"),
        ("lock_TTL", "lock_ttl"),
        ("lock_on_conflicts", "lock_on_conflict"),
        ("lock_onconflict", "lock_on_conflict"),
        ("lock_skip_results", "lock_skip_result"),
        ("lock_minhold", "lock_min_hold"),
        ("lock_enable", "lock_enabled"),
        ("lock_renewal", "lock_renew"),
        ("lock_waits", "lock_wait"),
        ("lock_on_outrage", "lock_on_outage"),
        ("lock_timeout", "lock_ttl"),  # redis-py's Lock, celery-once
        ("lock_expiry", "lock_ttl"),  # celery-singleton
        ("lock_expire", "lock_ttl"),  # python-redis-lock
        ("lock_at_most_for", "lock_ttl"),  # ShedLock
        ("lock_at_least_for", "lock_min_hold"),  # ShedLock
        ("lock_auto_renewal", "lock_renew"),  # python-redis-lock
        ("lock_unique_on", "lock_on"),  # celery-singleton
        ("lock_keys", "lock_on"),  # celery-once
        ("lock_args", "lock_on"),
        ("lock_graceful", "lock_on_conflict"),  # celery-once
        ("lock_raise_on_duplicate", "lock_on_conflict"),  # celery-singleton
        ("lock_blocking", "lock_on_conflict"),  # redis-py's Lock
        ("lock_blocking_timeout", "lock_wait"),  # redis-py's Lock
        ("lock_result", "lock_skip_result"),
        ("redislock_tll", "redislock_ttl"),
        ("redislock_expiry", "redislock_ttl"),
        ("redislock_TTL", "redislock_ttl"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_right_one(name: str, right: str) -> None:
    prefix = "redislock_" if name.startswith("redislock_") else "lock_"
    message = refusal(name.removeprefix(prefix), 1, prefix=prefix)
    assert message == f"{TASK}: unknown option {name}; did you mean {right}?"


def test_a_name_that_is_like_none_is_answered_with_all_of_them() -> None:
    message = str(unknown_option(TASK, "lock_xyzzy_plugh", ["lock_wait", "lock_ttl"]))
    assert message == f"{TASK}: unknown option lock_xyzzy_plugh; known: lock_ttl, lock_wait"


def test_a_synonym_of_what_is_not_known_there_is_no_hint() -> None:
    assert "did you mean" not in str(unknown_option(TASK, "redislock_expiry", ["redislock_prefix"]))


@pytest.mark.parametrize("option", sorted(PER_TASK))
def test_an_option_that_belongs_to_a_task_is_refused_as_a_setting_of_the_app(option: str) -> None:
    with pytest.raises(LockConfigError) as caught:
        LockOptions.resolve("the app's settings", settings={option: None})
    assert str(caught.value) == (
        f"the app's settings: redislock_{option} can't be said for a whole app; say lock_{option} on the task"
    )


def test_a_name_as_long_as_a_novel_does_not_spoil_the_message() -> None:
    assert len(str(unknown_option(TASK, "lock_" + "x" * 10_000, ["lock_ttl"]))) < 200


def test_every_option_is_documented_checked_and_has_a_default_that_passes_its_own_check() -> None:
    described = LockOptions.__doc__ or ""
    for field in fields(LockOptions):
        assert f"        {field.name}: " in described
        assert check_option(TASK, field.name, field.default) == field.default
    assert tuple(field.name for field in fields(LockOptions)) == OPTION_NAMES


# --- precedence


def test_nothing_said_gives_the_documented_defaults() -> None:
    options = LockOptions.resolve(TASK)
    assert options == LockOptions()
    assert (options.enabled, options.on, options.key, options.name) == (True, None, None, None)
    assert (options.ttl, options.renew, options.max_hold, options.min_hold) == (30.0, True, None, 0.0)
    assert (options.on_conflict, options.skip_result, options.retry_for, options.wait) == ("skip", None, None, 10.0)
    assert (options.on_outage, options.on_lost, options.done_ttl) == ("retry", "warn", 0.0)


@pytest.mark.parametrize(
    ("levels", "ttl"),
    [
        ({"settings": {"ttl": 1}}, 1.0),
        ({"attributes": {"ttl": 2}}, 2.0),
        ({"call": {"ttl": 3}}, 3.0),
        ({"settings": {"ttl": 1}, "attributes": {"ttl": 2}}, 2.0),
        ({"settings": {"ttl": 1}, "call": {"ttl": 3}}, 3.0),
        ({"attributes": {"ttl": 2}, "call": {"ttl": 3}}, 3.0),
        ({"settings": {"ttl": 1}, "attributes": {"ttl": 2}, "call": {"ttl": 3}}, 3.0),
        ({"settings": {}, "attributes": None, "call": {}}, 30.0),
    ],
)
def test_the_call_beats_the_task_and_the_task_beats_the_app(levels: dict[str, Any], ttl: float) -> None:
    assert LockOptions.resolve(TASK, **levels).ttl == ttl


def test_each_option_takes_the_nearest_level_by_itself() -> None:
    options = LockOptions.resolve(
        TASK,
        settings={"ttl": 1, "wait": 1, "done_ttl": 1},
        attributes={"wait": 2, "done_ttl": 2, "max_hold": 5},
        call={"done_ttl": 3, "max_hold": None},
    )
    assert (options.ttl, options.wait, options.done_ttl, options.max_hold) == (1.0, 2.0, 3.0, None)


@pytest.mark.parametrize(
    ("levels", "spelt"),
    [
        ({"settings": {"ttl": 0}}, "redislock_ttl=0"),
        ({"attributes": {"ttl": 0}}, "lock_ttl=0"),
        ({"call": {"ttl": 0}}, "lock_ttl=0"),
        ({"settings": {"ttl": 0}, "attributes": {"ttl": 2}, "call": {"ttl": 3}}, "redislock_ttl=0"),
    ],
)
def test_a_bad_value_is_refused_at_each_level_even_one_that_is_overridden(levels: dict[str, Any], spelt: str) -> None:
    with pytest.raises(LockConfigError, match=f"^{TASK}: {spelt} is too short"):
        LockOptions.resolve(TASK, **levels)


@pytest.mark.parametrize(
    "levels",
    [
        {"attributes": {"on": ["a"], "key": "{a}"}},
        {"attributes": {"on": [], "key": "{a}"}},
        {"attributes": {"on": ["a"]}, "call": {"key": template}},
    ],
)
def test_lock_on_and_lock_key_exclude_each_other(levels: dict[str, Mapping[str, Any]]) -> None:
    with pytest.raises(LockConfigError, match=f"^{TASK}: lock_on and lock_key exclude each other"):
        LockOptions.resolve(TASK, **levels)


def test_lock_on_none_beside_lock_key_is_no_contradiction() -> None:
    assert LockOptions.resolve(TASK, attributes={"on": None, "key": "{a}"}).key == "{a}"


# --- whatever else people write

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**4000, max_value=10**5000)
    | st.floats()
    | st.text()
    | st.binary()
    | st.decimals()
    | st.timedeltas()
    | st.complex_numbers()
    | st.builds(Unprintable)
    | st.sampled_from([template, len, object(), Policy.RETRY, int, ...])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.sets(st.text()),
    max_leaves=8,
)


def resolved(**levels: Any) -> LockOptions | str:
    """The options, or the message of the refusal."""
    try:
        return LockOptions.resolve(TASK, **levels)
    except LockConfigError as error:
        return str(error)


@given(option=st.sampled_from(OPTION_NAMES), level=st.sampled_from(["settings", "attributes", "call"]), value=anything)
def test_whatever_the_value_it_is_taken_or_a_config_error(option: str, level: str, value: object) -> None:
    taken = resolved(**{level: {option: value}})
    if isinstance(taken, str):
        assert taken.startswith(f"{TASK}: {'redis' if level == 'settings' else ''}lock_{option}")
    elif option in DURATIONS and getattr(taken, option) is not None:
        assert 0 <= getattr(taken, option) <= MAX_DURATION


@pytest.mark.parametrize("length", [60, 90, 300, 5000])
@pytest.mark.parametrize("filler", ["Q", "\U0001f512", "\n", "\ud800"])
@pytest.mark.parametrize("option", OPTION_NAMES)
def test_no_more_than_a_hundred_characters_of_a_value_get_into_a_message(option: str, filler: str, length: int) -> None:
    for value in (filler * length, [filler] * length, [[filler]] * length, {filler: filler * length}):
        text = resolved(attributes={option: value})
        if isinstance(text, str):
            before, _, behind = text.partition(f"lock_{option}=")
            assert before == f"{TASK}: "
            assert len(behind) < 100 + len(" is not one of skip, ignore, raise, retry, wait; did you mean 'ignore'?")
            assert behind.count("Q") + behind.count("\U0001f512") <= 80


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("abc", "'abc'"),
        ("x" * 78, "'" + "x" * 78 + "'"),
        ("x" * 79, "'" + "x" * 76 + "..."),
        (Unprintable(), "<Unprintable>"),
        pytest.param(10**5000, "<int>", id="an int beyond repr"),
    ],
)
def test_a_value_is_shown_in_at_most_eighty_characters(value: object, shown: str) -> None:
    assert show(value) == shown


def test_a_value_that_contains_itself_is_shown() -> None:
    nested: list[Any] = []
    for _ in range(sys.getrecursionlimit() + 100):
        nested = [nested]
    assert show(nested) == "<list>"
