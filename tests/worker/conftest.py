"""Workers that know the tasks of ``tests/worker``, and a lock server of their own that a test may harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_redislock.testing import EmbeddedServer
from tests.worker import tasks

POOLS_OF_TWO = ("prefork", "threads", "gevent")


@pytest.fixture
def worker_conf(worker_conf: dict[str, Any]) -> dict[str, Any]:
    """All tasks of ``tests.worker.tasks``."""
    return {**worker_conf, "include": [tasks.__name__]}


@pytest.fixture
def lock_server(make_server: Callable[..., EmbeddedServer]) -> EmbeddedServer:
    """A server for the locks alone: harming it leaves broker and results as they are."""
    return make_server()
