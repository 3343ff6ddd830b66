"""Settings under which a message tells less, or nobody keeps results: a denied call still does what it has to."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain

from celery_redislock import LockConflict
from celery_redislock.lease import Token
from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.fixtures import WorkerFactory
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.waiting import TIMEOUT, wait_until
from tests.worker import canvas_tasks
from tests.worker.canvas_tasks import SKIPPED, add, failed, flaky, gather


@pytest.fixture
def conf() -> dict[str, Any]:
    return {}


@pytest.fixture
def worker_conf(worker_conf: dict[str, Any], conf: dict[str, Any]) -> dict[str, Any]:
    return {**worker_conf, "include": [canvas_tasks.__name__], **conf}


@pytest.fixture
def denied(server: EmbeddedServer, lock_app: Celery) -> str:
    """Somebody else has the lock of ``add`` on "denied"; returns its key."""
    key = add.lock_key_for(key="denied")
    server.command("SET", key, Token.new("someone-else", 0, "w@elsewhere", 1, 1).encode(), "PX", "60000")
    return str(key)


@pytest.mark.parametrize("conf", [{"task_protocol": 1}], ids=["protocol 1"])
def test_protocol_1_carries_what_a_denied_call_needs(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, server: EmbeddedServer, denied: str
) -> None:
    worker = workers("threads", 4)
    add.delay(1, key="warm-up").get(timeout=TIMEOUT)
    calls = {
        policy: add.apply_async((1,), {"key": "denied"}, lock_on_conflict=policy, link=gather.s(1, key=policy))
        for policy in ("skip", "retry", "wait", "raise", "ignore")
    }
    assert calls["skip"].get(timeout=TIMEOUT) == SKIPPED
    with pytest.raises(LockConflict):
        calls["raise"].get(timeout=TIMEOUT)
    worker.wait_for_log(": retry", count=4)  # the fourth pause is longer than the first three can be
    assert calls["retry"].state == "RETRY"
    ended = add.apply_async((1,), {"key": "denied"}, lock_on_conflict="retry", lock_retry_for=0.5)
    with pytest.raises(LockConflict, match=r"after retrying for 0\.5 s"):
        ended.get(timeout=TIMEOUT)
    server.command("DEL", denied)
    assert [calls[policy].get(timeout=TIMEOUT) for policy in ("retry", "wait")] == [1, 1]
    for policy, total in {"skip": SKIPPED + 1, "retry": 2, "wait": 2}.items():
        [run] = recorder.wait_for_runs(policy, 1, left=True)
        assert run.notes[0]["total"] == str(total)
    assert calls["ignore"].state == "PENDING"
    assert {run.task_id for run in recorder.runs("denied")} == {calls["retry"].id, calls["wait"].id}
    assert flaky.delay("flaky", "retry").get(timeout=TIMEOUT) == [2, 0]


@pytest.mark.parametrize("conf", [{"result_backend": None}], ids=["no backend"])
def test_without_any_result_backend_calls_are_locked_wait_and_go_on(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, server: EmbeddedServer, denied: str
) -> None:
    """The lock is on the broker's Redis then."""
    workers("prefork", 4)
    add.delay(1, key="warm-up")
    chain(add.s(1, key="denied"), gather.s(1, key="skip")).delay()
    chain(add.s(1, key="denied").set(lock_on_conflict="retry"), gather.s(1, key="retry")).delay()
    add.s(1, key="denied").set(lock_on_conflict="raise").apply_async(link_error=failed.s(key="raise"))
    recorder.wait_for_runs("raise", 1, left=True)
    recorder.wait_for_runs("skip", 1, left=True)
    assert not recorder.runs("denied")
    server.command("DEL", denied)
    recorder.wait_for_runs("retry", 1, left=True)
    assert len(recorder.runs("denied")) == 1
    flaky.delay("flaky", "retry")
    recorder.wait_for_runs("flaky", 3, left=True)
    assert recorder.max_overlap("flaky") == 1
    wait_until(lambda: not list_locks(server), "the locks to go")


@pytest.mark.rabbitmq
@pytest.mark.parametrize("broker_kind", ["amqp"])
def test_rabbitmq_carries_options_and_what_a_waiting_copy_remembers(
    lock_app: Celery, workers: WorkerFactory, recorder: Recorder, server: EmbeddedServer, denied: str
) -> None:
    worker = workers("threads", 4)
    result = {"no": ["run", None, 1.5, True]}
    skipped = add.apply_async((1,), {"key": "denied"}, lock_skip_result=result, lock_on=["key"], lock_ttl=20)
    assert skipped.get(timeout=TIMEOUT) == result
    waiting = add.apply_async((1,), {"key": "denied"}, lock_on_conflict="retry", lock_ttl=20)
    worker.wait_for_log(": retry", count=3)
    server.command("DEL", denied)
    assert waiting.get(timeout=TIMEOUT) == 1
    assert flaky.delay("flaky", "retry").get(timeout=TIMEOUT) == [2, 0]


def list_locks(server: EmbeddedServer) -> list[str]:
    from redis import Redis

    with Redis.from_url(server.url, decode_responses=True) as client:
        return list(client.scan_iter("redislock:*:v1-*"))
