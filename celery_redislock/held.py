"""The lock as the code that runs under it sees it: ``self.lock`` and `current_lock`."""

from __future__ import annotations

import time
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from celery_redislock.errors import LockLost
from celery_redislock.keeper.plan import Hold, Loss
from celery_redislock.lease import Lease
from celery_redislock.stores.base import LockStore

if TYPE_CHECKING:
    from contextvars import Token as ContextToken

__all__ = ["HeldLock", "current_lock"]

_current: ContextVar[HeldLock | None] = ContextVar("redislock_current", default=None)


class HeldLock:
    """A lock that this run holds.

    Attributes:
        key: The lock key.
        fence: Fencing token: greater than that of each earlier run under this lock name. Hand it to whatever you write
            to, and let that refuse a smaller one.
    """

    __slots__ = ("_hold", "_left", "_outer", "_owner", "_store", "fence", "key")

    def __init__(self, owner: str, hold: Hold, fence: int, store: LockStore) -> None:
        self.key = hold.lease.key
        self.fence = fence
        self._owner = owner
        self._hold = hold
        self._store = store
        self._left = False
        self._outer: ContextToken[HeldLock | None] | None = None

    def __repr__(self) -> str:
        return f"<HeldLock {self.key} fence={self.fence} remaining={self.remaining():.1f}s>"

    @property
    def token(self) -> str:
        """The proof of the lease, as stored under the key. Keep it out of logs and messages."""
        return self._hold.lease.token

    @property
    def lease(self) -> Lease:
        """Key, token and TTL."""
        return self._hold.lease

    @property
    def held(self) -> bool:
        """Whether the lease is held as far as this process knows, without asking the store."""
        return self._hold.loss is None and self.remaining() > 0

    def remaining(self) -> float:
        """Return for how long the lease is certain without another renewal, s. 0: it may be gone, or was given up."""
        if self._hold.final or self._left:
            return 0.0
        return max(0.0, self._hold.deadline - time.monotonic())

    def ensure_held(self) -> None:
        """Ask the store whether the lease is still there: one round trip.

        Call it before a step that must not overlap with another run. It narrows the window, it cannot close it: the
        lease may end right after the answer. What must never be written twice needs the `fence`.

        Raises:
            LockLost: The lease is gone.
            LockUnavailable: The store could not be asked.
        """
        loss = self._hold.loss
        reason = loss.value if loss is not None else "missing"
        if not self._hold.final:
            seen = self._store.inspect(self.key)
            if seen is not None and seen.holder.value == self.token:
                return
            if loss is not Loss.MAX_HOLD:
                reason = "missing" if seen is None else "taken"
        raise LockLost(
            f"{self._owner}: the lease on {self.key} is gone ({reason}); another run may have started", self.key, reason
        )

    def enter(self) -> None:
        """Become the current lock of this context (the gate's business)."""
        self._outer = _current.set(self)

    def leave(self) -> None:
        """Stop being it; the lease is about to be given up."""
        self._left = True
        outer, self._outer = self._outer, None
        if outer is not None:
            with suppress(ValueError):  # left in another context than entered: that one is gone
                _current.reset(outer)


def current_lock() -> HeldLock | None:
    """Return the lock of the run that calls this, or None outside of one.

    In a thread that the task has started itself there is no run, and so no lock: hand the lock over.
    """
    return _current.get()


def lock_on_stack(key: str) -> HeldLock | None:
    """Return the lock on ``key`` if a run on this call stack holds it: only then an eager call inside it re-enters."""
    lock = _current.get()
    while lock is not None and lock.key != key:
        outer = lock._outer.old_value if lock._outer is not None else None
        lock = outer if isinstance(outer, HeldLock) else None
    return lock
