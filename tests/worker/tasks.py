"""Tasks of the worker tests. Each says in the recorder when it ran, under its lock key and with its fence."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject

from celery_redislock import LockLost, SingletonTask
from tests.local_nodes.recorder import Recorder

SKIPPED = "skipped"


@shared_task(bind=True, base=SingletonTask, lock_skip_result=SKIPPED, lock_on=["key"])
def job(self: Any, key: str, seconds: float = 0.0, **_: Any) -> str:
    """A body of a given length; what else it is called with does not count."""
    Recorder.from_env().work(key, seconds, self.request.id, self.lock.fence)
    return "ran"


@shared_task(bind=True, base=SingletonTask, lock_skip_result=SKIPPED, lock_on=["key"], lock_ttl=1)
def short_lease(self: Any, key: str, seconds: float, busy: bool = False) -> dict[str, Any]:
    """A body that runs for several leases; it notes whether it still holds its lock at the end."""
    recorder = Recorder.from_env()
    with recorder.run(key, self.request.id, self.lock.fence) as run:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not busy:
                time.sleep(min(left, 0.02))
            recorder.beat(key, run)
        try:
            self.lock.ensure_held()
            lost = ""
        except LockLost as error:
            lost = str(error.reason)
        return {"fence": self.lock.fence, "lost": lost, "remaining": self.lock.remaining()}


@shared_task(
    bind=True,
    base=SingletonTask,
    lock_skip_result=SKIPPED,
    lock_on=["key"],
    autoretry_for=(ZeroDivisionError,),
    retry_kwargs={"max_retries": 2, "countdown": 0},
    default_retry_delay=0,
)
def ending(self: Any, key: str, how: str) -> str:
    """A body that ends in a given way."""
    with Recorder.from_env().run(key, self.request.id, self.lock.fence):
        return ENDINGS[how](self)


def _retry(task: Any) -> str:
    if task.request.retries < 2:
        raise task.retry(countdown=0, max_retries=2)
    return "retried"


def _replace(task: Any) -> str:
    raise task.replace(replacement.s())


def _raise(error: type[BaseException], *args: Any) -> Any:
    def end(_: Any) -> str:
        raise error(*args)

    return end


def _soft_limit(_: Any) -> str:
    time.sleep(30)
    return "not limited"


ENDINGS = {
    "success": lambda _: "ran",
    "exception": _raise(ValueError, "as wanted"),
    "retry": _retry,
    "autoretry": _raise(ZeroDivisionError),
    "ignore": _raise(Ignore),
    "reject": _raise(Reject, "as wanted", False),
    "replace": _replace,
    "soft limit": _soft_limit,
    "SystemExit": _raise(SystemExit, 3),
    "unserialisable": lambda _: object(),
}


@shared_task
def replacement() -> str:
    return "replaced"


@shared_task(bind=True, base=SingletonTask, lock_skip_result=SKIPPED, lock_on=["key"])
def again(self: Any, key: str, times: int) -> int:
    """A task that sends itself again as its last statement."""
    with Recorder.from_env().run(key, self.request.id, self.lock.fence):
        if times > 1:
            self.delay(key, times - 1)
        return os.getpid()


def _policy(policy: str, **options: Any) -> Any:
    @shared_task(
        bind=True,
        base=SingletonTask,
        name=f"tests.worker.tasks.{policy}_job",
        lock_on=["key"],
        lock_on_conflict=policy,
        **options,
    )
    def task(self: Any, key: str, seconds: float = 0.0) -> str:
        Recorder.from_env().work(key, seconds, self.request.id, self.lock.fence)
        return "ran"

    return task


retry_job = _policy("retry")
wait_job = _policy("wait", lock_wait=20)
raise_job = _policy("raise")
ignore_job = _policy("ignore")


@shared_task(bind=True, base=SingletonTask, lock_on=["key"], lock_min_hold=2, lock_skip_result=SKIPPED)
def window(self: Any, key: str) -> str:
    """A short body that keeps others out for two seconds."""
    with Recorder.from_env().run(key, self.request.id, self.lock.fence):
        return "ran"


@shared_task(bind=True, base=SingletonTask, lock_on=["key"], lock_ttl=1, lock_max_hold=0.5, lock_skip_result=SKIPPED)
def hung(self: Any, key: str, seconds: float) -> str:
    """A body that hangs: its lease is not renewed after half a second."""
    Recorder.from_env().work(key, seconds, self.request.id, self.lock.fence)
    return "ran"


def _outage(policy: str) -> Any:
    @shared_task(
        bind=True,
        base=SingletonTask,
        name=f"tests.worker.tasks.outage_{policy}",
        lock_on=["key"],
        lock_on_outage=policy,
        lock_skip_result=SKIPPED,
    )
    def task(self: Any, key: str, seconds: float = 0.0) -> str:
        Recorder.from_env().work(key, seconds, self.request.id)
        return "ran"

    return task


outage_retry = _outage("retry")
outage_run = _outage("run")
outage_raise = _outage("raise")


@shared_task(bind=True, base=SingletonTask, lock_on=["key"], lock_ttl=20, lock_skip_result=SKIPPED)
def victim(self: Any, key: str, how: str = "", seconds: float = 30.0) -> str:
    """A body that kills its own process, or waits for somebody to do it."""
    recorder = Recorder.from_env()
    if how == "deaf":  # neither a soft limit nor SIGTERM reaches it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
    with recorder.run(key, self.request.id, self.lock.fence):
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
    if how:
        recorder.work(key, seconds, self.request.id, self.lock.fence)
    return "ran"


@shared_task(bind=True, base=SingletonTask, lock_on=["key"], lock_ttl=1, lock_skip_result=SKIPPED)
def deaf(self: Any, key: str) -> str:
    """A body that holds the GIL for several leases (backtracking of a regular expression)."""
    with Recorder.from_env().run(key, self.request.id, self.lock.fence):
        start = time.monotonic()
        while time.monotonic() - start < 4:
            re.match(r"(a+)+$", "a" * 24 + "b")
        self.lock.ensure_held()
        return "ran"
