"""celery_redislock.observe.events and celery_redislock.signals: the contract of what can be heard."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from celery.utils.dispatch import Signal

from celery_redislock import signals
from celery_redislock.observe import events
from celery_redislock.observe.events import EVENTS, Event, LockConflicted, LockWentLost
from celery_redislock.runtime import Runtime
from celery_redislock.settings import Settings
from celery_redislock.stores.memory import MemoryStore

GOLDEN = {  # names and fields stay within a major version; fields may be added
    "lock_acquired": {"task", "key", "task_id", "fence", "waited"},
    "lock_released": {"task", "key", "task_id", "fence", "held"},
    "lock_conflict": {"task", "key", "task_id", "policy", "holder", "holder_task_id", "remaining", "countdown"},
    "lock_lost": {"task", "key", "task_id", "reason", "fence"},
    "lock_recovered": {"task", "key", "task_id", "fence"},
    "lock_renewal_late": {"task", "key", "task_id", "late"},
    "lock_orphaned": {"task", "key", "task_id", "fence", "pid"},
    "lock_unavailable": {"task", "key", "task_id", "operation", "policy", "reason"},
}
each_name = pytest.mark.parametrize("name", sorted(EVENTS))


def example(name: str) -> Event:
    """An event of this name with a value of the right kind in each field."""
    samples = {"str": "text", "int": 7, "float": 1.5, "str | None": None, "float | None": None}
    return EVENTS[name](**{field.name: samples[str(field.type)] for field in fields(EVENTS[name])})


class Receiver:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def __call__(self, **named: Any) -> None:
        self.heard.append(named)


@pytest.fixture
def connect() -> Iterator[Callable[..., Receiver]]:
    """``connect(name, receiver=None, **how)``: until the end of the test."""
    connected: list[tuple[Signal, Any, Any]] = []

    def to(name: str, receiver: Any = None, sender: str | None = None) -> Any:
        receiver = receiver or Receiver()
        signal = getattr(signals, name)
        signal.connect(receiver, sender=sender, weak=False)
        connected.append((signal, receiver, sender))
        return receiver

    yield to
    for signal, receiver, sender in connected:
        signal.disconnect(receiver, sender=sender)


# --- the contract


def test_no_event_and_no_field_of_the_contract_has_gone() -> None:
    for name, named in GOLDEN.items():
        assert named <= {field.name for field in fields(EVENTS[name])}


def described(event: type[Event]) -> set[str]:
    """The names under ``Attributes:`` in the docstrings of an event's class and of the base of all events."""
    found: set[str] = set()
    for cls in (Event, event):
        text = inspect.getdoc(cls) or ""
        found |= set(re.findall(r"^    (\w+): \S", text.partition("Attributes:\n")[2], re.MULTILINE))
    return found


@each_name
def test_every_field_is_documented_and_nothing_else(name: str) -> None:
    assert described(EVENTS[name]) == {field.name for field in fields(EVENTS[name])}


@each_name
def test_an_events_docstring_begins_with_its_name(name: str) -> None:
    assert (EVENTS[name].__doc__ or "").startswith(f"``{name}``: ")


def test_the_events_are_all_there_are() -> None:
    found = {value for value in vars(events).values() if inspect.isclass(value) and issubclass(value, Event)} - {Event}
    assert found == set(EVENTS.values())
    assert {cls.__name__ for cls in found} < set(events.__all__)
    assert all(event.name == name for name, event in EVENTS.items())


@each_name
def test_fields_that_a_receiver_could_not_be_given_are_not_used(name: str) -> None:
    assert not {field.name for field in fields(EVENTS[name])} & {"sender", "signal", "self", "name"}


@each_name
def test_an_event_gives_its_fields_by_name_and_can_not_be_changed(name: str) -> None:
    event = example(name)
    assert event.fields() == {field.name: getattr(event, field.name) for field in fields(event)}
    with pytest.raises(FrozenInstanceError):
        event.key = "other"  # type: ignore[misc]


def test_a_call_that_does_not_come_back_has_no_countdown() -> None:
    about = {"task": "t", "key": "k", "task_id": "i"}
    event = LockConflicted(**about, policy="skip", holder="h", holder_task_id=None, remaining=1.0)
    assert event.countdown is None


# --- signals


def test_every_event_has_a_signal_of_its_name_and_no_signal_is_without_an_event() -> None:
    assert sorted(signals.__all__) == sorted(EVENTS)
    found = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert found == set(EVENTS)
    assert all(getattr(signals, name).name == name for name in EVENTS)


def test_the_public_names_are_sorted() -> None:
    assert list(signals.__all__) == sorted(signals.__all__)


@each_name
def test_a_receiver_gets_the_tasks_name_as_sender_and_the_fields_by_name(
    name: str, connect: Callable[..., Receiver]
) -> None:
    receiver, event = connect(name), example(name)
    signals.send(name, event.task, event.fields)
    assert receiver.heard == [{"signal": getattr(signals, name), "sender": "text", **event.fields()}]


@each_name
def test_a_signal_goes_to_its_own_receivers_only(name: str, connect: Callable[..., Receiver]) -> None:
    others = [connect(other) for other in EVENTS if other != name]
    event = example(name)
    signals.send(name, event.task, event.fields)
    assert all(other.heard == [] for other in others)


def test_a_receiver_may_listen_to_one_task_by_its_name(connect: Callable[..., Receiver]) -> None:
    mine, all_of_them = connect("lock_lost", sender="proj.sync"), connect("lock_lost")
    for task in ("proj.sync", "proj.other"):
        event = LockWentLost(task=task, key="k", task_id="i", reason="taken", fence=1)
        signals.send("lock_lost", "".join(task), event.fields)
    assert [heard["sender"] for heard in mine.heard] == ["proj.sync"]
    assert [heard["sender"] for heard in all_of_them.heard] == ["proj.sync", "proj.other"]


def test_whether_anybody_listens_can_be_asked(connect: Callable[..., Receiver]) -> None:
    assert not signals.heard("lock_lost")
    connect("lock_lost")
    assert signals.heard("lock_lost")
    assert not signals.heard("lock_acquired")


def test_where_nobody_listens_no_fields_are_made(connect: Callable[..., Receiver]) -> None:
    def fail() -> dict[str, Any]:
        raise AssertionError("nobody wanted them")

    signals.send("lock_lost", "proj.sync", fail)
    connect("lock_lost")
    with pytest.raises(AssertionError, match="nobody wanted them"):
        signals.send("lock_lost", "proj.sync", fail)


def fail(**_: Any) -> None:
    raise ValueError("a receiver's bug")


def test_a_receiver_that_raises_is_logged_and_hurts_nobody(
    connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    before, _, after = connect("lock_lost"), connect("lock_lost", fail), connect("lock_lost")
    event = example("lock_lost")
    signals.send("lock_lost", event.task, event.fields)
    assert len(before.heard) == len(after.heard) == 1
    assert "a receiver's bug" in caplog.text


@each_name
def test_a_receiver_that_raises_does_not_keep_the_log_line_away(
    name: str, connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    connect(name, fail)
    runtime = Runtime(Settings("memory://", "redislock_url", "p", {}, None, 5.0, False, {}), MemoryStore())
    with caplog.at_level("DEBUG", logger="celery_redislock.events"):
        runtime.emit(example(name))
    assert [record.name for record in caplog.records if record.name == "celery_redislock.events"] != []


def test_the_example_in_the_documentation_works(
    connect: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = re.findall(r"^\s+(?:>>>|\.\.\.) (.*)$", signals.__doc__ or "", re.MULTILINE)
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    try:
        event = LockConflicted(
            task="t", key="k", task_id="i", policy="skip", holder="h", holder_task_id=None, remaining=1.0
        )
        signals.send("lock_conflict", event.task, event.fields)
    finally:
        signals.lock_conflict.disconnect(space["count"])
    assert capsys.readouterr().out == "t was denied k: skip\n"
