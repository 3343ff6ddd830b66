"""However a run ends while its process lives: the next equal call runs at once."""

from __future__ import annotations

import pytest
from celery import Celery

from tests.local_nodes.fixtures import WorkerFactory
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.waiting import TIMEOUT, wait_until
from tests.worker.tasks import SKIPPED, again, ending, job

ENDINGS = {  # how often the body runs
    "success": 1,
    "exception": 1,
    "unserialisable": 1,
    "retry": 3,
    "autoretry": 3,
    "ignore": 1,
    "reject": 1,
    "replace": 1,
}


def wait_until_free(app: Celery, key: str) -> None:
    """The lock is given up a moment after the body has left. Far less than its TTL of 30 s: it does not just end."""
    wait_until(lambda: not app.backend.client.exists(key), f"{key} to go", timeout=10)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_after_each_ending_the_next_call_runs_at_once(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str
) -> None:
    workers(pool, 4)
    for how, runs in ENDINGS.items():
        ending.delay(how, how)
        recorder.wait_for_runs(how, runs, left=True)
        wait_until_free(lock_app, ending.lock_key_for(how, how))
        assert ending.delay(how, "success").get(timeout=TIMEOUT) == "ran", how
        assert recorder.max_overlap(how) == 1, how
        assert len(recorder.runs(how)) == runs + 1, how


def test_after_a_soft_limit_the_next_call_runs_at_once(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    workers("prefork", 2)
    limited = ending.apply_async(("k", "soft limit"), soft_time_limit=1)
    limited.get(timeout=TIMEOUT, propagate=False)
    assert "SoftTimeLimitExceeded" in repr(limited.result)
    wait_until_free(lock_app, ending.lock_key_for("k", "soft limit"))
    assert ending.delay("k", "success").get(timeout=TIMEOUT) == "ran"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_after_system_exit_the_next_call_runs_at_once(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str
) -> None:
    workers(pool, 2)
    ending.delay("k", "SystemExit")
    recorder.wait_for_runs("k", 1, left=True)
    wait_until_free(lock_app, ending.lock_key_for("k", "SystemExit"))
    assert ending.delay("k", "success").get(timeout=TIMEOUT) == "ran"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_warm_shutdown_gives_the_lock_up_at_the_end_of_the_run(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str
) -> None:
    first = workers(pool, 2)
    job.delay("k", 1.0)
    recorder.wait_for_runs("k", 1)
    assert first.stop() == 0
    assert not list(lock_app.backend.client.scan_iter("redislock:*:v1-*"))
    assert [run.outcome for run in recorder.runs("k")] == ["ok"]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_sends_itself_again_is_never_refused(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str
) -> None:
    workers(pool, 4)
    again.delay("k", 30)
    recorder.wait_for_runs("k", 30, left=True)
    assert recorder.max_overlap("k") == 1


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_retries_without_a_pause_are_not_lost_to_their_own_first_run(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str
) -> None:
    workers(pool, 4)
    results = {n: ending.delay(f"k{n}", "retry") for n in range(50)}
    assert {result.get(timeout=TIMEOUT) for result in results.values()} == {"retried"}
    assert all(len(recorder.runs(f"k{n}")) == 3 for n in results)
    assert SKIPPED not in {result.result for result in results.values()}
