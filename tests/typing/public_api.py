"""How typed code uses the library. Never run: `make types` checks it, and a wrong type here is a broken promise."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

from celery import Celery, Task

from celery_redislock import (
    HeldLock,
    LockConfigError,
    LockConflict,
    LockKeyError,
    LockLost,
    LockUnavailable,
    RedisLockError,
    SingletonMixin,
    SingletonTask,
    current_lock,
)
from celery_redislock.runtime import Runtime
from celery_redislock.signals import lock_conflict, lock_lost

app = Celery("proj", broker="redis://localhost/0")


# --- a bound task


# Celery has no types: strict mypy wants to be told so for each of its decorators and classes.
@app.task(base=SingletonTask, bind=True, lock_on=["account_id"], lock_ttl=60)  # type: ignore[untyped-decorator]
def sync_account(self: SingletonTask, account_id: int, full: bool = False) -> int:
    assert_type(self.lock, HeldLock)
    assert_type(self.lock.key, str)
    assert_type(self.lock.fence, int)
    assert_type(self.lock.token, str)
    assert_type(self.lock.held, bool)
    assert_type(self.lock.remaining(), float)
    self.lock.ensure_held()
    assert_type(self.lock_key_for(account_id, full=full), str)
    return self.lock.fence


# --- options as class attributes


def account_key(account_id: int) -> str:
    return f"account:{account_id}"


class AppTask(SingletonMixin, Task):  # type: ignore[misc]
    abstract = True
    lock_enabled = True
    lock_name = "accounts"
    lock_ttl = timedelta(minutes=1)
    lock_max_hold = 3600
    lock_min_hold = 0.5
    lock_on_conflict = "wait"
    lock_wait = 2.5
    lock_retry_for = None
    lock_skip_result = {"status": "skipped"}  # noqa: RUF012
    lock_on_outage = "run"
    lock_done_ttl = timedelta(hours=1)


class Sync(AppTask):
    name = "proj.sync"
    lock_key = staticmethod(account_key)

    def run(self, account_id: int) -> str:
        return self.lock_key_for(account_id)


class Nightly(SingletonTask):
    name = "proj.nightly"
    lock_on = []  # noqa: RUF012


# --- a helper further down


def helper() -> int:
    lock = current_lock()
    assert_type(lock, HeldLock | None)
    return lock.fence if lock is not None else 0


# --- a plain lock


def nightly_report() -> None:
    try:
        with Runtime.of(app).lock("nightly-report", ttl=timedelta(minutes=5), wait=1.5) as lock:
            assert_type(lock, HeldLock)
            lock.ensure_held()
    except LockConflict as conflict:
        assert_type(conflict.key, str | None)
        assert_type(conflict.holder, str | None)
    except LockLost as lost:
        assert_type(lost.reason, str | None)
    except (LockUnavailable, LockKeyError, LockConfigError) as error:
        base: RedisLockError = error
        print(base)


# --- signals


@lock_conflict.connect  # type: ignore[untyped-decorator]
def count(sender: str, key: str, policy: str, **fields: Any) -> None:
    print(sender, key, policy, fields)


def alarm(sender: str, reason: str, fence: int, **fields: Any) -> None:
    print(sender, reason, fence, fields)


lock_lost.connect(alarm)
