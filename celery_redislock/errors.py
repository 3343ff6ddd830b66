"""What can go wrong, as one tree.

::

    RedisLockError
    ├── LockConflict      somebody else holds the lock, and the policy says to report it
    ├── LockLost          the lease ended before the run did
    ├── LockUnavailable   the store could not be asked, or there is no lease to speak of
    ├── LockKeyError      no lock key can be made from this call's arguments
    └── LockConfigError   a setting or option is wrong (also Celery's ``ImproperlyConfigured``)

Each error survives pickling and Celery's JSON result backend: ``type(e)(*e.args)`` rebuilds it. No message holds an
argument's value, a token's nonce or a password.
"""

from celery.exceptions import ImproperlyConfigured

__all__ = ["LockConfigError", "LockConflict", "LockKeyError", "LockLost", "LockUnavailable", "RedisLockError"]


class RedisLockError(Exception):
    """Base of all errors of this library."""


class LockConflict(RedisLockError):
    """Somebody else holds the lock.

    Raised by the policies ``raise``, ``retry`` (after ``lock_retry_for``) and ``wait`` (after ``lock_wait``), and by
    ``Runtime.of(app).lock(...)``.

    Attributes:
        key: The lock key, or None if unknown.
        holder: A readable description of the holder: task id, worker, pid. Not a token.
    """

    def __init__(self, message: str, key: str | None = None, holder: str | None = None) -> None:
        super().__init__(message, key, holder)
        self.key = key
        self.holder = holder

    def __str__(self) -> str:
        return str(self.args[0])


class LockLost(RedisLockError):
    """The lease ended before the run did: another run may have started.

    Raised by ``self.lock.ensure_held()``. What the run has written with an older fencing token must be refused by the
    resource; stop as soon as you can.

    Attributes:
        key: The lock key, or None if unknown.
        reason: ``"taken"``, ``"missing"``, ``"unreachable"``, ``"expired"``, ``"max_hold"`` or
            ``"orphaned"``.
    """

    def __init__(self, message: str, key: str | None = None, reason: str | None = None) -> None:
        super().__init__(message, key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class LockUnavailable(RedisLockError):
    """The store could not be asked within ``redislock_timeout``, or ``self.lock`` was used where no lease is held."""


class LockKeyError(RedisLockError):
    """No lock key can be made from the arguments of this call. The message names the task and the argument."""


class LockConfigError(RedisLockError, ImproperlyConfigured):  # type: ignore[misc]  # Celery has no types
    """A setting or task option is wrong. The message names it, where it stands, and the nearest right spelling."""
