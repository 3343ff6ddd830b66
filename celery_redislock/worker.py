"""What the library hooks into a worker: it checks the settings at start-up, and looks after what the gate cannot."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from celery import bootsteps, signals
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.states import SUCCESS

from celery_redislock.denied import HEADER
from celery_redislock.errors import LockConfigError
from celery_redislock.run import MARK
from celery_redislock.runtime import Runtime

__all__ = ["install"]

logger = logging.getLogger(__name__)

_installed: weakref.WeakSet[Any] = weakref.WeakSet()
_shown: set[str] = set()


class RedisLockStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Reads the settings when a worker starts: a wrong one stops it then, not when the first task comes.

    In a prefork worker it also opens the channel by which the main process keeps the leases of the pool alive. There is
    no `stop`: a warm shutdown drains the pool after it, and the last task needs its lease.
    """

    label = "RedisLock"
    requires = ("celery.worker.components:Pool",)

    def create(self, worker: Any) -> None:
        """Make the app's runtime.

        Raises:
            LockConfigError: A setting is wrong.
        """
        try:
            runtime = Runtime.of(worker.app)
        except LockConfigError as error:
            if worker.app.conf.get("redislock_enabled", True) is not False:
                raise
            logger.warning("%s; as redislock_enabled is False, only tasks with lock_enabled = True will fail", error)
            return
        if worker.app.conf.task_protocol == 1:
            logger.warning(
                "task_protocol = 1 does not tell a task who has sent it: a task that sends itself again may be "
                "skipped, for the lock of the run that sent it. Use the default, 2."
            )
        logger.debug("locks live under %s", runtime.settings.prefix)
        if issubclass(worker.pool_cls, PreforkPool):
            runtime.open_gateway()

    def start(self, worker: Any) -> None:
        """Listen to the pool's processes."""
        if (runtime := Runtime.peek(worker.app)) is not None:
            runtime.attend_gateway()
            runtime.check_store()


def install(app: Any) -> None:
    """Hook into an app, once; called for each task that is bound.

    Args:
        app: A Celery app.
    """
    if app in _installed:
        return
    _installed.add(app)
    app.steps["worker"].add(RedisLockStep)
    signals.task_postrun.connect(_look_after, weak=False, dispatch_uid="celery_redislock.look_after")


def _carry_options(
    sender: str | None = None,
    headers: dict[str, Any] | None = None,
    properties: dict[str, Any] | None = None,
    **_: Any,
) -> None:
    """Put the lock options of a call that was sent by name (``app.send_task``, an entry of beat) where they are read.

    The worker validates them: what is raised in here would be swallowed.
    """
    stray = [name for name in properties or () if name.startswith("lock_")]
    if properties is None or headers is None or not stray:
        return
    options = {name.removeprefix("lock_"): properties.pop(name) for name in stray}
    ours = headers.get(HEADER) or {}
    headers[HEADER] = {**ours, "options": {**options, **(ours.get("options") or {})}}
    logger.debug("%s was sent by name with %s", sender, ", ".join(stray))


def _look_after(task_id: str, task: Any, state: str | None = None, **_: Any) -> None:
    """Give up what a finished call still holds: a soft limit may have landed between the gate's own two attempts."""
    request = task.request.__dict__
    run = request.get(MARK)
    if run is not None and run.pending:
        logger.warning("%s[%s] ended without giving up %s; doing it now", task.name, task_id, run.key)
        run.leave(finished=False)
    if MARK not in request and state == SUCCESS and hasattr(task, "lock_key_for") and task.name not in _shown:
        _shown.add(task.name)
        logger.error(
            "%s[%s] ran without meeting its lock, and so will each of its runs: a __call__ before SingletonMixin's "
            "does not call super().__call__",
            task.name,
            task_id,
        )


# At import: whoever sends by name may have bound no task of ours.
signals.before_task_publish.connect(_carry_options, weak=False, dispatch_uid="celery_redislock.carry_options")
