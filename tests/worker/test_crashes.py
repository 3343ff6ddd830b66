"""A process that dies frees its locks at once, and not before; a process that is busy keeps them."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from celery import Celery

from tests.local_nodes.fixtures import WorkerFactory
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.waiting import TIMEOUT, wait_until
from tests.local_nodes.worker import is_gone
from tests.worker.tasks import SKIPPED, deaf, job, short_lease, victim


def wait_until_free(app: Celery, key: str, limit: float) -> float:
    """Wait for far less than the TTL of 20 s; return how long it took."""
    start = time.monotonic()
    wait_until(lambda: not app.backend.client.exists(key), f"{key} to go", timeout=limit, interval=0.005)
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["kill", "exit", "segfault"])
def test_a_child_that_dies_frees_its_lock_at_once(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, how: str
) -> None:
    worker = workers("prefork", 2)
    for n in range(5):
        victim.delay("k", how)
        [run] = recorder.wait_for_runs("k", n + 1)[n:]
        wait_until(lambda run=run: not psutil.pid_exists(run.pid) or is_gone(psutil.Process(run.pid)), "the death")
        wait_until_free(lock_app, victim.lock_key_for("k"), limit=5)
    worker.wait_for_log("which ran it, has died", count=5)
    assert victim.delay("k").get(timeout=TIMEOUT) == "ran"


def test_a_child_killed_from_outside_is_succeeded_at_once(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    workers("prefork", 4)
    for n in range(10):
        victim.delay("k", "wait")
        [*_, run] = recorder.wait_for_runs("k", 2 * n + 1)
        wait_until(lambda n=n: len(recorder.runs("k")) >= 2 * n + 1, "the body")
        wait_until(lambda n=n: len(recorder.runs("k")) == 2 * n + 2, "the second half")
        assert victim.delay("k").get(timeout=TIMEOUT) == SKIPPED
        os.kill(run.pid, signal.SIGKILL)
        wait_until_free(lock_app, victim.lock_key_for("k"), limit=5)


def test_nothing_is_given_up_before_a_child_that_resists_its_time_limit_is_dead(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    workers("prefork", 3)
    victim.apply_async(("k", "deaf"), time_limit=2)
    recorder.wait_for_runs("k", 2)
    wait_until(
        lambda: victim.delay("k", "wait", 0.1).get(timeout=TIMEOUT) == "ran", "a successor", timeout=15, interval=0.01
    )
    assert recorder.max_overlap("k") == 1


def test_a_body_that_holds_the_gil_keeps_its_lock(lock_app: Celery, workers: WorkerFactory, recorder: Recorder) -> None:
    worker = workers("prefork", 2)
    result = deaf.delay("k")
    recorder.wait_for_runs("k", 1)
    while not result.ready():
        assert deaf.delay("k").id
        time.sleep(0.2)
    assert result.get(timeout=TIMEOUT) == "ran"
    assert recorder.max_overlap("k") == 1
    assert "has lost" not in worker.log


def test_children_come_and_go_and_their_leases_are_kept(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    worker = workers("prefork", 2, extra_args=["--max-tasks-per-child", "1"])
    results = [short_lease.delay(f"k{n}", 2.0) for n in range(6)]
    assert {result.get(timeout=TIMEOUT)["lost"] for result in results} == {""}
    assert "has lost" not in worker.log
    assert "has died" not in worker.log


def test_a_child_outlives_its_main_process_only_with_a_lost_lease(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    worker = workers("prefork", 1)
    short_lease.delay("k", 20.0)
    [run] = recorder.wait_for_runs("k", 1)
    worker.kill()
    wait_until(lambda: not psutil.pid_exists(run.pid) or is_gone(psutil.Process(run.pid)), "the child's death")
    workers("prefork", 2)
    wait_until(lambda: short_lease.delay("k", 0.1).get(timeout=TIMEOUT) != SKIPPED, "the lease's end", timeout=10)
    assert recorder.max_overlap("k") == 1


def test_warm_shutdown_keeps_the_lease_until_the_last_task_has_ended(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    first = workers("prefork", 1, queues="a", wait=False)
    workers("threads", 2, queues="b", wait=False)
    workers.wait()
    short_lease.apply_async(("k", 4.0), queue="a")
    recorder.wait_for_runs("k", 1)
    first.send(signal.SIGTERM)
    while not recorder.runs("k")[0].left:
        assert short_lease.apply_async(("k", 0.1), queue="b").get(timeout=TIMEOUT)
    first.wait()
    assert recorder.max_overlap("k") == 1
    assert "has lost" not in first.log
    assert job.apply_async(("k",), queue="b").get(timeout=TIMEOUT) == "ran"


def test_children_of_a_frozen_main_process_renew_by_themselves(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    first = workers("prefork", 1, queues="a", wait=False)
    workers("threads", 2, queues="b", wait=False)
    workers.wait()
    short_lease.apply_async(("k", 5.0), queue="a")
    recorder.wait_for_runs("k", 1)
    main = psutil.Process(first.pid)
    main.suspend()
    try:
        while not recorder.runs("k")[0].left:
            assert short_lease.apply_async(("k", 0.1), queue="b").get(timeout=TIMEOUT)
    finally:
        main.resume()
    assert recorder.max_overlap("k") == 1
    first.assert_log_exists("renewing in the child from now on")
