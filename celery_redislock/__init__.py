"""At most one run per call signature, on any number of Celery workers.

Example:
    >>> from celery import Celery
    >>> from celery_redislock import SingletonTask
    >>> app = Celery("proj", broker="redis://localhost/0", backend="redis://localhost/1")
    >>> @app.task(base=SingletonTask)
    ... def sync_account(account_id):
    ...     ...
"""

from celery_redislock.errors import (
    LockConfigError,
    LockConflict,
    LockKeyError,
    LockLost,
    LockUnavailable,
    RedisLockError,
)
from celery_redislock.held import HeldLock, current_lock
from celery_redislock.task import SingletonMixin, SingletonTask

__all__ = [
    "HeldLock",
    "LockConfigError",
    "LockConflict",
    "LockKeyError",
    "LockLost",
    "LockUnavailable",
    "RedisLockError",
    "SingletonMixin",
    "SingletonTask",
    "current_lock",
]
