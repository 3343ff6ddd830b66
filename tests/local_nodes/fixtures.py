"""The fixtures of most tests: a server, an app in the test process, and worker processes.

    def test_one_run_on_two_workers(lock_app, workers, recorder):
        first, second = workers("prefork"), workers("threads", wait=False)
        workers.wait()
        ...

One server per pytest process (with ``-n``: per xdist worker), emptied before each test. Everything that a test starts
ends with it, and with the pytest process at the latest: the guard of ``celery_redislock._guard`` sees to that.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import kombu
import kombu.pools
import psutil
import pytest
from celery import Celery, _state

from celery_redislock.testing import EmbeddedServer, find_server_binary
from tests.local_nodes.app import make_app
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.require import missing, require_env, require_module
from tests.local_nodes.worker import LocalWorker, end_all, is_gone, worker_command

MARK = "REDISLOCK_TEST_SESSION"  # inherited by all that the tests start, and by nothing else
FAILED = pytest.StashKey[bool]()


def marked_processes(mark: str) -> list[psutil.Process]:
    """All processes of this machine with this mark, without our own and the dead."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark and not is_gone(process):
                found.append(process)
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_over() -> Iterator[str]:
    """At the end of the session, whatever a test has started must be gone; if not: an error, and it is ended."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    yield mark
    if left := marked_processes(mark):
        names = [process.cmdline() for process in left if not is_gone(process)]
        end_all(left, grace=1.0)
        if names:
            pytest.fail(f"left over: {names}", pytrace=False)


def started_server(binary: str | None = None, args: Sequence[str] = ()) -> EmbeddedServer:
    try:
        server = EmbeddedServer(binary, args=args)
    except FileNotFoundError as error:
        missing(str(error))
    return server.start()


@pytest.fixture(scope="session")
def session_server(no_process_is_left_over: str) -> Iterator[EmbeddedServer]:
    server = started_server()
    yield server
    server.close()


@pytest.fixture
def server(session_server: EmbeddedServer) -> EmbeddedServer:
    """A Valkey server, empty: broker, result backend and lock store. It may be stopped, killed and frozen.

    One whose configuration a test changes comes from ``make_server``.
    """
    if session_server.running:
        session_server.resume()
    else:
        session_server.start()
    session_server.flush()
    return session_server


@pytest.fixture
def make_server(no_process_is_left_over: str) -> Iterator[Callable[..., EmbeddedServer]]:
    """``make_server(binary=None, args=())``: more servers, for this test alone."""
    servers: list[EmbeddedServer] = []

    def make(binary: str | None = None, args: Sequence[str] = ()) -> EmbeddedServer:
        servers.append(started_server(binary, args))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def server_binary() -> Path:
    """The server that EmbeddedServer starts."""
    try:
        return find_server_binary()
    except FileNotFoundError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def amqp_url() -> str:
    """A RabbitMQ that is there already, shared by all pytest processes: see ``broker_kind``."""
    require_module("amqp")
    return require_env("REDISLOCK_TEST_AMQP_URL", "a RabbitMQ, as .ci/with-rabbitmq starts one")


@pytest.fixture(scope="session")
def recorder_server(no_process_is_left_over: str) -> Iterator[EmbeddedServer]:
    """A server of its own: the log of what ran goes on while the test stops or freezes ``server``."""
    server = started_server()
    yield server
    server.close()


@pytest.fixture
def recorder(recorder_server: EmbeddedServer) -> Iterator[Recorder]:
    """What the task bodies of this test have written: ``runs(key)``, ``max_overlap(key)``."""
    recorder_server.flush()
    recorder = Recorder(recorder_server.url)
    yield recorder
    recorder.close()


@pytest.fixture
def visibility_timeout() -> float:
    """Seconds after which the Redis broker sends an unacknowledged message again. Parametrize it for a short one."""
    return 3600


@pytest.fixture
def broker_kind() -> str:
    """Parametrize it with "amqp" for RabbitMQ (``amqp_url``); "redis" is ``server``."""
    return "redis"


@pytest.fixture
def broker_conf(
    broker_kind: str, visibility_timeout: float, server: EmbeddedServer, request: pytest.FixtureRequest
) -> Iterator[dict[str, Any]]:
    """The settings that name the broker. On RabbitMQ queue and exchanges are this test's own, deleted after it."""
    if broker_kind == "redis":
        soon = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}  # app.py has the like for older kombu
        options = {"visibility_timeout": visibility_timeout, **soon}
        yield {"broker_url": server.url, "broker_transport_options": options}
        return
    url, mine = request.getfixturevalue("amqp_url"), f"redislock-{uuid.uuid4().hex}"
    yield {
        "broker_url": url,
        "task_default_queue": mine,
        "control_exchange": f"{mine}-control",
        "event_exchange": f"{mine}-events",
    }
    with kombu.Connection(url) as connection, connection.channel() as channel:
        channel.queue_delete(mine)
        for name in (mine, f"{mine}-control.pidbox", f"reply.{mine}-control.pidbox", f"{mine}-events"):
            channel.exchange_delete(name)


@pytest.fixture
def worker_conf(broker_conf: dict[str, Any], server: EmbeddedServer) -> dict[str, Any]:
    """The Celery settings of ``lock_app`` and of all workers: a test module adds to them by overriding this fixture."""
    return {
        **broker_conf,
        "result_backend": server.url,
        "broker_connection_retry_on_startup": True,
        "worker_proc_alive_timeout": 60.0,  # a pool process that boots slowly is not a failure of the test
    }


def close_app(app: Celery, previous: Celery | None) -> None:
    """Close its connections, which kombu would hand to the next app on the same URL, and make another app current."""
    with suppress(Exception):
        app.backend.client.connection_pool.disconnect()
    app.close()
    kombu.pools.reset()
    _state._set_current_app(previous)


@pytest.fixture
def lock_app(worker_conf: dict[str, Any]) -> Iterator[Celery]:
    """The app in the test process, the current one: ``tasks.ping.delay()`` goes to the workers of this test."""
    previous = _state._tls.current_app
    app = make_app(worker_conf)
    for module in app.conf.include:
        app.loader.import_task_module(module)
    app.finalize()
    yield app
    close_app(app, previous)


class WorkerFactory:
    """Starts workers on the brokers of this test; ``workers.started`` are all so far."""

    def __init__(self, conf: Mapping[str, Any], recorder_url: str, log_directory: Path) -> None:
        self.conf = conf
        self.recorder_url = recorder_url
        self.log_directory = log_directory
        self.started: list[LocalWorker] = []

    def __call__(
        self,
        pool: str = "prefork",
        concurrency: int = 2,
        name: str | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        conf: Mapping[str, Any] | None = None,
        app: str = "tests.local_nodes.app",
        queues: str | None = None,
        log_level: str = "INFO",
        command: Sequence[str] | None = None,
        wait: bool = True,
    ) -> LocalWorker:
        """A new worker, ready unless ``wait=False``; ``command`` replaces what the other options would make."""
        if pool in {"gevent", "eventlet"}:
            require_module(pool)
        number = len(self.started) + 1
        worker = LocalWorker(
            command
            or worker_command(
                app=app,
                pool=pool,
                concurrency=concurrency,
                queues=queues,
                log_level=log_level,
                extra_args=extra_args,
            ),
            conf={**self.conf, **(conf or {})},
            log_path=self.log_directory / f"worker-{number}.log",
            name=name or f"w{number}",
            recorder_url=self.recorder_url,
            env=env,
        )
        self.started.append(worker)
        return worker.start(wait=wait)

    def wait(self) -> None:
        """Wait until all are ready: of those started with ``wait=False``, which boot at the same time."""
        for worker in self.started:
            worker.wait_until_ready()

    def close(self) -> None:
        with ThreadPoolExecutor(max_workers=max(1, len(self.started))) as pool:
            list(pool.map(LocalWorker.close, self.started))


@pytest.fixture
def workers(
    worker_conf: dict[str, Any],
    recorder: Recorder,
    recorder_server: EmbeddedServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[WorkerFactory]:
    """``workers(pool="prefork", concurrency=2, name=None, ...)``: a LocalWorker, ended with the test."""
    factory = WorkerFactory(worker_conf, recorder_server.url, tmp_path)
    yield factory
    factory.close()
    if request.node.stash.get(FAILED, False):
        for worker in factory.started:
            print(worker.tail(200))


@pytest.fixture
def worker_factory(workers: WorkerFactory) -> WorkerFactory:
    """The same as ``workers``; reads better beside ``celery_setup``."""
    return workers
