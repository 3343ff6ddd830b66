"""Whatever happens to a lock is told: by a signal, and by a log line with its fields. Listeners can't hurt."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from celery import Celery

from celery_redislock import SingletonTask, signals
from celery_redislock.observe.events import EVENTS
from tests.gate.conftest import AppFactory, Hold, InProcessWorker, WorkerMaker
from tests.local_nodes.waiting import wait_until

SECRET = "hunter2-4711"


@pytest.fixture
def sync(app: Celery) -> Any:
    @app.task(base=SingletonTask, bind=True, lock_skip_result="skipped")
    def sync(self: Any, account: Any) -> Any:
        return [self.lock.key, self.lock.fence, self.lock.token]

    return sync


def test_each_event_has_its_signal() -> None:
    assert set(signals.__all__) == set(EVENTS)


def test_run_tells_that_it_has_got_and_given_up_its_lock(sync: Any, worker: InProcessWorker, heard: Any) -> None:
    result = sync.delay(1)
    worker.run()
    key, fence, _ = result.get()
    common = {"sender": sync.name, "task": sync.name, "key": key, "task_id": result.id, "fence": fence}
    [(acquired, got), (released, gave)] = heard
    assert (acquired, released) == ("lock_acquired", "lock_released")
    assert 0 <= got.pop("waited") < 10
    assert 0 <= gave.pop("held") < 10
    assert got == gave == common


POLICIES = {"skip": False, "ignore": False, "raise": False, "wait": False, "retry": True}


@pytest.mark.parametrize("policy", POLICIES)
def test_denied_call_tells_who_holds_the_lock_and_what_it_does_now(
    sync: Any, worker: InProcessWorker, hold: Hold, heard: Any, policy: str
) -> None:
    key = sync.lock_key_for(1)
    hold(key, ttl=60)
    result = sync.apply_async((1,), lock_on_conflict=policy, lock_wait=0.05)
    worker.run()
    [(name, fields)] = heard
    assert name == "lock_conflict"
    assert 50 < fields.pop("remaining") <= 60
    countdown = fields.pop("countdown")
    assert (countdown is not None) == POLICIES[policy]
    if countdown is not None:
        assert 0 < countdown < 1
    assert fields == {
        "sender": sync.name,
        "task": sync.name,
        "key": key,
        "task_id": result.id,
        "policy": policy,
        "holder": "task someone-else on w@elsewhere pid 1",
        "holder_task_id": "someone-else",
    }


def test_holder_in_a_format_of_others_is_told_as_unknown(
    sync: Any, worker: InProcessWorker, redis: Any, heard: Any, log: pytest.LogCaptureFixture
) -> None:
    redis.set(sync.lock_key_for(1), SECRET, px=60_000)
    result = sync.delay(1)
    worker.run()
    assert result.get() == "skipped"
    [(_, fields)] = heard
    assert (fields["holder"], fields["holder_task_id"]) == ("an unknown client", None)
    assert SECRET not in str(heard) + log.text
    assert redis.get(sync.lock_key_for(1)) == SECRET


def test_redelivered_copy_tells_that_it_comes_back(sync: Any, worker: InProcessWorker, hold: Hold, heard: Any) -> None:
    sync.delay(1)
    message = worker.take()
    hold(sync.lock_key_for(1), task_id=message.headers["id"])
    worker.run(message, redelivered=True)
    [(name, fields)] = heard
    assert (name, fields["policy"], fields["holder_task_id"]) == ("lock_conflict", "come_back", message.headers["id"])


def test_lock_that_is_lost_while_the_body_runs_is_told_once(
    app: Celery, worker: InProcessWorker, redis: Any, heard: Any
) -> None:
    @app.task(base=SingletonTask, bind=True, lock_ttl=1.5)
    def sync(self: Any) -> float:
        redis.delete(self.lock.key)
        wait_until(lambda: not self.lock.held, "the loss")
        return float(self.lock.remaining())

    result = sync.delay()
    worker.run()
    assert (result.get(), result.state) == (0.0, "SUCCESS")
    assert [name for name, _ in heard] == ["lock_acquired", "lock_lost"]
    assert (heard[1][1]["reason"], heard[1][1]["fence"]) == ("missing", heard[0][1]["fence"])


def test_lock_that_is_found_gone_at_the_end_is_told_once(
    app: Celery, worker: InProcessWorker, redis: Any, hold: Hold, heard: Any
) -> None:
    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any) -> str:
        redis.delete(self.lock.key)
        return hold(self.lock.key)

    result = sync.delay()
    worker.run()
    assert result.state == "SUCCESS"
    assert redis.get(sync.lock_key_for()) == result.get()
    assert [(name, fields.get("reason")) for name, fields in heard] == [("lock_acquired", None), ("lock_lost", "taken")]


@pytest.mark.parametrize("name", ["lock_acquired", "lock_released", "lock_conflict", "lock_unavailable"])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), AssertionError()])
def test_receiver_that_raises_changes_nothing(
    make_app: AppFactory,
    make_worker: WorkerMaker,
    make_server: Any,
    hold: Hold,
    redis: Any,
    name: str,
    error: Exception,
) -> None:
    called = []

    def fail(**fields: Any) -> None:
        called.append(fields)
        raise error

    server = make_server() if name == "lock_unavailable" else None
    app = make_app(**({"redislock_url": server.url, "redislock_timeout": 0.1} if server else {}))
    worker = make_worker(app)

    @app.task(base=SingletonTask, lock_skip_result="skipped", lock_on_outage="run")
    def sync(account: int) -> str:
        return "ran"

    getattr(signals, name).connect(fail, weak=False)
    try:
        if server:
            server.kill()
        if name == "lock_conflict":
            hold(sync.lock_key_for(1))
        result = sync.delay(1)
        worker.run()
    finally:
        getattr(signals, name).disconnect(fail)
    assert result.get() == ("skipped" if name == "lock_conflict" else "ran")
    assert [fields["task"] for fields in called] == [sync.name]
    if name != "lock_conflict":
        assert not redis.exists(sync.lock_key_for(1))


def test_log_handler_that_raises_changes_nothing_and_keeps_no_receiver_from_hearing(
    sync: Any, worker: InProcessWorker, hold: Hold, heard: Any, log: pytest.LogCaptureFixture
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("a bug")

    logger, broken = logging.getLogger("celery_redislock.events"), Broken()
    hold(sync.lock_key_for(1))
    logger.addHandler(broken)
    try:
        result = sync.delay(1)
        worker.run()
    finally:
        logger.removeHandler(broken)
    assert result.get() == "skipped"
    assert [name for name, _ in heard] == ["lock_conflict"]


def test_receiver_may_listen_to_one_task_only(app: Celery, worker: InProcessWorker) -> None:
    seen = []

    def receive(sender: str, **_: Any) -> None:
        seen.append(sender)

    def body() -> None: ...

    for name in ("one", "two"):
        app.task(base=SingletonTask, name=name)(body)
    signals.lock_acquired.connect(receive, sender="two", weak=False)
    try:
        for name in ("one", "two"):
            app.tasks[name].delay()
        worker.run_all()
    finally:
        signals.lock_acquired.disconnect(receive, sender="two")
    assert seen == ["two"]


def test_each_line_of_the_log_has_the_fields_of_its_event(
    sync: Any, worker: InProcessWorker, hold: Hold, redis: Any, log: pytest.LogCaptureFixture
) -> None:
    results = [sync.delay(1), sync.delay(1)]
    worker.run()
    token = results[0].get()[2]
    hold(sync.lock_key_for(1))
    worker.run()
    records = [record for record in log.records if hasattr(record, "lock_event")]
    assert [(r.lock_event, r.levelno, r.name) for r in records] == [
        ("lock_acquired", logging.DEBUG, "celery_redislock.events"),
        ("lock_released", logging.DEBUG, "celery_redislock.events"),
        ("lock_conflict", logging.INFO, "celery_redislock.events"),
    ]
    for record, result in zip(records, (results[0], results[0], results[1]), strict=True):
        event = EVENTS[record.lock_event]
        fields = {field.name for field in dataclasses.fields(event)}
        extra = {name for name in vars(record) if name.startswith("lock_")}
        assert extra == {f"lock_{name}" for name in fields} | {"lock_event"}
        assert (record.lock_task, record.lock_task_id) == (sync.name, result.id)
        assert record.lock_key == sync.lock_key_for(1)
        assert record.lock_key in record.getMessage()
        assert token not in str(vars(record))
        assert token.split("|")[3] not in str(vars(record))


def test_no_line_and_no_event_of_ours_has_an_argument(
    sync: Any, worker: InProcessWorker, hold: Hold, redis: Any, log: pytest.LogCaptureFixture, heard: Any
) -> None:
    sync.delay(SECRET)
    worker.run()
    hold(sync.lock_key_for(SECRET))
    for policy in POLICIES:
        sync.apply_async((SECRET,), lock_on_conflict=policy, lock_wait=0.01)
        worker.run()
    ours = [record for record in log.records if record.name.startswith("celery_redislock")]
    assert len(ours) == len(heard) == 2 + len(POLICIES)
    assert SECRET not in str([vars(record) for record in ours])
    assert SECRET not in str(heard)
