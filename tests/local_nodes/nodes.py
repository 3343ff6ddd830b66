"""pytest-celery's ``celery_setup`` without Docker: its nodes are the processes of ``fixtures.py``.

    def test_ping(celery_setup: CeleryTestSetup):
        result = ping.s().apply_async(queue=celery_setup.worker.worker_queue)
        assert result.get(timeout=RESULT_TIMEOUT) == "pong"

``worker_pool`` chooses the pool of the worker, ``worker_factory(...)`` adds workers beside it. pytest-celery's own ways
to configure a node work: ``default_worker_app``, ``default_worker_tasks``, ``default_worker_command``,
``default_worker_env``, ``default_worker_container_cls``. Broker and backend are one ``server``: a killed broker is a
killed backend. Its fixtures for other brokers still want Docker.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import celery
import psutil
import pytest
from celery import Celery
from pytest_celery import (
    RESULT_TIMEOUT,
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerContainer,
    RedisContainer,
    RedisTestBackend,
    RedisTestBroker,
)

from celery_redislock.testing import EmbeddedServer
from tests.local_nodes import tasks
from tests.local_nodes.fixtures import WorkerFactory, close_app
from tests.local_nodes.require import require_module
from tests.local_nodes.worker import LocalWorker, worker_command


def signal_number(name: str | int) -> int:
    return signal.Signals[name] if isinstance(name, str) else name


class LocalServerContainer(RedisContainer):
    """The server, as pytest-celery sees a Redis container."""

    def __init__(self, server: EmbeddedServer) -> None:  # not super().__init__: there is no container
        self.server = server

    id = property(lambda self: f"{self.server.port:012d}")
    name = property(lambda self: f"server-{self.server.port}")
    hostname = property(lambda _self: "127.0.0.1")
    port = property(lambda self: self.server.port)
    url = property(lambda self: self.server.url)
    host_url = property(lambda self: self.server.url)
    status = property(lambda self: "running" if self.server.running else "exited")

    def ready(self) -> bool:
        return self.server.command("PING") == b"PONG"

    def logs(self) -> str:
        return self.server.log

    def reload(self) -> None:
        """Nothing is cached."""

    def kill(self, signal: str | int = "SIGKILL") -> None:
        self.server.kill() if signal_number(signal) == 9 else self.server.stop()

    def restart(self, timeout: int = 0) -> None:
        self.server.restart()

    def teardown(self) -> None:
        """``server`` belongs to the session."""


class LocalWorkerContainer(CeleryWorkerContainer):
    """A worker process, as pytest-celery sees a worker's container."""

    def __init__(self, worker: LocalWorker) -> None:  # not super().__init__: there is no container
        self.worker = worker

    id = property(lambda self: self.worker.host)
    name = property(lambda self: self.worker.hostname)
    status = property(lambda self: "running" if self.worker.running else "exited")

    @classmethod
    def version(cls) -> str:
        return str(celery.__version__)

    @classmethod
    def command(cls, *args: str, debugpy: bool = False, wait_for_client: bool = True, **kwargs: Any) -> list[str]:
        stock = worker_command(queues=cls.worker_queue(), log_level=cls.log_level())
        return [*stock, "-n", f"{cls.worker_name()}@%h", *args]

    @classmethod
    def initial_env(cls, celery_worker_cluster_config: dict, initial: dict | None = None) -> dict:
        stock = super().initial_env(celery_worker_cluster_config, initial)
        return {name: value for name, value in stock.items() if name not in {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}}

    @classmethod
    def tasks_modules(cls) -> set:
        return {tasks}

    def ready(self) -> bool:
        self.worker.wait_until_ready()
        return True

    def logs(self) -> str:
        return self.worker.log_since_start()

    def reload(self) -> None:
        """Nothing is cached."""

    def kill(self, signal: str | int = "SIGKILL") -> None:
        number = signal_number(signal)
        if number == 9:
            self.worker.kill()
        else:
            self.worker.send(number)

    def restart(self, timeout: float = RESULT_TIMEOUT) -> None:
        if self.worker.running:
            self.worker.stop(timeout)
        self.worker.start()

    def pause(self) -> None:
        self.worker.pause()

    def unpause(self) -> None:
        self.worker.resume()

    def teardown(self) -> None:
        self.worker.close()


class LocalTestWorker(CeleryTestWorker):
    """Adds ``local``, the LocalWorker, and looks at its log each 20 ms where the stock node does each second.

    Logs are those since the last start.
    """

    @property
    def local(self) -> LocalWorker:
        return self.container.worker

    def wait_for_log(self, log: str, message: str = "", timeout: float = RESULT_TIMEOUT) -> None:
        self.local.wait_for_log(log, timeout)

    def assert_log_exists(self, log: str, message: str = "", timeout: float = RESULT_TIMEOUT) -> None:
        self.local.assert_log_exists(log, timeout)

    def assert_log_does_not_exist(self, log: str, message: str = "", timeout: float = 1) -> None:
        self.local.assert_log_does_not_exist(log, timeout)

    def get_running_processes_info(
        self, columns: list[str] | None = None, filters: dict[str, str] | None = None
    ) -> list[dict]:
        """Of the worker's own processes: the machine has others."""
        columns = columns or ["pid", "name", "username", "cmdline", "cpu_percent", "memory_percent", "create_time"]
        found = []
        for process in self.local.family():
            try:
                found.append(process.as_dict(columns))
            except psutil.NoSuchProcess:
                continue
        return [info for info in found if all(info.get(name) == value for name, value in (filters or {}).items())]


class LocalTestSetup(CeleryTestSetup):
    """Its ``ping`` is ours: the stock one lives in a module whose import would make each worker's start slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ping = tasks.ping


# Classes


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    return LocalTestSetup


@pytest.fixture
def default_worker_cls() -> type[CeleryTestWorker]:
    return LocalTestWorker


@pytest.fixture
def default_worker_container_cls() -> type[CeleryWorkerContainer]:
    return LocalWorkerContainer


@pytest.fixture(scope="session")
def default_worker_container_session_cls() -> type[CeleryWorkerContainer]:
    return LocalWorkerContainer


@pytest.fixture
def default_redis_broker_cls() -> type[RedisContainer]:
    return LocalServerContainer


@pytest.fixture
def default_redis_backend_cls() -> type[RedisContainer]:
    return LocalServerContainer


# Broker and backend. The stock ``celery_broker`` and ``celery_backend`` are parametrized by sets, whose order differs
# from one xdist worker to the next: "Different tests were collected".


@pytest.fixture
def default_redis_broker(default_redis_broker_cls: Any, server: EmbeddedServer) -> RedisContainer:
    return default_redis_broker_cls(server)


@pytest.fixture
def default_redis_backend(default_redis_backend_cls: Any, server: EmbeddedServer) -> RedisContainer:
    return default_redis_backend_cls(server)


@pytest.fixture
def celery_broker(celery_redis_broker: RedisTestBroker) -> CeleryTestBroker:
    return celery_redis_broker


@pytest.fixture
def celery_backend(celery_redis_backend: RedisTestBackend) -> CeleryTestBackend:
    return celery_redis_backend


@pytest.fixture
def celery_broker_cluster(celery_broker: CeleryTestBroker) -> Iterator[CeleryBrokerCluster]:
    cluster = CeleryBrokerCluster(celery_broker)
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_backend_cluster(celery_backend: CeleryTestBackend) -> Iterator[CeleryBackendCluster]:
    cluster = CeleryBackendCluster(celery_backend)
    yield cluster
    cluster.teardown()


# App and worker


@pytest.fixture
def celery_setup_config(worker_conf: dict[str, Any], celery_setup_config: dict) -> dict:
    return {**worker_conf, **celery_setup_config}


@pytest.fixture
def celery_setup_app(celery_setup_config: dict, celery_setup_app: Celery) -> Iterator[Celery]:
    yield celery_setup_app
    close_app(celery_setup_app, None)


@pytest.fixture
def worker_pool() -> str:
    """The pool of ``celery_setup.worker``: parametrize it with POOLS."""
    return "prefork"


@pytest.fixture
def worker_concurrency() -> int:
    return 2


@pytest.fixture
def default_worker_command(
    default_worker_container_cls: type[CeleryWorkerContainer], worker_pool: str, worker_concurrency: int
) -> list[str]:
    if worker_pool in {"gevent", "eventlet"}:
        require_module(worker_pool)
    return default_worker_container_cls.command("-P", worker_pool, "-c", str(worker_concurrency))


def changed_conf(app: Celery) -> Mapping[str, Any]:
    """What a test has set on the app after its creation, as pytest-celery ships it into its containers."""
    app.conf.get("broker_url")  # settings wait until one is read; before that there is one map, with all the defaults
    return {name: value for name, value in app.conf.maps[0].items() if name != "deprecated_settings"}


@pytest.fixture
def default_worker_container(
    default_worker_container_cls: Any,
    default_worker_command: list[str],
    default_worker_env: dict[str, str],
    default_worker_app: Celery,
    default_worker_tasks: set[ModuleType],
    default_worker_signals: set[ModuleType],
    celery_setup_config: dict,
    workers: WorkerFactory,
) -> Iterator[CeleryWorkerContainer]:
    modules = sorted(module.__name__ for module in default_worker_tasks | default_worker_signals)
    worker = workers(
        command=default_worker_command,
        env=default_worker_env,
        conf={**celery_setup_config, **changed_conf(default_worker_app), "include": modules},
        wait=False,
    )
    container = default_worker_container_cls(worker)
    container.ready()
    yield container
    container.teardown()


@pytest.fixture
def celery_worker(celery_setup_worker: CeleryTestWorker) -> CeleryTestWorker:
    return celery_setup_worker
