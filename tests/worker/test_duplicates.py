"""The main job: equal calls on two real workers."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.fixtures import WorkerFactory
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.waiting import TIMEOUT
from tests.worker.tasks import SKIPPED, job, window


def two_workers(workers: WorkerFactory, pool: str, concurrency: int = 4) -> None:
    for _ in range(2):
        workers(pool, concurrency, wait=False)
    workers.wait()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_of_200_equal_calls_one_runs_at_a_time_and_the_others_are_skipped(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str
) -> None:
    two_workers(workers, pool)
    holder = job.delay("k", 1.0)
    recorder.wait_for_runs("k", 1)
    others = [job.delay("k", n=n) for n in range(199)]
    outcomes = [result.get(timeout=TIMEOUT) for result in others]
    assert recorder.max_overlap("k") == 1
    assert holder.get(timeout=TIMEOUT) == "ran"
    # a slow machine may take longer than the body's second over 199 messages: those that came later ran
    assert outcomes.count(SKIPPED) == 200 - len(recorder.runs("k"))
    assert SKIPPED in outcomes
    assert {result.state for result in others} == {"SUCCESS"}
    assert job.delay("k").get(timeout=TIMEOUT) == "ran"


def test_solo_workers_share_the_lock(lock_app: Celery, workers: WorkerFactory, recorder: Recorder) -> None:
    two_workers(workers, "solo")
    results = [job.delay("k", 0.5) for _ in range(6)]
    assert sorted({result.get(timeout=TIMEOUT) for result in results}) == ["ran", SKIPPED]
    assert recorder.max_overlap("k") == 1


def test_different_calls_run_side_by_side(lock_app: Celery, workers: WorkerFactory, recorder: Recorder) -> None:
    two_workers(workers, "threads", 8)  # either may take all of them
    results = [job.delay(f"k{n}", 1.0) for n in range(8)]
    assert {result.get(timeout=TIMEOUT) for result in results} == {"ran"}
    runs = [recorder.runs(f"k{n}")[0] for n in range(8)]
    assert max(run.entered for run in runs) < min(run.seen for run in runs)


def test_fences_rise_from_run_to_run(lock_app: Celery, workers: WorkerFactory, recorder: Recorder) -> None:
    two_workers(workers, "threads")
    for _ in range(20):
        job.delay("k").get(timeout=TIMEOUT)
    fences = [run.fence for run in recorder.runs("k")]
    assert len(fences) == 20
    assert fences == sorted(set(fences))


def test_min_hold_refuses_a_staggered_duplicate_of_a_short_run(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    two_workers(workers, "prefork", 2)
    assert window.delay("k").get(timeout=TIMEOUT) == "ran"
    assert window.delay("k").get(timeout=TIMEOUT) == SKIPPED
    end = recorder.runs("k")[0].entered + 2.0
    while (now := float(recorder.redis.time()[0])) < end + 1:
        assert window.delay("other").id  # time passes
        assert now
    assert window.delay("k").get(timeout=TIMEOUT) == "ran"


def test_no_key_is_ever_without_a_ttl_and_none_stays(
    lock_app: Celery, workers: WorkerFactory, server: EmbeddedServer, recorder: Recorder
) -> None:
    two_workers(workers, "prefork", 2)
    results = [job.delay(f"k{n % 5}", 0.3) for n in range(60)]
    seen = 0
    while not all(result.ready() for result in results):
        for key in lock_app.backend.client.scan_iter("redislock:*"):
            assert lock_app.backend.client.pttl(key) != -1, key
            seen += 1
    assert seen
    left = {key.decode() for key in lock_app.backend.client.scan_iter("redislock:*")}
    assert left == {"redislock:{tests.worker.tasks.job}:fence"}
