"""The lock store, or the broker, is away just when a call is at the gate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.worker.request import Request

from celery_redislock import LockConflict, LockUnavailable, SingletonTask, denied, gate
from celery_redislock.testing import EmbeddedServer
from tests.gate.conftest import AppFactory, Hold, InProcessWorker, WorkerMaker


@pytest.fixture
def lock_server(make_server: type[EmbeddedServer]) -> EmbeddedServer:
    """One that a test may stop; broker and results are elsewhere."""
    return make_server()


@pytest.fixture
def app(make_app: AppFactory, lock_server: EmbeddedServer) -> Celery:
    return make_app(redislock_url=lock_server.url, redislock_timeout=0.6)


@pytest.fixture
def worker(app: Celery, make_worker: WorkerMaker) -> InProcessWorker:
    return make_worker(app)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "IN_PLACE", 0.02)
    monkeypatch.setattr(denied, "REJECT_PAUSE", 0.05)


@pytest.fixture
def ran() -> list[Any]:
    return []


@pytest.fixture
def sync(app: Celery, ran: list[Any]) -> Any:
    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any, account: int) -> str:
        try:
            ran.append(self.lock.fence)
        except LockUnavailable as error:
            ran.append(str(error))
        return "ran"

    return sync


def raised(ended: Any) -> Any:
    """What a call has raised, out of what the tracer made of it."""
    return getattr(ended.exception, "exc", ended.exception)


@pytest.mark.parametrize("state", ["stopped", "frozen"])
def test_run_goes_on_without_a_lock_and_says_so(
    sync: Any, worker: InProcessWorker, lock_server: EmbeddedServer, ran: Any, heard: Any, state: str
) -> None:
    sync.lock_on_outage = "run"
    lock_server.stop() if state == "stopped" else lock_server.pause()
    result = sync.delay(1)
    start = time.monotonic()
    worker.run()
    assert result.get() == "ran"
    assert time.monotonic() - start < 5
    [reason] = ran
    assert 'lock_on_outage="run" has let it run while the store was away' in reason
    [(name, fields)] = heard
    assert (name, fields["operation"], fields["policy"]) == ("lock_unavailable", "acquire", "run")
    assert fields["key"] == sync.lock_key_for(1)


@pytest.mark.parametrize("state", ["stopped", "frozen"])
def test_raise_fails_and_the_body_does_not_run(
    sync: Any, worker: InProcessWorker, lock_server: EmbeddedServer, ran: Any, heard: Any, state: str
) -> None:
    sync.lock_on_outage = "raise"
    lock_server.stop() if state == "stopped" else lock_server.pause()
    result = sync.delay(1)
    worker.run()
    assert result.state == "FAILURE"
    with pytest.raises(
        LockUnavailable, match=f"^{sync.name}: {sync.lock_key_for(1)[:20]}.*the lock store can't be used"
    ):
        result.get()
    assert not ran
    [(name, fields)] = heard
    assert (name, fields["operation"], fields["policy"]) == ("lock_unavailable", "acquire", "raise")


def test_retry_publishes_a_copy_and_runs_when_the_store_is_back(
    sync: Any, worker: InProcessWorker, lock_server: EmbeddedServer, ran: Any, heard: Any
) -> None:
    result = sync.apply_async((1,), headers={"tenant": "acme"})
    lock_server.stop()
    for round_ in range(1, 4):
        before = worker.take()
        assert isinstance(raised(worker.run(before)), Ignore)
        assert result.state == "PENDING"
        copy = worker.take()
        headers = copy.headers
        assert (headers["id"], headers["retries"], headers["tenant"]) == (result.id, 0, "acme")
        assert headers["redislock"]["trail"]["back"] == round_
        assert headers["eta"]
        worker.queue_again(copy)
    assert not ran
    lock_server.start()
    worker.run()
    assert (result.get(), len(ran), worker.waiting()) == ("ran", 1, 0)
    outages = [fields for name, fields in heard if name == "lock_unavailable"]
    assert {(fields["operation"], fields["policy"]) for fields in outages} == {("acquire", "come_back")}


@pytest.mark.parametrize("policy", ["skip", "ignore", "raise", "retry", "wait"])
def test_copy_that_was_sent_in_an_outage_is_not_skipped_afterwards(
    sync: Any, worker: InProcessWorker, lock_server: EmbeddedServer, ran: Any, policy: str
) -> None:
    """Its acquire may have been granted and not answered: it may be denied by what it has itself begun."""
    result = sync.apply_async((1,), lock_on_conflict=policy)
    lock_server.stop()
    worker.run()
    lock_server.start()
    lock_server.command("SET", sync.lock_key_for(1), "1|other|0|00|w|1|1", "PX", "60000")
    worker.run()
    assert (result.state, worker.waiting(), ran) == ("PENDING", 1, [])
    lock_server.flush()
    worker.run()
    assert result.get() == "ran"


def test_server_that_thaws_later_has_no_lock_of_an_attempt_that_was_given_up(
    sync: Any, worker: InProcessWorker, lock_server: EmbeddedServer, ran: Any
) -> None:
    result = sync.delay(1)
    lock_server.pause()
    worker.run()
    lock_server.resume()
    worker.run()
    assert result.get() == "ran"
    assert lock_server.command("EXISTS", sync.lock_key_for(1)) == b"0"


def test_store_that_stops_during_the_run_leaves_the_result_alone(
    app: Celery, worker: InProcessWorker, lock_server: EmbeddedServer, heard: Any
) -> None:
    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any, account: int) -> str:
        lock_server.stop()
        with pytest.raises(LockUnavailable):
            self.lock.ensure_held()
        if account == 2:
            raise ZeroDivisionError
        return "ran"

    results = [sync.delay(1), sync.delay(2)]
    worker.run()
    lock_server.start()
    worker.run()
    assert (results[0].get(), type(results[1].result)) == ("ran", ZeroDivisionError)
    releases = [fields for name, fields in heard if name == "lock_unavailable"]
    assert [(fields["operation"], fields["policy"]) for fields in releases] == [("release", "warn")] * 2


class SoftLimit(logging.Handler):
    """Strikes, twice, where the gate says that it could not release."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.left = 2
        self.then = then

    def emit(self, record: logging.LogRecord) -> None:
        if self.left and "could not release" in record.getMessage():
            self.left -= 1
            if not self.left:
                self.then()
            raise SoftTimeLimitExceeded


def test_soft_limits_that_interrupt_both_releases_leave_it_to_the_end_of_the_task(
    app: Celery, worker: InProcessWorker, lock_server: EmbeddedServer, log: pytest.LogCaptureFixture
) -> None:
    @app.task(base=SingletonTask)
    def sync(account: int) -> None:
        lock_server.pause()

    logger, limit = logging.getLogger("celery_redislock.events"), SoftLimit(lock_server.resume)
    logger.addHandler(limit)
    try:
        result = sync.delay(1)
        worker.run()
    finally:
        logger.removeHandler(limit)
    assert limit.left == 0
    assert type(result.result) is SoftTimeLimitExceeded
    assert "ended without giving up" in log.text
    assert lock_server.command("EXISTS", sync.lock_key_for(1)) == b"0"


# --- no broker either


@pytest.fixture
def broker(make_server: type[EmbeddedServer]) -> EmbeddedServer:
    return make_server()


@pytest.fixture
def brokered(make_app: AppFactory, broker: EmbeddedServer) -> Celery:
    """An app whose broker a test may stop."""
    return make_app(
        broker_url=broker.url,
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0},
        broker_transport_options={"socket_connect_timeout": 1, "socket_timeout": 1},
    )


def ignored_call(app: Celery, make_worker: WorkerMaker, hold: Hold, broker: EmbeddedServer, **options: Any) -> Any:
    """A denied call that must come back, on a broker that is gone; (its result, what the tracer made of it)."""

    @app.task(base=SingletonTask, lock_on_conflict="retry", **options)
    def sync(account: int) -> None: ...

    hold(sync.lock_key_for(1))
    worker = make_worker(app)
    result = sync.delay(1)
    message = worker.take()
    broker.stop()
    request = Request(message, app=app, on_ack=lambda *_: None, on_reject=lambda *_: None, task=sync)
    return result, request.execute()


def test_copy_that_can_not_be_published_leaves_a_late_acked_message_to_the_broker(
    brokered: Celery, make_worker: WorkerMaker, hold: Hold, broker: EmbeddedServer, heard: Any
) -> None:
    result, ended = ignored_call(brokered, make_worker, hold, broker, acks_late=True)
    assert isinstance(raised(ended), Reject)
    assert raised(ended).requeue is True
    assert result.state == "PENDING"
    operations = [(fields.get("operation"), fields["policy"]) for _, fields in heard]
    assert operations == [(None, "retry"), ("publish", "reject")]


def test_copy_of_an_acked_message_that_can_not_be_published_fails_loudly_in_the_end(
    brokered: Celery,
    make_worker: WorkerMaker,
    hold: Hold,
    broker: EmbeddedServer,
    heard: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(denied, "PUBLISH_PATIENCE", 0.5)
    result, _ = ignored_call(brokered, make_worker, hold, broker)
    assert result.state == "FAILURE"
    with pytest.raises(
        LockUnavailable, match=r"its message is acked already, and no copy could be published for 0\.5 s"
    ):
        result.get()
    policies = [fields["policy"] for name, fields in heard if name == "lock_unavailable"]
    assert policies[-1] == "raise"
    assert set(policies[:-1]) == {"retry"}


def test_copy_is_sent_as_its_message_was_where_the_task_itself_would_be_sent_otherwise(
    make_app: AppFactory, make_worker: WorkerMaker, hold: Hold, redis: Any, ran: Any
) -> None:
    """Celery does not tell a task how its message was serialised."""
    app = make_app(accept_content=["json", "application/x-python-serialize"])

    @app.task(base=SingletonTask, lock_on=[], lock_on_conflict="retry")
    def sync(account: Any) -> None:
        ran.append(account)

    worker = make_worker(app)
    hold(sync.lock_key_for(1))
    sync.apply_async((LockConflict,), serializer="pickle")
    worker.run()
    redis.delete(sync.lock_key_for(1))
    message = worker.take()
    assert message.content_type == "application/x-python-serialize"
    worker.run(message)
    assert ran == [LockConflict]


def test_copy_that_no_accepted_serializer_can_send_fails_at_once_and_says_why(
    make_app: AppFactory, make_worker: WorkerMaker, hold: Hold
) -> None:
    app = make_app(accept_content=["pickle"], result_accept_content=["json"])

    @app.task(base=SingletonTask, lock_on=[], lock_on_conflict="retry", acks_late=True)
    def sync(account: Any) -> None: ...

    worker = make_worker(app)
    hold(sync.lock_key_for(1))
    result = sync.apply_async((LockConflict,), serializer="pickle")
    message = worker.take()
    app.conf.accept_content = ["json"]
    worker.run(message)
    with pytest.raises(LockUnavailable, match="no serializer that this worker accepts can send its arguments again"):
        result.get(timeout=0)
