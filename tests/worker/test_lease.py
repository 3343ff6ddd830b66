"""The lease outlasts its TTL while the run lives, and no run goes on under a lease that it has not got."""

from __future__ import annotations

import time

import pytest
from celery import Celery

from tests.local_nodes.fixtures import WorkerFactory
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.waiting import TIMEOUT, wait_until
from tests.worker.tasks import SKIPPED, hung, short_lease


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
@pytest.mark.parametrize("busy", [False, True], ids=["sleeping", "busy"])
def test_a_body_of_five_leases_is_never_overlapped(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str, busy: bool
) -> None:
    workers(pool, 2, wait=False)
    workers("threads", 2, wait=False)
    workers.wait()
    # the recorder's commands make a busy body yield to a green hub now and then, as any real one does
    first = short_lease.delay("k", 5.0, busy)
    recorder.wait_for_runs("k", 1)
    outcomes = []
    while not first.ready():
        outcomes.append(short_lease.delay("k", 0.1).get(timeout=TIMEOUT))
        time.sleep(0.1)
    assert first.get(timeout=TIMEOUT)["lost"] == ""
    assert recorder.max_overlap("k") == 1
    assert outcomes.count(SKIPPED) >= len(outcomes) - 1  # the last one may have come after the end
    assert len(outcomes) > 5


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_frozen_holder_is_succeeded_told_so_and_harmless(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str
) -> None:
    frozen = workers(pool, 1, queues="a", wait=False)
    workers("threads", 2, queues="b", wait=False)
    workers.wait()
    late = short_lease.apply_async(("k", 2.0), queue="a")
    recorder.wait_for_runs("k", 1)
    frozen.pause()

    def succeeded() -> bool:
        result = short_lease.apply_async(("k", 6.0), queue="b")
        return (
            wait_until(lambda: len(recorder.runs("k")) > 1 or result.ready(), "a run") and len(recorder.runs("k")) > 1
        )

    wait_until(succeeded, "a successor")
    frozen.resume()
    told = late.get(timeout=TIMEOUT)
    first, second = recorder.runs("k")[:2]
    assert told["lost"] == "taken"
    assert told["remaining"] == 0.0
    assert first.fence < second.fence
    # the late holder has released by now; the successor's lock is still there
    assert short_lease.apply_async(("k", 0.1), queue="b").get(timeout=TIMEOUT) == SKIPPED
    frozen.assert_log_exists("has lost redislock:{tests.worker.tasks.short_lease}")
    assert frozen.log.count("has lost redislock:") == 1


def test_a_hung_run_blocks_no_longer_than_max_hold_and_one_lease(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    worker = workers("threads", 4)
    hanging = hung.delay("k", 6.0)
    recorder.wait_for_runs("k", 1)
    wait_until(lambda: hung.delay("k", 0.0).get(timeout=TIMEOUT) == "ran", "the next call to run")
    hanging.get(timeout=TIMEOUT)
    first, second = recorder.runs("k")[:2]
    assert first.last > second.first  # it went on hanging, and was told
    worker.assert_log_exists("(max_hold) before its run ended")
    assert second.entered - first.entered < 4


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_key_that_vanishes_is_noticed_and_not_taken_again(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, pool: str
) -> None:
    worker = workers(pool, 2)
    first = short_lease.delay("k", 3.0)
    recorder.wait_for_runs("k", 1)
    key = short_lease.lock_key_for("k", 3.0)
    lock_app.backend.client.delete(key)
    worker.assert_log_exists("(missing) before its run ended")
    assert first.get(timeout=TIMEOUT)["lost"] == "missing"
    assert not lock_app.backend.client.exists(key)
