"""What becomes of a call that does not get its lock: its state, its message, and the holder's peace."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import trace_task

from celery_redislock import LockConflict, SingletonTask, gate
from tests.gate.conftest import Hold, InProcessWorker

STATES = {"skip": "SUCCESS", "ignore": "PENDING", "raise": "FAILURE", "retry": "RETRY", "wait": "FAILURE"}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of its own message does not wait half a second in place before it comes back."""
    monkeypatch.setattr(gate, "IN_PLACE", 0.02)


@pytest.fixture
def ran() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def sync(app: Celery, ran: list[tuple[str, int]]) -> Any:
    @app.task(base=SingletonTask, bind=True, lock_skip_result="skipped", lock_wait=0.05, max_retries=1)
    def sync(self: Any, account: int, **more: Any) -> str:
        ran.append((self.request.id, self.request.retries))
        return "ran"

    return sync


@pytest.mark.parametrize("policy", STATES)
@pytest.mark.parametrize("late", [False, True])
def test_denied_call_has_the_state_of_its_policy_and_is_acked(
    sync: Any, worker: InProcessWorker, hold: Hold, redis: Any, ran: Any, policy: str, late: bool
) -> None:
    sync.acks_late = late
    key = sync.lock_key_for(1)
    token = hold(key)
    result = sync.apply_async((1,), lock_on_conflict=policy)
    worker.run()
    assert result.state == STATES[policy]
    assert not ran
    assert redis.get(key) == token
    # execute() says "reject" of what ended otherwise than well; a worker acks that, too
    assert worker.acknowledged[0] in {"ack", "reject"}
    assert worker.waiting() == (1 if policy == "retry" else 0)
    if STATES[policy] in {"FAILURE", "RETRY"}:
        assert isinstance(result.result, LockConflict)
        assert result.result.key == key
        assert str(result.result).startswith(f"{sync.name}: {key} is held by task someone-else on w@elsewhere pid 1")


def test_retrying_call_keeps_everything_of_its_message(sync: Any, worker: InProcessWorker, hold: Hold) -> None:
    hold(sync.lock_key_for(1, note="n"))
    sent = sync.apply_async(
        (1,),
        {"note": "n"},
        lock_on_conflict="retry",
        headers={"tenant": "acme"},
        expires=3600,
        soft_time_limit=50,
        time_limit=60,
        priority=3,
        link=sync.s(2),
        link_error=sync.s(3),
        shadow="other-name",
        root_id="root",
        parent_id="parent",
        group_id="group",
        group_index=4,
        reply_to="reply",
        ignore_result=True,
        retries=1,
        argsrepr="(<hidden>)",
        stamped_headers=["deploy"],
        deploy="blue",
    )
    message = worker.take()
    headers, body, properties = dict(message.headers), message.decode(), dict(message.properties)
    worker.run(message)
    copy = worker.take()
    before, after = dict(headers), dict(copy.headers)
    assert before.pop("eta") is None
    assert after.pop("eta") is not None
    assert before.pop("redislock") == {"options": {"on_conflict": "retry"}}
    assert after.pop("redislock").pop("options") == {"on_conflict": "retry"}
    assert after == before
    assert copy.decode() == body
    for name in ("correlation_id", "reply_to", "priority"):
        assert copy.properties[name] == properties[name]
    assert (after["id"], after["retries"], after["tenant"]) == (sent.id, 1, "acme")


def test_copy_of_a_call_without_a_parent_has_none(sync: Any, worker: InProcessWorker, hold: Hold) -> None:
    """Celery would put the running task there, the call itself."""
    hold(sync.lock_key_for(1))
    sync.apply_async((1,), lock_on_conflict="retry")
    for _ in range(3):
        message = worker.take()
        assert message.headers["parent_id"] is None
        worker.run(message)


def test_waiting_never_uses_up_max_retries(
    sync: Any, worker: InProcessWorker, hold: Hold, redis: Any, ran: Any
) -> None:
    key = sync.lock_key_for(1)
    hold(key)
    result = sync.apply_async((1,), lock_on_conflict="retry")
    for _ in range(6):  # of one
        worker.run()
        assert result.state == "RETRY"
    redis.delete(key)
    worker.run()
    assert (result.get(), ran) == ("ran", [(result.id, 0)])
    assert worker.waiting() == 0


def test_pauses_grow_and_are_never_longer_than_the_lease(
    sync: Any, worker: InProcessWorker, hold: Hold, heard: Any
) -> None:
    hold(sync.lock_key_for(1), ttl=20)
    sync.apply_async((1,), lock_on_conflict="retry")
    for _ in range(12):
        worker.run()
    countdowns = [fields["countdown"] for _, fields in heard]
    assert countdowns[0] <= 0.25
    assert countdowns[0] < countdowns[3] < countdowns[6]
    assert 5 < countdowns[-1] <= 20


def test_retrying_ends_in_a_conflict_after_retry_for(
    sync: Any, worker: InProcessWorker, hold: Hold, heard: Any, ran: Any
) -> None:
    hold(sync.lock_key_for(1))
    result = sync.apply_async((1,), lock_on_conflict="retry", lock_retry_for=0.3)
    worker.run()
    assert result.state == "RETRY"
    time.sleep(0.3)
    worker.run_all()
    assert result.state == "FAILURE"
    with pytest.raises(LockConflict, match=r"after retrying for 0.3 s \(lock_retry_for\)"):
        result.get()
    assert not ran
    assert [fields["policy"] for _, fields in heard][-1] == "raise"


def test_wait_runs_as_soon_as_the_lock_is_free(sync: Any, worker: InProcessWorker, hold: Hold, ran: Any) -> None:
    hold(sync.lock_key_for(1), ttl=1)
    result = sync.apply_async((1,), lock_on_conflict="wait", lock_wait=20)
    start = time.monotonic()
    worker.run()
    assert (result.get(), ran) == ("ran", [(result.id, 0)])
    assert 0.1 < time.monotonic() - start < 5


# --- a copy of its own message


@pytest.mark.parametrize("policy", STATES)
def test_redelivered_copy_of_the_holder_comes_back_whatever_the_policy(
    sync: Any, worker: InProcessWorker, hold: Hold, redis: Any, ran: Any, policy: str
) -> None:
    result = sync.apply_async((1,), lock_on_conflict=policy)
    key = sync.lock_key_for(1)
    hold(key, task_id=result.id)
    for _ in range(3):
        worker.run(redelivered=True)
        assert worker.waiting() == 1
    assert result.state == "PENDING"
    redis.delete(key)
    worker.run()
    assert (result.get(), ran) == ("ran", [(result.id, 0)])


@pytest.mark.parametrize("policy", STATES)
def test_redelivered_copy_denied_by_another_call_comes_back(
    sync: Any, worker: InProcessWorker, hold: Hold, redis: Any, ran: Any, policy: str
) -> None:
    """Its first delivery may have begun, and nobody would finish the job."""
    result = sync.apply_async((1,), lock_on_conflict=policy)
    hold(sync.lock_key_for(1))
    worker.run(redelivered=True)
    worker.run()  # the copy is not marked as redelivered any more, and still knows
    redis.delete(sync.lock_key_for(1))
    worker.run()
    assert (result.get(), ran) == ("ran", [(result.id, 0)])


def test_copy_of_a_call_that_has_ended_meanwhile_is_dropped(
    sync: Any, worker: InProcessWorker, hold: Hold, redis: Any, ran: Any
) -> None:
    result = sync.delay(1)
    hold(sync.lock_key_for(1), task_id=result.id)
    worker.run(redelivered=True)
    sync.app.backend.store_result(result.id, "of the first", "SUCCESS")
    redis.delete(sync.lock_key_for(1))
    worker.run()
    assert (worker.waiting(), ran, result.get()) == (0, [], "of the first")


def test_call_whose_id_is_used_again_runs_again(sync: Any, worker: InProcessWorker, ran: Any) -> None:
    for _ in range(2):
        sync.apply_async((1,), task_id="nightly")
        worker.run()
    assert ran == [("nightly", 0), ("nightly", 0)]


@pytest.mark.parametrize("policy", STATES)
def test_retry_that_meets_its_own_first_run_comes_back(
    app: Celery, worker: InProcessWorker, ran: Any, policy: str
) -> None:
    """It was published before the first run gave up the lock; here it even arrives before."""

    @app.task(base=SingletonTask, bind=True, lock_on_conflict=policy, max_retries=1)
    def sync(self: Any) -> str:
        ran.append((self.request.id, self.request.retries))
        if self.request.retries == 0:
            try:
                self.retry(countdown=0)
            finally:
                worker.run()
        return "ran"

    result = sync.delay()
    worker.run()
    assert worker.waiting() == 1
    worker.run()
    assert (result.get(), ran) == ("ran", [(result.id, 0), (result.id, 1)])


@pytest.mark.parametrize("policy", STATES)
def test_lock_is_free_while_a_retry_counts_down_and_the_retry_obeys_the_policy(
    app: Celery, worker: InProcessWorker, hold: Hold, redis: Any, ran: Any, policy: str
) -> None:
    @app.task(base=SingletonTask, bind=True, lock_on_conflict=policy, lock_skip_result="skipped", lock_wait=0.05)
    def sync(self: Any) -> str:
        ran.append((self.request.id, self.request.retries))
        if self.request.retries == 0 and len(ran) == 1:
            raise self.retry(countdown=10)
        return "ran"

    first = sync.delay()
    worker.run()
    retry = worker.take()
    second = sync.delay()
    worker.run()
    assert second.get() == "ran"
    hold(sync.lock_key_for())  # a third
    worker.run(retry)
    # what Celery has stored for the first attempt stays where the retry is ignored
    assert first.state == ("RETRY" if policy == "ignore" else STATES[policy])
    assert ran == [(first.id, 0), (second.id, 0)]
    redis.delete(sync.lock_key_for())
    if policy == "retry":
        worker.run()
        assert (first.get(), ran[2:]) == ("ran", [(first.id, 1)])
    assert worker.waiting() == 0


@pytest.mark.parametrize("policy", STATES)
def test_task_that_sends_itself_again_is_not_refused_by_its_parent(
    app: Celery, worker: InProcessWorker, ran: Any, policy: str
) -> None:
    sent = []

    @app.task(base=SingletonTask, bind=True, lock_on=[], lock_on_conflict=policy)
    def sync(self: Any, left: int) -> int:
        ran.append((self.request.id, left))
        if left:
            sent.append(self.delay(left - 1))
            worker.run()
        return left

    sync.delay(2)
    worker.run()
    while worker.waiting():
        worker.run()
    assert [left for _, left in ran] == [2, 1, 0]
    assert [result.get(disable_sync_subtasks=False) for result in sent] == [1, 0]


def test_two_copies_of_one_id_in_one_process_do_not_free_each_others_lock(
    app: Celery, worker: InProcessWorker, ran: Any, redis: Any
) -> None:
    held = []

    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any) -> str:
        ran.append((self.request.id, self.request.retries))
        for redelivered in (True, False):
            self.apply_async(task_id=self.request.id)  # as if it was delivered again
            worker.run(worker.take(), redelivered=redelivered)
            held.append(redis.get(self.lock.key) == self.lock.token)
        self.lock.ensure_held()
        return "ran"

    result = sync.delay()
    worker.run()
    assert held == [True, True]
    assert ran == [(result.id, 0)]


def test_end_of_a_denied_copy_does_not_free_the_lock_of_a_later_copy_in_another_thread(
    app: Celery, worker: InProcessWorker, hold: Hold, redis: Any
) -> None:
    """The later one begins after the first has left the gate, and before Celery says that the first has ended."""
    holds, may_end = threading.Event(), threading.Event()
    copies: list[threading.Thread] = []

    class LetsACopyBegin(SingletonTask):
        abstract = True

        def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            redis.delete(self.lock_key_for())
            request = {"id": task_id, "retries": 0, "delivery_info": {}}
            copies.append(threading.Thread(target=trace_task, args=(self, task_id, [], {}, request)))
            copies[0].start()
            assert holds.wait(20)

    @app.task(base=LetsACopyBegin, bind=True, lock_on_conflict="retry")
    def sync(self: Any) -> None:
        holds.set()
        assert may_end.wait(20)

    hold(sync.lock_key_for())
    sync.delay()
    worker.run()
    assert redis.exists(sync.lock_key_for())
    may_end.set()
    copies[0].join()
    assert not redis.exists(sync.lock_key_for())
