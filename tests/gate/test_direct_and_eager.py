"""Calls that no worker takes from a queue: direct ones take no lock, eager ones if they are told to."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.states import SUCCESS

from celery_redislock import LockConflict, LockUnavailable, SingletonMixin, SingletonTask, current_lock
from tests.gate.conftest import AppFactory, Hold, InProcessWorker, WorkerMaker, ttl
from tests.gate.test_declaration import CallsInContext, RunsInContext

NOWHERE = "redis://127.0.0.1:1/0"


# --- direct


def test_direct_call_needs_no_lock_no_server_and_no_redis_at_all(make_app: AppFactory) -> None:
    for url in (NOWHERE, None):
        app = make_app(redislock_url=url)

        @app.task(base=SingletonTask, bind=True, lock_ttl=5, shared=False)
        def sync(self: Any, account: int) -> Any:
            return account, self.request.id, self.request.called_directly

        assert sync(1) == (1, None, True)
        assert sync.run(1) == (1, None, True)


def test_lock_of_a_direct_call_says_why_there_is_none(app: Celery, hold: Hold) -> None:
    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any) -> None:
        assert current_lock() is None
        return self.lock

    hold(sync.lock_key_for())  # does not matter
    with pytest.raises(LockUnavailable, match=f"^{__name__}.sync: this run holds no lock: it was called directly"):
        sync()
    with pytest.raises(LockUnavailable, match=r"uses current_lock\(\)"):
        _ = sync.lock


def test_direct_call_inside_another_run_takes_no_lock_of_its_own(
    app: Celery, worker: InProcessWorker, hold: Hold, redis: Any
) -> None:
    @app.task(base=SingletonTask, bind=True)
    def inner(self: Any, account: int) -> Any:
        with pytest.raises(LockUnavailable, match="called directly"):
            _ = self.lock
        lock = current_lock()
        return lock and lock.key  # of the run that it is a part of

    @app.task(base=SingletonTask, bind=True)
    def outer(self: Any) -> Any:
        return [inner(1), self.lock.key]

    hold(inner.lock_key_for(1))
    result = outer.delay()
    worker.run()
    assert result.get() == [outer.lock_key_for(), outer.lock_key_for()]


def test_map_and_starmap_call_directly_and_so_without_a_lock(app: Celery, worker: InProcessWorker, redis: Any) -> None:
    """Celery runs all the items as one task of its own."""

    @app.task(base=SingletonTask)
    def count(account: int) -> int:
        return len(redis.keys())

    results = [count.map([1, 1]).delay(), count.starmap([(1,), (1,)]).delay()]
    worker.run_all()
    assert [result.get() for result in results] == [[0, 0], [0, 0]]


class InContext(SingletonMixin, RunsInContext):
    abstract = True


class CallingInContext(SingletonMixin, CallsInContext):
    abstract = True


@pytest.mark.parametrize("base", [SingletonTask, InContext, CallingInContext])
def test_task_that_calls_itself_keeps_its_lock_and_its_id(
    app: Celery, worker: InProcessWorker, heard: Any, base: type
) -> None:
    @app.task(base=base, bind=True, lock_on_conflict="raise")
    def factorial(self: Any, n: int) -> Any:
        inner = [] if n == 0 else self(n - 1)
        return [[n, self.request.id, self.lock.key], *inner]

    result = factorial.delay(3)
    worker.run()
    assert result.get() == [[n, result.id, factorial.lock_key_for(3)] for n in (3, 2, 1, 0)]
    assert [name for name, _ in heard] == ["lock_acquired", "lock_released"]


# --- eager


def test_eager_call_takes_no_lock_unless_told_to(make_app: AppFactory) -> None:
    for url in (NOWHERE, None):  # the suites of many projects have no Redis
        app = make_app(redislock_url=url, task_always_eager=True)

        @app.task(base=SingletonTask, bind=True, shared=False)
        def sync(self: Any, account: int) -> Any:
            assert current_lock() is None
            with pytest.raises(LockUnavailable, match="redislock_eager = True"):
                _ = self.lock
            return account

        for result in (sync.delay(1), sync.apply((1,)), sync.s(1).apply(), sync.s(1).delay()):
            assert result.get() == 1
            assert result.state == SUCCESS


@pytest.fixture
def app(make_app: AppFactory) -> Celery:
    """Takes locks in eager mode, too."""
    return make_app(redislock_eager=True)


@pytest.mark.parametrize("how", ["apply", "delay"])
@pytest.mark.parametrize("base", [SingletonTask, InContext, CallingInContext])
def test_told_to_an_eager_call_runs_under_its_lock(app: Celery, redis: Any, how: str, base: type) -> None:
    app.conf.task_always_eager = how == "delay"

    @app.task(base=base, bind=True)
    def sync(self: Any, account: int) -> Any:
        lock = current_lock()
        assert lock is self.lock
        assert lock is not None
        lock.ensure_held()
        return [redis.get(lock.key) == lock.token, self.request.id]

    result = sync.delay(1) if how == "delay" else sync.apply((1,))
    assert (result.get(), result.state) == ([True, result.id], SUCCESS)
    assert not redis.exists(sync.lock_key_for(1))
    assert current_lock() is None


def test_eager_call_inside_its_own_run_goes_on_under_the_same_lock(app: Celery, heard: Any) -> None:
    @app.task(base=SingletonTask, bind=True, lock_name="shared", lock_on=[])
    def outer(self: Any) -> Any:
        inside = middle.apply().get()
        self.lock.ensure_held()  # the inner end has not released it
        return [*inside, self.lock.key]

    @app.task(base=SingletonTask, bind=True)
    def middle(self: Any) -> Any:
        return [*inner.apply().get(), self.lock.key]

    @app.task(base=SingletonTask, bind=True, lock_name="shared", lock_on=[], lock_on_conflict="raise")
    def inner(self: Any) -> Any:
        current = current_lock()
        assert current is not None
        return [self.lock.key, current.key]

    shared, own = outer.lock_key_for(), middle.lock_key_for()
    assert outer.apply().get() == [shared, own, own, shared]
    assert [(name, fields["key"]) for name, fields in heard] == [
        ("lock_acquired", shared),
        ("lock_acquired", own),
        ("lock_released", own),
        ("lock_released", shared),
    ]


def test_eager_call_inside_a_workers_run_goes_on_under_its_lock(app: Celery, make_worker: WorkerMaker) -> None:
    @app.task(base=SingletonTask, bind=True, lock_on=[], lock_on_conflict="raise")
    def sync(self: Any, level: int) -> Any:
        return self.lock.fence if level == 2 else [self.lock.fence, self.apply((level + 1,)).get()]

    result = sync.delay(1)
    make_worker(app).run()
    first, second = result.get(disable_sync_subtasks=False)
    assert first == second


def test_eager_call_in_a_thread_of_its_own_is_no_re_entry(app: Celery) -> None:
    states = []

    @app.task(base=SingletonTask, bind=True, lock_on=[], lock_on_conflict="raise")
    def sync(self: Any, level: int = 1) -> None:
        if level == 1:
            thread = threading.Thread(target=lambda: states.append(self.apply((2,)).state))
            thread.start()
            thread.join()

    sync.apply()
    assert states == ["FAILURE"]


def test_runs_of_one_task_object_in_many_threads_each_see_their_own_lock(app: Celery) -> None:
    together = threading.Barrier(16, timeout=20)

    @app.task(base=SingletonTask, bind=True, lock_key="account:{account}")
    def sync(self: Any, account: int) -> None:
        for _ in range(3):
            together.wait()
            lock = current_lock()
            assert lock is self.lock
            assert self.lock.key.endswith(f":account:{account}")
        self.lock.ensure_held()

    app.finalize()
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: sync.apply((n,)), range(16)))
    assert {result.state for result in results} == {SUCCESS}


POLICIES = {
    "skip": (SUCCESS, "skipped"),
    "ignore": ("IGNORED", None),
    "raise": ("FAILURE", LockConflict),
    "retry": ("FAILURE", LockConflict),
    "wait": ("FAILURE", LockConflict),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_eager_call_that_a_foreign_holder_denies_ends_as_its_policy_says(
    app: Celery, hold: Hold, redis: Any, heard: Any, policy: str
) -> None:
    @app.task(base=SingletonTask, lock_on_conflict=policy, lock_skip_result="skipped", lock_wait=0.3)
    def sync(account: int) -> str:
        raise AssertionError("it was denied")

    key = sync.lock_key_for(1)
    token = hold(key)
    start = time.monotonic()
    result = sync.apply((1,))
    took = time.monotonic() - start
    state, value = POLICIES[policy]
    assert result.state == state
    if state == "FAILURE":
        assert isinstance(result.result, LockConflict)
        assert result.result.key == key
        assert "someone-else" in str(result.result.holder)
        with pytest.raises(LockConflict, match=f"{__name__}.sync: .* is held by task someone-else"):
            result.get()
    elif state == SUCCESS:
        assert result.get() == value
    assert (took >= 0.3) == (policy in {"retry", "wait"})
    assert redis.get(key) == token
    [(name, fields)] = heard
    assert (name, fields["policy"]) == ("lock_conflict", "wait" if policy == "retry" else policy)


@pytest.mark.parametrize("policy", ["retry", "wait"])
def test_eager_call_waits_in_place_for_the_lock(app: Celery, hold: Hold, redis: Any, policy: str) -> None:
    @app.task(base=SingletonTask, bind=True, lock_on_conflict=policy, lock_wait=20)
    def sync(self: Any, account: int) -> int:
        return int(self.request.retries)

    hold(sync.lock_key_for(1), ttl=0.3)
    result = sync.apply((1,))
    assert (result.get(), result.state) == (0, SUCCESS)


def test_propagating_eager_call_raises_the_conflict(app: Celery, hold: Hold) -> None:
    @app.task(base=SingletonTask, lock_on_conflict="raise")
    def sync(account: int) -> None: ...

    hold(sync.lock_key_for(1))
    with pytest.raises(LockConflict):
        sync.apply((1,), throw=True)


def test_eager_retry_runs_each_attempt_under_a_lock_of_its_own(app: Celery, redis: Any, heard: Any) -> None:
    @app.task(base=SingletonTask, bind=True, lock_on_conflict="raise", max_retries=5)
    def sync(self: Any, account: int) -> int:
        self.lock.ensure_held()
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return int(self.request.retries)

    result = sync.apply((1,))
    assert (result.get(), result.state) == (2, SUCCESS)
    assert [name for name, _ in heard] == ["lock_acquired", "lock_released"] * 3
    fences = [fields["fence"] for name, fields in heard if name == "lock_acquired"]
    assert fences == sorted(set(fences))
    assert not redis.exists(sync.lock_key_for(1))


def test_eager_replace_by_a_call_of_the_same_key_runs(app: Celery) -> None:
    @app.task(base=SingletonTask, bind=True, lock_on=[], lock_on_conflict="raise")
    def sync(self: Any, level: int) -> Any:
        if level:
            return self.replace(self.s(level - 1))
        return "replaced"

    result = sync.apply((2,))
    assert (result.get(disable_sync_subtasks=False), result.state) == ("replaced", SUCCESS)


def test_eager_canvas_of_equal_calls_runs_each(app: Celery, redis: Any) -> None:
    app.conf.task_always_eager = True

    @app.task(base=SingletonTask, lock_on=[], lock_on_conflict="raise")
    def add(*numbers: Any) -> int:
        return sum(n if isinstance(n, int) else sum(n) for n in numbers)

    assert chain(add.s(1, 1), add.s(1), add.s(1)).delay().get() == 4
    assert group(add.s(1, n) for n in range(3)).delay().get() == [1, 2, 3]
    assert chord([add.s(1, 1), add.s(1, 1)])(add.s()).get() == 4
    linked = add.apply_async((1,), link=add.s(1))
    assert linked.get() == 1
    assert list(redis.scan_iter("redislock:*:v1-*")) == []


def test_eager_call_takes_options_of_its_own(app: Celery, redis: Any, hold: Hold) -> None:
    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any, account: int, full: bool = False) -> int:
        return ttl(redis, self.lock.key)

    assert sync.apply((1,), lock_ttl=100).get() == 100
    assert sync.s(1).set(lock_ttl=100).apply().get() == 100
    app.conf.task_always_eager = True
    assert sync.apply_async((1,), lock_ttl=100).get() == 100
    hold(sync.lock_key_for(1))
    assert sync.apply((1,), lock_on_conflict="skip", lock_skip_result=7.5).get() == 7.5
    assert sync.apply((1,), lock_name="other").get() > 0


def test_eager_outage_is_an_error_whatever_waits_in_a_worker(make_app: AppFactory) -> None:
    app = make_app(redislock_eager=True, redislock_url=NOWHERE, redislock_timeout=0.1)

    @app.task(base=SingletonTask, lock_on_outage="retry")
    def sync() -> None: ...

    result = sync.apply()
    assert result.state == "FAILURE"
    with pytest.raises(LockUnavailable, match=f"^{__name__}.sync: redislock:"):
        result.get()
