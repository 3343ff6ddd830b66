"""Calls that are sent by name, from a process that need not know the task."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_redislock import SingletonTask
from tests.gate.conftest import InProcessWorker


def test_lock_options_of_a_call_sent_by_name_arrive(app: Celery, worker: InProcessWorker, redis: Any) -> None:
    seen = []

    @app.task(base=SingletonTask, bind=True, name="proj.sync")
    def sync(self: Any, account: int) -> None:
        seen.append((self.lock.key, redis.pttl(self.lock.key) / 1000))

    app.send_task("proj.sync", (1,), lock_ttl=300, lock_key="account:{account}")
    worker.run()
    [(key, ttl)] = seen
    assert key == "redislock:{proj.sync}:account:1"
    assert 290 < ttl <= 300
