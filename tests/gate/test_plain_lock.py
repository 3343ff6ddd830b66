"""`Runtime.of(app).lock(...)`: the same lock for a critical section, in and outside of tasks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_redislock import LockConfigError, LockConflict, LockLost, LockUnavailable, SingletonTask, current_lock
from celery_redislock.runtime import Runtime
from celery_redislock.testing import EmbeddedServer
from tests.gate.conftest import AppFactory, Hold, InProcessWorker, ttl
from tests.local_nodes.waiting import wait_until

KEY = "redislock:{migration}:lock"


@pytest.fixture
def runtime(app: Celery) -> Runtime:
    return Runtime.of(app)


def test_section_holds_the_lock_and_gives_it_up(runtime: Runtime, redis: Any, heard: Any) -> None:
    with runtime.lock("migration", ttl=100) as lock:
        assert lock.key == KEY
        assert redis.get(KEY) == lock.token
        assert ttl(redis, KEY) == 100
        assert lock is current_lock()
        lock.ensure_held()
        assert 50 < lock.remaining() <= 100
    assert not redis.exists(KEY)
    assert current_lock() is None
    assert (lock.held, lock.remaining()) == (False, 0.0)
    with pytest.raises(LockLost):
        lock.ensure_held()
    assert [(name, fields["sender"], fields["key"], fields["task_id"]) for name, fields in heard] == [
        ("lock_acquired", "-", KEY, "-"),
        ("lock_released", "-", KEY, "-"),
    ]


def test_lock_that_another_holds_is_a_conflict_at_once(runtime: Runtime, redis: Any, hold: Hold) -> None:
    token = hold(KEY)
    start = time.monotonic()
    with (
        pytest.raises(LockConflict, match="is held by task someone-else on w@elsewhere") as caught,
        runtime.lock("migration"),
    ):
        pytest.fail("it was held")
    assert time.monotonic() - start < 1
    assert caught.value.key == KEY
    assert caught.value.holder == "task someone-else on w@elsewhere pid 1"
    assert redis.get(KEY) == token


def test_section_waits_for_the_lock_as_long_as_it_is_told(runtime: Runtime, hold: Hold) -> None:
    hold(KEY, ttl=0.3)
    with runtime.lock("migration", wait=timedelta(seconds=20)) as lock:
        assert lock.held
    hold(KEY)
    start = time.monotonic()
    with pytest.raises(LockConflict), runtime.lock("migration", wait=0.3):
        pytest.fail("it was held")
    assert 0.3 <= time.monotonic() - start < 5


def test_section_longer_than_its_ttl_keeps_the_lock(runtime: Runtime, redis: Any) -> None:
    with runtime.lock("migration", ttl=1) as lock:
        end = time.monotonic() + 2.2
        while time.monotonic() < end:
            assert redis.get(KEY) == lock.token
            time.sleep(0.02)
        lock.ensure_held()
    assert not redis.exists(KEY)


def test_section_whose_lock_was_taken_away_is_told_and_leaves_it_alone(
    runtime: Runtime, redis: Any, hold: Hold, heard: Any
) -> None:
    with runtime.lock("migration", ttl=1.5) as lock:
        redis.delete(KEY)
        token = hold(KEY)
        wait_until(lambda: not lock.held, "the loss")
        with pytest.raises(LockLost, match=r"the lease on .* is gone \(taken\)") as caught:
            lock.ensure_held()
        assert (caught.value.key, caught.value.reason) == (KEY, "taken")
    assert redis.get(KEY) == token
    assert [name for name, _ in heard] == ["lock_acquired", "lock_lost"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_exception_inside_goes_on_and_the_lock_is_given_up(
    runtime: Runtime, redis: Any, error: type[BaseException]
) -> None:
    with pytest.raises(error), runtime.lock("migration"):
        raise error
    assert not redis.exists(KEY)
    assert current_lock() is None


def test_nested_sections_of_different_names_hold_both(runtime: Runtime, redis: Any) -> None:
    with runtime.lock("outer") as outer, runtime.lock("inner") as inner:
        assert redis.exists(outer.key, inner.key) == 2
        assert current_lock() is inner
    assert not redis.exists(outer.key, inner.key)


def test_nested_section_of_the_same_name_is_a_conflict_not_a_deadlock(runtime: Runtime) -> None:
    with runtime.lock("migration") as lock:
        with pytest.raises(LockConflict), runtime.lock("migration"):
            pytest.fail("it was held")
        assert current_lock() is lock
        lock.ensure_held()


def test_threads_exclude_each_other(runtime: Runtime) -> None:
    inside, most, done = 0, 0, []
    mutex = threading.Lock()

    def work(n: int) -> None:
        nonlocal inside, most
        assert current_lock() is None
        with runtime.lock("migration", wait=30) as lock:
            with mutex:
                inside += 1
                most = max(most, inside)
            time.sleep(0.01)
            assert current_lock() is lock
            with mutex:
                inside -= 1
        done.append(lock.fence)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))
    assert most == 1
    assert done == sorted(set(done))
    assert len(done) == 24


def test_section_in_a_task_is_named_by_the_task_and_its_lock_comes_back(
    app: Celery, worker: InProcessWorker, redis: Any
) -> None:
    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any) -> Any:
        with Runtime.of(self.app).lock("migration") as lock:
            assert current_lock() is lock
            holder = redis.get(KEY).split("|")[1]
        assert current_lock() is self.lock
        self.lock.ensure_held()
        return holder

    result = sync.delay()
    worker.run()
    assert result.get() == result.id


def test_name_has_other_keys_than_a_task_of_that_name(app: Celery, runtime: Runtime) -> None:
    @app.task(base=SingletonTask, name="migration", lock_key="lock")
    def sync() -> None: ...

    with runtime.lock("migration") as lock:
        assert lock.key != sync.lock_key_for()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("migration", {"ttl": 0}, r"lock\('migration'\): lock_ttl=0 is too short"),
        ("migration", {"ttl": None}, "would never expire"),
        ("migration", {"wait": -1}, "lock_wait=-1 is negative"),
        ("", {}, "lock_name='' is not a name"),
    ],
)
def test_wrong_argument_is_an_error_that_names_it(
    runtime: Runtime, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LockConfigError, match=message), runtime.lock(name, **options):
        pytest.fail("it was wrong")


def test_store_that_is_away_is_an_error_within_the_timeout(
    make_app: AppFactory, make_server: type[EmbeddedServer]
) -> None:
    server = make_server()
    runtime = Runtime.of(make_app(redislock_url=server.url, redislock_timeout=0.6))
    server.stop()
    start = time.monotonic()
    with pytest.raises(LockUnavailable, match="the lock store can't be used"), runtime.lock("migration", wait=60):
        pytest.fail("it could not be asked")
    assert time.monotonic() - start < 5


def test_store_that_is_away_at_the_end_does_not_change_what_the_section_has_done(
    make_app: AppFactory, make_server: type[EmbeddedServer], heard: Any
) -> None:
    server = make_server()
    runtime = Runtime.of(make_app(redislock_url=server.url, redislock_timeout=0.6))
    with runtime.lock("migration"):
        server.stop()
    name, fields = heard[-1]
    assert (name, fields["operation"], fields["policy"]) == ("lock_unavailable", "release", "warn")
