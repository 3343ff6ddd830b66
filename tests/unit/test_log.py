"""celery_redislock.observe.log: one line for each event, never a storm of them."""

from __future__ import annotations

import json
import logging
import math
import string
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_redislock.lease import Holder, Token
from celery_redislock.observe.events import (
    EVENTS,
    Event,
    LockAcquired,
    LockConflicted,
    LockOrphaned,
    LockOutage,
    LockRecovered,
    LockReleased,
    LockWentLost,
    RenewalLate,
)
from celery_redislock.observe.log import BURST, LEFT_OUT, LEVELS, PER_SECOND, TEXTS, LogListener

NONCE = "0123456789abcdef01234567"
ABOUT = {"task": "proj.sync", "key": "redislock:{proj.sync}:v1-0", "task_id": "8c1f"}
HOLDER = Holder.parse(Token("9d2e", 0, NONCE, "celery@web", 4711, 1).encode())

EXAMPLES: list[tuple[Event, int, str]] = [
    (
        LockAcquired(**ABOUT, fence=17, waited=0.25),
        logging.DEBUG,
        "proj.sync[8c1f] holds redislock:{proj.sync}:v1-0, fence 17",
    ),
    (
        LockReleased(**ABOUT, fence=17, held=1.23456),
        logging.DEBUG,
        "proj.sync[8c1f] gave up redislock:{proj.sync}:v1-0 after 1.235 s",
    ),
    (
        LockConflicted(
            **ABOUT, policy="skip", holder=str(HOLDER), holder_task_id="9d2e", remaining=12.34, countdown=None
        ),
        logging.INFO,
        f"proj.sync[8c1f] was denied {ABOUT['key']}, held by task 9d2e on celery@web pid 4711 for another 12.3 s: skip",
    ),
    (
        LockWentLost(**ABOUT, reason="taken", fence=17),
        logging.WARNING,
        f"proj.sync[8c1f] has lost {ABOUT['key']} (taken) before its run ended; another run may have started",
    ),
    (
        LockRecovered(**ABOUT, fence=17),
        logging.WARNING,
        "proj.sync[8c1f] still has redislock:{proj.sync}:v1-0: it was never lost",
    ),
    (
        RenewalLate(**ABOUT, late=4.56),
        logging.WARNING,
        "proj.sync[8c1f] renews redislock:{proj.sync}:v1-0 4.6 s late: this process was starved",
    ),
    (
        LockOrphaned(**ABOUT, fence=17, pid=4711),
        logging.WARNING,
        "proj.sync[8c1f] gave up redislock:{proj.sync}:v1-0: pid 4711, which ran it, has died",
    ),
    (
        LockOutage(**ABOUT, operation="acquire", policy="come_back", reason="TimeoutError"),
        logging.WARNING,
        "proj.sync[8c1f] could not acquire redislock:{proj.sync}:v1-0: come_back; TimeoutError",
    ),
]
each_event = pytest.mark.parametrize(("event", "level", "text"), EXAMPLES, ids=[event.name for event, *_ in EXAMPLES])

LOST = EXAMPLES[3][0]


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines since the last call."""
    caplog.set_level(logging.DEBUG, logger="celery_redislock.events")

    def take() -> list[str]:
        taken = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return taken

    return take


# --- what a line says


@each_event
def test_an_event_is_one_line_at_its_level(
    event: Event, level: int, text: str, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    with caplog.at_level(logging.DEBUG, logger="celery_redislock.events"):
        LogListener(clock)(event)
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == ("celery_redislock.events", level, text)


@each_event
def test_a_line_carries_the_events_fields_as_extra(
    event: Event, level: int, text: str, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    with caplog.at_level(logging.DEBUG, logger="celery_redislock.events"):
        LogListener(clock)(event)
    plain = vars(logging.makeLogRecord({}))
    extra = {k: v for k, v in vars(caplog.records[0]).items() if k not in plain and k not in ("message", "asctime")}
    assert extra == {"lock_event": event.name, **{f"lock_{k}": v for k, v in event.fields().items()}}
    json.dumps(extra)  # what log shippers do


def test_every_event_has_a_level_a_text_and_an_example() -> None:
    assert set(LEVELS) == set(TEXTS) == set(EVENTS) == {event.name for event, *_ in EXAMPLES}


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_a_text_names_only_fields_that_its_event_has_and_says_who_and_what(name: str) -> None:
    class Asked(dict[str, Any]):
        def __missing__(self, field: str) -> float:
            self[field] = 0.0
            return 0.0

    asked = Asked()
    (TEXTS[name] % asked)
    assert {"task", "task_id", "key"} <= set(asked)
    assert set(asked) <= {field.name for field in fields(EVENTS[name])}
    assert "%(left_out)" in LEFT_OUT
    assert "left_out" not in {field.name for field in fields(EVENTS[name])}


def test_no_extra_field_clashes_with_one_of_pythons_log_records() -> None:
    taken = {*vars(logging.makeLogRecord({})), "message", "asctime"}
    for event in EVENTS.values():
        assert not {f"lock_{field.name}" for field in fields(event)} & taken
    assert "lock_event" not in taken


def test_a_lease_without_any_end_can_be_written(lines: Callable[[], list[str]], clock: Clock) -> None:
    event = LockConflicted(**ABOUT, policy="skip", holder="an unknown client", holder_task_id=None, remaining=math.inf)
    LogListener(clock)(event)
    assert lines() == [
        "proj.sync[8c1f] was denied redislock:{proj.sync}:v1-0, held by an unknown client for another inf s: skip"
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=string.printable) | st.sampled_from(["%", "%s", "%(key)s", "%d", "{key}"]))
def test_signs_of_formatting_in_names_are_written_as_they_are(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="celery_redislock.events"):
        LogListener(Clock())(LockRecovered(task=text, key=text, task_id=text, fence=1))
    assert caplog.records[0].getMessage() == f"{text}[{text}] still has {text}: it was never lost"


def test_no_token_and_no_nonce_gets_into_a_line(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    with caplog.at_level(logging.DEBUG, logger="celery_redislock.events"):
        for event, *_ in EXAMPLES:
            LogListener(clock)(event)
    assert NONCE not in caplog.text
    assert all(NONCE not in repr(vars(record)) for record in caplog.records)


# --- whether it is written at all


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        (logging.DEBUG, set(EVENTS)),
        (logging.INFO, set(EVENTS) - {"lock_acquired", "lock_released"}),
        (logging.WARNING, {"lock_lost", "lock_recovered", "lock_renewal_late", "lock_orphaned", "lock_unavailable"}),
        (logging.ERROR, set()),
    ],
)
def test_what_the_logger_would_not_write_is_not_wanted_and_not_written(
    level: int, wanted: set[str], caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    listener = LogListener(clock)
    with caplog.at_level(level, logger="celery_redislock.events"):
        assert {name for name in EVENTS if listener.wants(name)} == wanted
        for event, *_ in EXAMPLES:
            listener(event)
    assert {getattr(record, "lock_event", None) for record in caplog.records} == wanted


def test_lines_that_were_not_wanted_use_nothing_up(
    lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    listener = LogListener(clock)
    with caplog.at_level(logging.CRITICAL, logger="celery_redislock.events"):
        for _ in range(1000):
            listener(LOST)
    assert lines() == []
    listener(LOST)
    assert lines() == [EXAMPLES[3][2]]


# --- how many


def test_a_storm_is_ten_lines_and_then_one_a_second(lines: Callable[[], list[str]], clock: Clock) -> None:
    assert (BURST, PER_SECOND) == (10, 1.0)
    listener = LogListener(clock)
    for _ in range(100):
        listener(LOST)
    assert len(lines()) == 10
    for _ in range(600):  # a minute of ten a second
        clock.now += 0.125
        listener(LOST)
    assert len(lines()) == 75


def test_what_was_left_out_is_counted_in_the_next_line_and_only_there(
    lines: Callable[[], list[str]], clock: Clock
) -> None:
    listener = LogListener(clock)
    for _ in range(10 + 37):
        listener(LOST)
    assert all("left out" not in line for line in lines())
    clock.now += 1.0
    listener(LOST)
    assert lines() == [EXAMPLES[3][2] + " (37 such lines left out)"]
    clock.now += 1.0
    listener(LOST)
    assert lines() == [EXAMPLES[3][2]]


def test_no_line_is_lost_from_the_count(lines: Callable[[], list[str]], clock: Clock) -> None:
    listener = LogListener(clock)
    for n in range(500):
        clock.now += 0.3 if n % 7 else 0.0
        listener(LOST)
    clock.now += 60
    listener(LOST)
    written = lines()
    left_out = sum(int(line.rpartition("(")[2].split()[0]) for line in written if "left out" in line)
    assert len(written) + left_out == 501
    assert left_out > 100


def test_after_a_quiet_time_ten_lines_are_free_again_and_no_more(lines: Callable[[], list[str]], clock: Clock) -> None:
    listener = LogListener(clock)
    for _ in range(100):
        listener(LOST)
    lines()
    clock.now += 3600
    for _ in range(100):
        listener(LOST)
    assert len(lines()) == 10


def test_one_tasks_storm_silences_neither_other_tasks_nor_other_events(
    lines: Callable[[], list[str]], clock: Clock
) -> None:
    listener = LogListener(clock)
    for _ in range(100):
        listener(LOST)
    lines()
    listener(LockWentLost(task="proj.other", key="k", task_id="i", reason="taken", fence=1))
    listener(LockRecovered(**ABOUT, fence=1))
    assert [line.split()[0] for line in lines()] == ["proj.other[i]", "proj.sync[8c1f]"]


def test_the_memory_for_limits_grows_with_tasks_and_not_with_keys(clock: Clock) -> None:
    listener = LogListener(clock)
    for n in range(1000):
        listener(LockWentLost(task="proj.sync", key=f"k{n}", task_id=f"i{n}", reason="taken", fence=n))
    assert len(listener._buckets) == 1
