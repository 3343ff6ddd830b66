"""The nodes that other tests stand on: do they start, die, freeze, come back and leave as they say?"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from celery import Celery
from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup

from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.fixtures import WorkerFactory, marked_processes
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.tasks import ping, unlocked
from tests.local_nodes.waiting import wait_until
from tests.local_nodes.worker import POOLS, ROOT, is_gone


@pytest.mark.parametrize("worker_pool", POOLS)
def test_each_pool_runs_a_task(celery_setup: CeleryTestSetup, worker_pool: str) -> None:
    worker = celery_setup.worker
    assert ping.s().apply_async(queue=worker.worker_queue).get(timeout=RESULT_TIMEOUT) == "pong"
    worker.assert_log_exists("succeeded")
    pool_module = {"threads": "thread"}.get(worker_pool, worker_pool)
    stats = celery_setup.app.control.inspect([worker.hostname()], timeout=RESULT_TIMEOUT, limit=1).stats()
    assert f"celery.concurrency.{pool_module}" in stats[worker.hostname()]["pool"]["implementation"]


def test_setup_is_ready_by_each_check_of_pytest_celery(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=True, control=True, docker=True)
    assert len(celery_setup) == 3


def test_settings_of_the_default_app_reach_the_worker(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    conf = celery_setup.app.control.inspect([worker.hostname()], timeout=RESULT_TIMEOUT, limit=1).conf()
    assert conf[worker.hostname()]["worker_prefetch_multiplier"] == 7


@pytest.fixture
def default_worker_app(default_worker_app: Celery) -> Celery:
    default_worker_app.conf.worker_prefetch_multiplier = 7
    return default_worker_app


def test_killed_node_comes_back_under_its_old_name(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    name, children = worker.hostname(), worker.local.child_pids(2)
    worker.kill()
    assert worker.container.status == "exited"
    assert not any(map(psutil.pid_exists, children)) or all(is_gone(psutil.Process(pid)) for pid in children)
    sent = ping.s().apply_async(queue=worker.worker_queue)
    worker.restart()
    assert sent.get(timeout=RESULT_TIMEOUT) == "pong"
    assert worker.hostname() == name
    worker.assert_log_exists(f"{name} ready.")


def test_restarted_broker_keeps_its_url_and_finds_its_worker_again(celery_setup: CeleryTestSetup) -> None:
    url = celery_setup.broker.config()["host_url"]
    celery_setup.broker.kill()
    celery_setup.worker.wait_for_log("Connection to broker lost")
    celery_setup.broker.restart()
    assert celery_setup.broker.config()["host_url"] == url
    assert ping.s().apply_async(queue=celery_setup.worker.worker_queue).get(timeout=RESULT_TIMEOUT) == "pong"


def test_worker_factory_adds_a_worker_beside_the_setup(
    celery_setup: CeleryTestSetup, worker_factory: WorkerFactory
) -> None:
    second = worker_factory("threads", queues="second")
    for queue in (celery_setup.worker.worker_queue, second.worker_queue):
        assert ping.s().apply_async(queue=queue).get(timeout=RESULT_TIMEOUT) == "pong"
    second.assert_log_exists("succeeded")


def test_killed_worker_comes_back_under_its_old_name(lock_app: Celery, workers: WorkerFactory) -> None:
    worker = workers()
    name, first = worker.hostname, worker.pid
    worker.kill()
    assert worker.exit_code == -signal.SIGKILL
    worker.start()
    assert (worker.hostname, worker.pid != first) == (name, True)
    assert ping.delay().get(timeout=RESULT_TIMEOUT) == "pong"
    assert lock_app.control.ping([name], timeout=RESULT_TIMEOUT, limit=1) == [{name: {"ok": "pong"}}]


def test_stopped_worker_finishes_its_task_first(lock_app: Celery, workers: WorkerFactory, recorder: Recorder) -> None:
    worker = workers()
    unlocked.delay("k", 1)
    recorder.wait_for_runs("k", 1)
    assert worker.stop() == 0
    assert [run.outcome for run in recorder.runs("k")] == ["ok"]


def test_log_of_the_run_before_satisfies_no_wait(lock_app: Celery, workers: WorkerFactory) -> None:
    worker = workers()
    ping.delay().get(timeout=RESULT_TIMEOUT)
    worker.assert_log_exists("succeeded")
    worker.restart(kill=True)
    worker.assert_log_does_not_exist("succeeded")
    ping.delay().get(timeout=RESULT_TIMEOUT)
    worker.assert_log_exists("succeeded")
    assert worker.log.count(" ready.") == 2


def test_waiting_for_what_a_dead_worker_never_said_fails_at_once(workers: WorkerFactory) -> None:
    worker = workers("solo")
    worker.kill()
    with pytest.raises(AssertionError, match="it ended with code -9"):
        worker.wait_for_log("never said", timeout=3600)


def test_worker_that_cannot_start_shows_its_log(workers: WorkerFactory) -> None:
    with pytest.raises(AssertionError, match="No such option"):
        workers(extra_args=["--no-such-option"])


def test_paused_worker_stands_still_and_goes_on(lock_app: Celery, workers: WorkerFactory, recorder: Recorder) -> None:
    worker = workers()
    result = unlocked.delay("k", 1)
    [run] = recorder.wait_for_runs("k", 1)
    worker.pause()
    family = worker.family()
    assert {process.status() for process in family} == {psutil.STATUS_STOPPED}
    assert run.pid in {process.pid for process in family}
    [frozen] = recorder.runs("k")
    worker.resume()
    result.get(timeout=RESULT_TIMEOUT)
    assert recorder.runs("k")[0].last > frozen.last


def test_recorder_sees_two_bodies_at_once_on_two_workers(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    first = workers("prefork", 1, queues="a", wait=False)
    second = workers("threads", 1, queues="b", wait=False)
    workers.wait()
    results = [unlocked.s("k", 1.0).apply_async(queue=worker.worker_queue) for worker in (first, second)]
    for result in results:
        result.get(timeout=RESULT_TIMEOUT)
    assert recorder.max_overlap("k") == 2
    assert {run.worker for run in recorder.runs("k")} == {first.hostname, second.hostname}


def test_recorder_counts_a_killed_body_up_to_its_death(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    worker = workers()
    unlocked.delay("k", 3600)
    wait_until(lambda: recorder.runs("k") and recorder.runs("k")[0].last > 2, "a few beats")
    worker.restart(kill=True)
    unlocked.delay("k", 0.1).get(timeout=RESULT_TIMEOUT)
    assert [run.outcome for run in recorder.runs("k")] == [None, "ok"]
    assert recorder.max_overlap("k") == 1


def test_recorder_counts_a_frozen_body_that_goes_on(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    frozen, other = workers("prefork", 1, queues="a", wait=False), workers("solo", 1, queues="b", wait=False)
    workers.wait()
    late = unlocked.s("k", 0.5).apply_async(queue="a")
    recorder.wait_for_runs("k", 1)
    frozen.pause()
    unlocked.s("k", 0.1).apply_async(queue="b").get(timeout=RESULT_TIMEOUT)
    assert recorder.max_overlap("k") == 1
    frozen.resume()
    late.get(timeout=RESULT_TIMEOUT)
    assert recorder.max_overlap("k") == 2
    other.stop()


@pytest.mark.parametrize("visibility_timeout", [2])
def test_unacknowledged_task_of_a_killed_worker_soon_comes_to_another(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder
) -> None:
    first = workers("solo", conf={"task_acks_late": True})
    result = unlocked.delay("k", 3.0)
    recorder.wait_for_runs("k", 1)
    first.kill()
    second = workers("solo")
    result.get(timeout=RESULT_TIMEOUT)
    assert [run.worker for run in recorder.runs("k")] == [first.hostname, second.hostname]
    assert recorder.max_overlap("k") == 1


@pytest.mark.rabbitmq
@pytest.mark.parametrize("broker_kind", ["amqp"])
@pytest.mark.parametrize("pool", POOLS)
def test_each_pool_runs_a_task_from_rabbitmq(lock_app: Celery, workers: WorkerFactory, pool: str) -> None:
    worker = workers(pool)
    assert ping.delay().get(timeout=RESULT_TIMEOUT) == "pong"
    worker.assert_log_exists("succeeded")


def test_servers_of_one_test_differ(make_server: type[EmbeddedServer], server: EmbeddedServer) -> None:
    others = [make_server() for _ in range(3)]
    assert len({other.port for other in [server, *others]}) == 4
    others[0].command("SET", "key", "value")
    assert others[1].command("DBSIZE") == b"0"


def test_no_process_of_a_worker_remains_when_it_is_closed(workers: WorkerFactory, no_process_is_left_over: str) -> None:
    others = {process.pid for process in marked_processes(no_process_is_left_over)}
    worker = workers("prefork", 2)
    paused = workers("threads", 2)
    family = {worker.pid, *worker.child_pids(2), paused.pid}
    paused.pause()
    assert family <= {process.pid for process in marked_processes(no_process_is_left_over)}
    worker.close()
    paused.close()
    wait_until(
        lambda: {process.pid for process in marked_processes(no_process_is_left_over)} == others,
        lambda: f"the end of {worker} and {paused}",
    )


@pytest.mark.parametrize("state", ["running", "frozen"])
def test_nothing_survives_a_killed_test_process(state: str) -> None:
    script = f"""if True:
        import pathlib, signal, tempfile
        from celery_redislock.testing import EmbeddedServer
        from tests.local_nodes.worker import LocalWorker, worker_command
        server = EmbeddedServer().start()
        log = pathlib.Path(server.directory, "worker.log")
        conf = {{"broker_url": server.url, "result_backend": server.url}}
        worker = LocalWorker(worker_command(), conf=conf, log_path=log).start()
        children = worker.child_pids(2)
        if {state == "frozen"}:
            worker.pause()
            server.pause()
        print(server.pid, worker.pid, *children, server.directory, flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        *pids, directory = owner.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        assert len(processes) == 4
        owner.kill()
    wait_until(lambda: all(map(is_gone, processes)), lambda: f"the end of {processes}")
    wait_until(lambda: not Path(directory).exists(), f"the end of {directory}")
