"""A soft time limit that lands in the middle of an acquire or a release leaves no lock behind."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.fixtures import WorkerFactory
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.waiting import TIMEOUT, wait_until
from tests.worker.tasks import job


@pytest.fixture
def worker_conf(worker_conf: dict[str, Any], lock_server: EmbeddedServer) -> dict[str, Any]:
    """Locks on a server of their own, and patience for longer than the soft limit."""
    return {**worker_conf, "redislock_url": lock_server.url, "redislock_timeout": 20.0}


@pytest.mark.parametrize("trial", range(2))
def test_a_soft_limit_inside_the_acquire_leaves_the_lock_free(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer, trial: int
) -> None:
    worker = workers("prefork", 1)
    assert job.delay("warm").get(timeout=TIMEOUT) == "ran"
    lock_server.pause()
    result = job.apply_async(("k",), soft_time_limit=1)
    worker.assert_log_exists("Soft time limit (1s) exceeded")
    lock_server.resume()
    result.get(timeout=TIMEOUT, propagate=False)
    assert "SoftTimeLimitExceeded" in repr(result.result)
    assert recorder.runs("k") == []
    assert job.delay("k").get(timeout=TIMEOUT) == "ran"
    assert lock_server.command("EXISTS", job.lock_key_for("k")) == b"0"


@pytest.mark.parametrize("trial", range(2))
def test_a_soft_limit_inside_the_release_leaves_the_lock_free(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer, trial: int
) -> None:
    worker = workers("prefork", 1)
    result = job.apply_async(("k", 1.0), soft_time_limit=2)
    recorder.wait_for_runs("k", 1)
    lock_server.pause()
    recorder.wait_for_runs("k", 1, left=True)
    worker.assert_log_exists("Soft time limit (2s) exceeded")
    lock_server.resume()
    result.get(timeout=TIMEOUT, propagate=False)
    wait_until(lambda: lock_server.command("EXISTS", job.lock_key_for("k")) == b"0", "the key to go", timeout=10)
    assert job.delay("k").get(timeout=TIMEOUT) == "ran"
