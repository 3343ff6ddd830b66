"""Apps of a test's own, and a worker without a process: it takes a real message and runs it where the test can look.

def test_runs(app, worker):
    task = declare(app)
    result = task.delay("k")
    worker.run_all()
    assert result.get() == "ran"
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import redis as redis_py
from celery import Celery, _state
from celery.worker.request import Request
from kombu import Queue

from celery_redislock import signals
from celery_redislock.lease import Token
from celery_redislock.runtime import Runtime
from celery_redislock.testing import EmbeddedServer

EVENTS = tuple(signals.__all__)
MEMORY = "cache+memory://"


class InProcessWorker:
    """Takes messages from an app's queue and runs them in this thread, as a worker's pool process would.

    Countdowns do not count here: a message that is in the queue is run.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.acknowledged: list[str] = []
        self._connection = app.connection_for_read()
        self._queue = Queue(app.conf.task_default_queue)(self._connection.default_channel)
        self._queue.declare()

    def take(self) -> Any:
        """The next message, or None."""
        return self._queue.get(accept=self.app.conf.accept_content)

    def queue_again(self, message: Any) -> None:
        """Put back what was taken only to look at."""
        message.requeue()

    def waiting(self) -> int:
        return int(self._queue.queue_declare(passive=True).message_count)

    def run(self, message: Any = None, *, redelivered: bool = False) -> Any:
        """Run this message, or the next one; returns what the tracer gave back."""
        message = self.take() if message is None else message
        assert message is not None, "no message"
        message.delivery_info["redelivered"] = redelivered
        task = self.app.tasks[message.headers["task"]]
        request = Request(
            message, app=self.app, task=task, hostname="here", on_ack=self._on_ack, on_reject=self._on_reject
        )
        return request.execute()

    def run_all(self, most: int = 1000) -> int:
        """Run until the queue is empty; returns how many."""
        for count in range(most):
            message = self.take()
            if message is None:
                return count
            self.run(message)
        raise AssertionError(f"still messages after {most}")

    def _on_ack(self, _logger: Any, _errors: Any) -> None:
        self.acknowledged.append("ack")

    def _on_reject(self, _logger: Any, _errors: Any, requeue: bool) -> None:
        self.acknowledged.append("requeue" if requeue else "reject")

    def close(self) -> None:
        self._connection.close()


AppFactory = Callable[..., Celery]


@pytest.fixture
def make_app(server: EmbeddedServer) -> Iterator[AppFactory]:
    """``make_app(task_cls=..., redislock_ttl=5, ...)``: an app that locks on ``server`` and sends messages to itself.

    Finalized apps of other tests must not get a ``shared_task`` of this one: what it declares is forgotten afterwards.
    """
    current, default = _state._tls.current_app, _state.default_app
    finalizers = set(_state._on_app_finalizers)
    apps: list[Celery] = []

    def make(*, task_cls: Any = None, namespace: str | None = None, **conf: Any) -> Celery:
        app = Celery(f"gate{len(apps)}", task_cls=task_cls)
        name = uuid.uuid4().hex
        base = {
            "broker_url": "memory://",
            "result_backend": MEMORY,
            "task_default_queue": name,
            "redislock_url": server.url,
            "redislock_timeout": 2.0,
        }
        conf = {name: value for name, value in {**base, **conf}.items() if value is not None}
        if namespace:
            prefixed = {f"{namespace}_{name}".upper(): value for name, value in conf.items()}
            app.config_from_object(type("settings", (), prefixed), namespace=namespace)
        else:
            app.conf.update(conf)
        apps.append(app)
        return app

    yield make
    for app in apps:
        Runtime.forget(app)
        if app.conf.result_backend != MEMORY:
            app.backend.result_consumer.stop()
            app.backend.result_consumer._pubsub = None  # or a result collected later would look for a dead server
        app.close()
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers.update(finalizers)
    _state._set_current_app(current)
    _state.default_app = default


@pytest.fixture
def app(make_app: AppFactory) -> Celery:
    return make_app()


@pytest.fixture
def eager_app(make_app: AppFactory) -> Celery:
    """One that takes locks in eager mode, too."""
    return make_app(redislock_eager=True)


WorkerMaker = Callable[[Celery], InProcessWorker]


@pytest.fixture
def make_worker() -> Iterator[WorkerMaker]:
    with ExitStack() as stack:

        def make(app: Celery) -> InProcessWorker:
            worker = InProcessWorker(app)
            stack.callback(worker.close)
            return worker

        yield make


@pytest.fixture
def worker(app: Celery, make_worker: WorkerMaker) -> InProcessWorker:
    return make_worker(app)


@pytest.fixture
def redis(server: EmbeddedServer) -> Iterator[Any]:
    """A client for looking at what is on the server."""
    client = redis_py.Redis.from_url(server.url, decode_responses=True)
    yield client
    client.close()


def foreign_token(task_id: str = "someone-else") -> str:
    """What another worker's run would have stored under a key."""
    return Token.new(task_id, 0, "w@elsewhere", 1, 1).encode()


def ttl(redis: Any, key: str) -> int:
    """What is left of a lease, to the nearest ten seconds: a slow machine changes nothing."""
    return round(redis.pttl(key) / 10_000) * 10


Hold = Callable[..., str]


@pytest.fixture
def hold(redis: Any) -> Hold:
    """``hold(key, task_id=..., ttl=...)``: somebody else has the lock; returns the stored value."""

    def hold(key: str, task_id: str = "someone-else", ttl: float = 60.0) -> str:
        token = foreign_token(task_id)
        assert redis.set(key, token, px=int(ttl * 1000), nx=True)
        return token

    return hold


@contextmanager
def listening(*names: str) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What the signals of these names (all, if none is given) send: pairs of name and fields."""
    heard: list[tuple[str, dict[str, Any]]] = []
    with ExitStack() as stack:
        for name in names or EVENTS:
            signal = getattr(signals, name)

            def receive(signal: Any, name: str = name, **fields: Any) -> None:
                heard.append((name, fields))

            signal.connect(receive, weak=False)
            stack.callback(signal.disconnect, receive)
        yield heard


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What all signals have sent during this test."""
    with listening() as heard:
        yield heard


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """All that our loggers say, from DEBUG."""
    caplog.set_level(logging.DEBUG, logger="celery_redislock")
    return caplog
