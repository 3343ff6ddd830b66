"""Tasks for canvases: sums, so that a result tells which members have run and which were skipped.

``key`` is what they are locked on, and where the recorder notes that they ran.
"""

from __future__ import annotations

import os
from typing import Any

from celery import shared_task
from celery.worker.request import Request
from celery.worker.strategy import default as default_strategy

from celery_redislock import SingletonTask
from celery_redislock.signals import lock_conflict
from tests.local_nodes.recorder import URL, Recorder

SKIPPED = 1000
"""What a skipped member counts for."""

singleton = {"bind": True, "base": SingletonTask, "lock_on": ["key"], "lock_skip_result": SKIPPED, "lock_wait": 60}


@lock_conflict.connect(weak=False)
def note_conflict(sender: str, key: str, policy: str, **_: Any) -> None:
    if URL in os.environ:  # in a worker
        Recorder.from_env().redis.rpush(f"conflicts:{key}", policy)


def conflicts(recorder: Recorder, lock_key: str) -> list[str]:
    """What calls that were denied this lock have done, one after the other."""
    return list(recorder.redis.lrange(f"conflicts:{lock_key}", 0, -1))


def total(numbers: Any) -> int:
    """The sum of all numbers in nested lists."""
    return numbers if isinstance(numbers, int) else sum(map(total, numbers))


@shared_task(**singleton)
def add(self: Any, *numbers: Any, key: str, seconds: float = 0.0) -> int:
    Recorder.from_env().work(key, seconds, self.request.id, self.lock.fence)
    return total(numbers)


@shared_task(**singleton, ignore_result=True)
def add_silently(self: Any, *numbers: Any, key: str) -> int:
    Recorder.from_env().work(key, 0, self.request.id, self.lock.fence)
    return total(numbers)


@shared_task
def gather(*numbers: Any, key: str) -> int:
    """A member that nothing locks: a chord's body, a chain's tail, a link."""
    recorder = Recorder.from_env()
    with recorder.run(key, None) as run:
        recorder.note(key, run, total=total(numbers))
        return total(numbers)


@shared_task
def failed(request: Any, error: BaseException, traceback: Any, *, key: str) -> None:
    """An errback."""
    recorder = Recorder.from_env()
    with recorder.run(key, request.id) as run:
        recorder.note(key, run, type=type(error).__name__, text=str(error))


@shared_task(**singleton)
def replaced(self: Any, key: str, by: str, times: int = 1) -> Any:
    """A task that replaces itself: by another task, by itself (so many times), or by a group."""
    with Recorder.from_env().run(key, self.request.id, self.lock.fence):
        if times == 0:
            return 1
        if by == "another":
            raise self.replace(add.s(1, 2, key=key))
        if by == "itself":
            raise self.replace(self.s(key, by, times - 1))
        raise self.replace(add.s(1, key=f"{key}-1") | (add.s(1, key=f"{key}-2") | gather.s(1, key=f"{key}-3")))


@shared_task(**singleton)
def replaced_by_group(self: Any, key: str) -> Any:
    with Recorder.from_env().run(key, self.request.id, self.lock.fence):
        from celery import group

        raise self.replace(group(add.s(n, key=f"{key}-{n}") for n in range(3)))


@shared_task(**singleton, autoretry_for=(ZeroDivisionError,), default_retry_delay=0, max_retries=3)
def flaky(self: Any, key: str, how: str, argument: int = 0) -> list[int]:
    """A task that fails twice, and goes on with another argument where it may."""
    with Recorder.from_env().run(key, self.request.id, self.lock.fence):
        retries = self.request.retries
        if retries < 2:
            if how == "autoretry":
                raise ZeroDivisionError
            if how == "retry":
                raise self.retry(countdown=0)
            raise self.retry(countdown=0, args=(key, how, argument + 1))
        return [retries, argument]


@shared_task(**singleton)
def again(self: Any, key: str, times: int) -> int:
    """A task that sends itself again as its last statement."""
    with Recorder.from_env().run(key, self.request.id, self.lock.fence):
        if times > 1:
            self.apply_async((key, times - 1))
        return times


class NotedRequest(Request):
    """A Request class of a project's own."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        self.task.app.backend.client.incr(f"accepted:{self.kwargs['key']}")
        super().on_accepted(pid, time_accepted)


def noted_strategy(task: Any, app: Any, consumer: Any, **more: Any) -> Any:
    """A Strategy of a project's own."""
    handle = default_strategy(task, app, consumer, **more)

    def noted(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **rest: Any) -> Any:
        app.backend.client.incr(f"received:{message.headers['task']}")
        return handle(message, body, ack, reject, callbacks, **rest)

    return noted


@shared_task(
    **singleton, Request=f"{__name__}:NotedRequest", Strategy=f"{__name__}:noted_strategy", lock_on_conflict="retry"
)
def customised(self: Any, *numbers: int, key: str) -> int:
    Recorder.from_env().work(key, 0.1, self.request.id, self.lock.fence)
    return total(numbers)
