"""Fixtures for all tests. They live in tests/local_nodes; imported here, they are this file's and win over plugins."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator

import pytest

from tests.local_nodes.fixtures import (  # noqa: F401
    FAILED,
    amqp_url,
    broker_conf,
    broker_kind,
    lock_app,
    make_server,
    no_process_is_left_over,
    recorder,
    recorder_server,
    server,
    server_binary,
    session_server,
    visibility_timeout,
    worker_conf,
    worker_factory,
    workers,
)

if importlib.util.find_spec("pytest_celery"):
    from tests.local_nodes.nodes import (  # noqa: F401
        celery_backend,
        celery_backend_cluster,
        celery_broker,
        celery_broker_cluster,
        celery_setup_app,
        celery_setup_cls,
        celery_setup_config,
        celery_worker,
        default_redis_backend,
        default_redis_backend_cls,
        default_redis_broker,
        default_redis_broker_cls,
        default_worker_cls,
        default_worker_command,
        default_worker_container,
        default_worker_container_cls,
        default_worker_container_session_cls,
        worker_concurrency,
        worker_pool,
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the fixtures whether the test failed: they then show the logs of its workers."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report
