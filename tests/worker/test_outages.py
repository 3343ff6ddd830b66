"""The lock server goes away, at each moment: bounded, by the chosen policy, and finished work keeps its result."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from celery import Celery

from celery_redislock import LockUnavailable
from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.fixtures import WorkerFactory
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.waiting import TIMEOUT, wait_until
from tests.worker.tasks import SKIPPED, job, outage_raise, outage_retry, outage_run, short_lease, victim

POOLS = ("prefork", "threads", "gevent")


@pytest.fixture
def worker_conf(worker_conf: dict[str, Any], lock_server: EmbeddedServer) -> dict[str, Any]:
    """Locks on a server of their own, and short patience."""
    return {**worker_conf, "redislock_url": lock_server.url, "redislock_timeout": 1.0}


def end(server: EmbeddedServer, how: str) -> None:
    server.pause() if how == "frozen" else server.stop()


def bring_back(server: EmbeddedServer, how: str) -> None:
    server.resume() if how == "frozen" else server.start()


@pytest.mark.parametrize("how", ["stopped", "frozen"])
@pytest.mark.parametrize("pool", POOLS)
def test_retry_waits_for_the_server_and_then_runs_once(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer, pool: str, how: str
) -> None:
    worker = workers(pool, 2)
    end(lock_server, how)
    result = outage_retry.delay("k")
    worker.assert_log_exists("could not acquire redislock:{tests.worker.tasks.outage_retry}")
    assert recorder.runs("k") == []
    assert result.state == "PENDING"
    bring_back(lock_server, how)
    assert result.get(timeout=TIMEOUT) == "ran"
    assert len(recorder.runs("k")) == 1
    assert outage_retry.delay("k").get(timeout=TIMEOUT) == "ran"


@pytest.mark.parametrize("how", ["stopped", "frozen"])
def test_run_goes_on_without_a_lock_and_says_so(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer, how: str
) -> None:
    worker = workers("prefork", 2)
    end(lock_server, how)
    assert outage_run.delay("k").get(timeout=TIMEOUT) == "ran"
    worker.assert_log_exists(": run;")
    bring_back(lock_server, how)
    assert outage_run.delay("k").get(timeout=TIMEOUT) == "ran"


def test_raise_fails_with_lock_unavailable(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer
) -> None:
    workers("threads", 2)
    lock_server.stop()
    with pytest.raises(LockUnavailable, match="outage_raise"):
        outage_raise.delay("k").get(timeout=TIMEOUT)
    lock_server.start()
    assert outage_raise.delay("k").get(timeout=TIMEOUT) == "ran"
    assert len(recorder.runs("k")) == 1


@pytest.mark.parametrize("how", ["stopped", "frozen"])
@pytest.mark.parametrize("pool", POOLS)
def test_work_that_is_done_keeps_its_result_when_the_release_fails(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer, pool: str, how: str
) -> None:
    worker = workers(pool, 2)
    result = job.delay("k", 1.0)
    recorder.wait_for_runs("k", 1)
    end(lock_server, how)
    assert result.get(timeout=TIMEOUT) == "ran"
    worker.assert_log_exists("could not release redislock:{tests.worker.tasks.job}")
    bring_back(lock_server, how)
    if how == "stopped":  # what was in its memory is gone
        assert job.delay("k").get(timeout=TIMEOUT) == "ran"
    else:  # it executes what was sent to it
        wait_until(lambda: job.delay("k").get(timeout=TIMEOUT) == "ran", "the lock to be free", timeout=10)
    assert recorder.max_overlap("k") == 1


@pytest.mark.parametrize("pool", POOLS)
def test_a_frozen_server_at_renewal_loses_the_lease_or_keeps_it_but_never_overlaps_silently(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer, pool: str
) -> None:
    worker = workers(pool, 2)
    result = short_lease.delay("k", 4.0)
    recorder.wait_for_runs("k", 1)
    lock_server.pause()
    worker.assert_log_exists("(unreachable) before its run ended")
    lock_server.resume()
    told = result.get(timeout=TIMEOUT)
    log = worker.log
    assert told["lost"] or "it was never lost" in log
    assert log.count("has lost redislock:") == 1
    assert recorder.max_overlap("k") == 1


def test_a_short_freeze_is_survived(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer
) -> None:
    worker = workers("prefork", 2)
    result = job.delay("k", 2.0)
    recorder.wait_for_runs("k", 1)
    lock_server.pause()
    assert job.delay("other", 0.0).id
    lock_server.resume()
    assert job.delay("k").get(timeout=TIMEOUT) == SKIPPED
    assert result.get(timeout=TIMEOUT) == "ran"
    assert "has lost" not in worker.log


@pytest.mark.parametrize("pool", POOLS)
def test_a_script_flush_changes_nothing(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer, pool: str
) -> None:
    workers(pool, 2)
    result = short_lease.delay("k", 2.5)
    recorder.wait_for_runs("k", 1)
    while not result.ready():
        lock_server.command("SCRIPT", "FLUSH")
        assert short_lease.delay("k", 0.0).id
    assert result.get(timeout=TIMEOUT)["lost"] == ""
    assert recorder.max_overlap("k") == 1


def test_a_restarted_server_is_met_again_without_a_manual_step(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer
) -> None:
    worker = workers("threads", 4)
    for n in range(5):
        assert job.delay("k").get(timeout=TIMEOUT) == "ran"
        lock_server.restart()
        assert job.delay(f"k{n}").get(timeout=TIMEOUT) == "ran"
    assert "could not" not in worker.log


@pytest.mark.parametrize("pool", POOLS)
def test_a_lease_that_a_restart_has_lost_is_reported_at_the_release(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer, pool: str
) -> None:
    """The body is shorter than a third of the lease: no renewal comes before the release."""
    worker = workers(pool, 2)
    first = job.delay("k", 2.0)
    recorder.wait_for_runs("k", 1)
    lock_server.restart()
    second = job.delay("k", 3.0)
    assert first.get(timeout=TIMEOUT) == "ran"
    assert second.get(timeout=TIMEOUT) == "ran"
    worker.assert_log_exists("(taken) before its run ended")


@pytest.mark.parametrize("pool", POOLS)
def test_a_release_that_failed_is_made_up_for_as_soon_as_the_server_is_back(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, make_server: Any, pool: str
) -> None:
    """The server keeps its data, so the lease of 30 s is still there when it comes back."""
    server = make_server(args=["--appendonly", "yes", "--appendfsync", "always"])
    worker = workers(pool, 2, conf={"redislock_url": server.url})
    result = job.delay("k", 1.0)
    recorder.wait_for_runs("k", 1)
    server.stop()
    assert result.get(timeout=TIMEOUT) == "ran"
    worker.assert_log_exists("could not release")
    server.start()
    key = job.lock_key_for("k")
    wait_until(lambda: server.command("EXISTS", key) == b"0", "the key to go", timeout=10)


def test_a_child_that_dies_during_an_outage_frees_its_lock_when_the_server_is_back(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, lock_server: EmbeddedServer
) -> None:
    worker = workers("prefork", 2)
    victim.delay("k", "wait")
    [run] = recorder.wait_for_runs("k", 2)[1:]
    lock_server.pause()
    os.kill(run.pid, signal.SIGKILL)
    worker.assert_log_exists("which ran it, has died")
    lock_server.resume()
    key = victim.lock_key_for("k")
    wait_until(lambda: lock_server.command("EXISTS", key) == b"0", "the key to go", timeout=8)
