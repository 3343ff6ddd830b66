"""The key that a run uses is the one that `lock_key_for` tells, and says nothing about the arguments."""

from __future__ import annotations

import datetime
import decimal
import uuid
from typing import Any

import pytest
from celery import Celery

from celery_redislock import LockKeyError, SingletonTask
from tests.gate.conftest import AppFactory, Hold, InProcessWorker, WorkerMaker

SECRET = "hunter2-4711"


def declare(app: Celery, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, **options)
    def sync(self: Any, account: Any, full: bool = False, *, depth: int = 3) -> str:
        return str(self.lock.key)

    return sync


SPELLINGS = [
    ((1,), {}),
    ((1, False), {}),
    ((1,), {"full": False}),
    ((), {"account": 1}),
    ((), {"depth": 3, "account": 1}),
    ((), {"full": False, "depth": 3, "account": 1}),
]


@pytest.mark.parametrize("bind", [False, True])
def test_all_spellings_of_one_call_run_under_the_key_that_is_told(
    app: Celery, worker: InProcessWorker, heard: Any, bind: bool
) -> None:
    if bind:
        sync = declare(app)
    else:

        @app.task(base=SingletonTask)
        def sync(account: Any, full: bool = False, *, depth: int = 3) -> None: ...

    for args, kwargs in SPELLINGS:
        sync.apply_async(args, kwargs)
    assert worker.run_all() == len(SPELLINGS)
    used = {fields["key"] for name, fields in heard if name == "lock_acquired"}
    told = {sync.lock_key_for(*args, **kwargs) for args, kwargs in SPELLINGS}
    assert used == told
    assert len(told) == 1
    assert sync.lock_key_for(2) not in told
    assert sync.lock_key_for(1, True) not in told
    assert sync.lock_key_for("1") not in told
    assert sync.lock_key_for(1.0) not in told


ARGUMENTS = [
    (1, 2),
    [1, [2, (3,)]],
    {"b": 1, "a": (1, 2)},
    {1: "int key"},
    None,
    2**70,
    1.5,
    "naïve",
    b"bytes",
    uuid.UUID(int=5),
    decimal.Decimal("1.10"),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
    datetime.date(2024, 1, 2),
    datetime.time(1, 2, 3),
]


@pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda a: type(a).__name__)
def test_senders_key_is_the_workers_key_after_the_round_trip_of_the_message(
    app: Celery, worker: InProcessWorker, argument: Any
) -> None:
    sync = declare(app)
    result = sync.delay(argument)
    worker.run()
    assert result.get() == sync.lock_key_for(argument)


def test_signature_in_a_chain_has_the_key_of_the_call_that_it_becomes(app: Celery, worker: InProcessWorker) -> None:
    sync = declare(app, lock_on=["account", "depth"])
    result = (app.tasks["celery.accumulate"].si(1, 2) | sync.s(depth=4)).delay()
    worker.run_all()
    assert result.get() == sync.lock_key_for([1, 2], depth=4)


def test_body_that_changes_its_arguments_does_not_change_the_key(
    app: Celery, worker: InProcessWorker, redis: Any
) -> None:
    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any, accounts: list[int], seen: list[int] = []) -> list[str]:  # noqa: B006
        accounts.append(2)
        seen.append(2)
        return [self.lock.key, self.lock_key_for([1])]

    for _ in range(2):
        result = sync.delay([1])
        worker.run()
        assert len(set(result.get())) == 1
    assert redis.keys() == ["redislock:{tests.gate.test_keys.sync}:fence"]


def look(app: Celery, worker: InProcessWorker, redis: Any, seen: dict[str, str], **options: Any) -> Any:
    """A task whose body notes each key of the server's, and what is in it."""

    @app.task(base=SingletonTask, bind=True, name=f"looks{len(seen)}", **options)
    def sync(self: Any, account: Any, full: bool = False) -> None:
        seen.update({key: redis.get(key) for key in redis.scan_iter()})

    return sync


def test_no_argument_is_readable_in_any_key_or_value(app: Celery, worker: InProcessWorker, redis: Any) -> None:
    seen: dict[str, str] = {}
    sync = look(app, worker, redis, seen, lock_done_ttl=60, lock_min_hold=60)
    sync.delay(SECRET)
    sync.apply_async((), {"account": {SECRET: SECRET}}, lock_on=["account"])
    worker.run_all()
    seen.update({key: redis.get(key) for key in redis.scan_iter()})
    assert {key.rpartition(":")[0] for key in seen} == {"redislock:{looks0}", "redislock:{looks0}:done"}
    assert SECRET not in str(seen)
    assert len(seen) == 5  # two locks, two markers, one fence


def test_argument_is_readable_where_the_user_has_templated_it(app: Celery, worker: InProcessWorker, redis: Any) -> None:
    seen: dict[str, str] = {}
    sync = look(app, worker, redis, seen, lock_key="account:{account}")
    sync.delay(SECRET)
    worker.run()
    assert set(seen) == {f"redislock:{{looks0}}:account:{SECRET}", "redislock:{looks0}:fence"}


def test_empty_lock_on_is_one_lock_for_the_task(app: Celery, worker: InProcessWorker, hold: Hold) -> None:
    @app.task(base=SingletonTask, lock_on=[], lock_skip_result="skipped")
    def sync(account: int) -> str:
        return "ran"

    hold(sync.lock_key_for(1))
    result = sync.delay(2)
    worker.run()
    assert result.get() == "skipped"


def test_tasks_of_one_lock_name_exclude_each_other(app: Celery, worker: InProcessWorker, hold: Hold) -> None:
    @app.task(base=SingletonTask, lock_name="accounts", lock_skip_result="skipped")
    def sync(account: int) -> str:
        return "ran"

    @app.task(base=SingletonTask, lock_name="accounts", lock_skip_result="skipped")
    def delete(account: int) -> str:
        return "ran"

    hold(sync.lock_key_for(1))
    results = [delete.delay(1), delete.delay(2)]
    worker.run_all()
    assert [result.get() for result in results] == ["skipped", "ran"]


def test_call_without_a_key_fails_before_its_body_and_its_message_has_no_argument(
    make_app: AppFactory, make_worker: WorkerMaker, redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    worker = make_worker(app)
    ran = []

    @app.task(base=SingletonTask, lock_key=lambda account: account["id"])
    def sync(account: Any) -> None:
        ran.append(account)

    result = sync.delay({"name": SECRET})
    worker.run()
    assert result.state == "FAILURE"
    assert isinstance(result.result, LockKeyError)
    assert str(result.result).startswith(f"{__name__}.sync: lock_key raised KeyError")
    assert SECRET not in str(result.result) + result.traceback
    assert not ran
    assert redis.keys() == []


def test_call_that_does_not_fit_the_signature_fails_as_celery_says_it(app: Celery, worker: InProcessWorker) -> None:
    sync = declare(app, typing=False)
    result = sync.delay()
    worker.run()
    assert result.state == "FAILURE"
    assert "missing a required argument: 'account'" in str(result.result)
    with pytest.raises(LockKeyError, match="missing a required argument: 'account'"):
        sync.lock_key_for()


def test_key_is_told_without_a_server(make_app: AppFactory) -> None:
    sync = declare(make_app(redislock_url="redis://127.0.0.1:1/0"))
    assert sync.lock_key_for(1).startswith(f"redislock:{{{__name__}.sync}}:v1-")


def test_pydantic_arguments_count_as_they_come_in_the_message(app: Celery, worker: InProcessWorker) -> None:
    pydantic = pytest.importorskip("pydantic")
    account = pydantic.create_model("Account", id=(int, ...))

    def body(self: Any, account: Any) -> list[Any]:
        return [self.lock.key, account.id]

    body.__annotations__["account"] = account
    sync = app.task(base=SingletonTask, bind=True, pydantic=True, name="sync")(body)
    result = sync.delay({"id": 5})
    worker.run()
    assert result.get() == [sync.lock_key_for({"id": 5}), 5]
