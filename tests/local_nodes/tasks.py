"""Tasks that the workers of the tests run. ``shared_task``: they belong to whichever app is the current one.

A set of tests with needs of its own has its own module, named in ``conf={"include": [...]}``.
"""

from __future__ import annotations

from typing import Any

from celery import shared_task

from tests.local_nodes.recorder import Recorder


@shared_task
def ping() -> str:
    return "pong"


@shared_task(bind=True)
def unlocked(self: Any, key: str, seconds: float) -> str:
    """A plain task that says when it runs. Nothing keeps two of them apart."""
    return Recorder.from_env().work(key, seconds, self.request.id)
