"""One call's way through the lock: take it, hold it, leave it."""

from __future__ import annotations

import logging
import os
import random
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Protocol

from celery.exceptions import SoftTimeLimitExceeded

from celery_redislock.errors import LockConflict, LockUnavailable
from celery_redislock.held import HeldLock
from celery_redislock.keeper.channel import ChildKeeper, process_start
from celery_redislock.keeper.keeper import Keeper
from celery_redislock.keeper.plan import Hold, Loss
from celery_redislock.keys import KeyScheme
from celery_redislock.lease import TOMBSTONE, Acquired, Contended, Grant, Lease, Released, Token
from celery_redislock.observe.events import Event, LockAcquired, LockConflicted, LockOutage, LockReleased, LockWentLost
from celery_redislock.options import LockOptions
from celery_redislock.stores.base import Ask, LockStore, Release

__all__ = ["MARK", "Identity", "LockRun", "Pauses"]

logger = logging.getLogger(__name__)

LATEST_START: Final = 1 / 3
"""Part of the TTL that must be left when the grant's reply comes in: with less, the body would start on borrowed
time."""

MARK: Final = "_redislock"
"""Where a request keeps its `LockRun`: set, if only to None, once the call has come to the gate."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks for a lock: what goes into its tokens.

    Attributes:
        task_id: Id of the call, "-" outside tasks.
        retries: Its ``request.retries``.
        worker: Node name of the worker, or None.
    """

    task_id: str
    retries: int
    worker: str | None

    def token(self) -> Token:
        """Return a token with a fresh nonce."""
        pid = os.getpid()
        return Token.new(self.task_id, self.retries, self.worker or "-", pid, _process_start(pid))


@cache
def _process_start(pid: int) -> int:
    return process_start(pid) or 0


class Host(Protocol):
    """What a run needs of its app's runtime."""

    @property
    def store(self) -> LockStore: ...

    @property
    def keeper(self) -> Keeper | ChildKeeper: ...

    def emit(self, event: Event) -> None: ...

    def heard(self, name: str) -> bool: ...


class LockRun:
    """One call's way through the lock: take it, hold it, leave it.

    The token is made before anything is sent, and `leave` may be called at any time and any number of times: whatever
    interrupts the call (a soft limit may land on any line), calling it once more is enough.

    Attributes:
        key: Lock key.
        lock: What the body sees; None until the lock is granted.
        uncertain: An acquire of this run went unanswered.
    """

    def __init__(
        self,
        runtime: Host,
        task: str,
        options: LockOptions,
        scheme: KeyScheme,
        key: str,
        identity: Identity,
        *,
        done_key: str | None = None,
    ) -> None:
        self.key = key
        self.lock: HeldLock | None = None
        self.uncertain = False
        self._runtime = runtime
        self._task = task
        self._options = options
        self._scheme = scheme
        self._identity = identity
        self._done_key = done_key
        self._pid = os.getpid()
        self._asked = False
        self._hold: Hold | None = None
        self._token = identity.token()
        self._started = time.monotonic()
        self._taken = 0.0
        self._tried_to_leave = False

    @property
    def about(self) -> dict[str, str]:
        """The fields that every event carries."""
        return {"task": self._task, "key": self.key, "task_id": self._identity.task_id}

    @property
    def fence(self) -> int:
        """Fencing token of the grant; 0 before it."""
        return self.lock.fence if self.lock is not None else 0

    @property
    def pending(self) -> bool:
        """Whether there may be something to give up."""
        return self._asked

    # --- taking

    def take(self) -> Grant:
        """Make one attempt; once it is granted, the lease is kept alive until `leave`.

        Raises:
            LockUnavailable: The store could not be asked, or its answer came too late to start on.
        """
        options, runtime = self._options, self._runtime
        lease = Lease(self.key, self._token.encode(), options.ttl)
        self._asked = True
        try:
            grant = runtime.store.acquire(Ask(lease, self._scheme.fence, self._token.tombstone_prefix, self._done_key))
            if isinstance(grant, Acquired):
                self._check_not_late(grant, lease)
        except LockUnavailable:
            self._asked, self.uncertain = False, True
            self._token = self._identity.token()  # whatever the old one may still do, it must not be taken for this one
            raise
        if not isinstance(grant, Acquired):
            self._asked = False
            return grant
        self._hold = Hold(
            lease, self, sent=grant.deadline - options.ttl, renew=options.renew, max_hold=options.max_hold
        )
        self.lock = HeldLock(self._task, self._hold, grant.fence, runtime.store)
        runtime.keeper.hold(self._hold)
        self.lock.enter()
        self._taken = time.monotonic()
        if runtime.heard("lock_acquired"):
            runtime.emit(LockAcquired(**self.about, fence=grant.fence, waited=self._taken - self._started))
        return grant

    def _check_not_late(self, grant: Acquired, lease: Lease) -> None:
        left = grant.deadline - time.monotonic()
        if left < LATEST_START * lease.ttl:
            self._runtime.store.release(Release(lease))
            raise LockUnavailable(f"{self._task}: the lock store granted {self.key} too late to start on")

    def take_within(self, wait: float) -> HeldLock:
        """Try until the lock is granted, for at most ``wait`` s.

        Raises:
            LockConflict: Still held by another.
            LockUnavailable: The store could not be asked.
        """
        end = self._started + wait
        pauses = Pauses(end)
        while True:
            grant = self.take()
            if self.lock is not None:
                return self.lock
            assert isinstance(grant, Contended)
            if not pauses.sleep(grant.remaining):
                holder = grant.holder
                raise LockConflict(f"{self.key} is held by {holder}", self.key, str(holder))

    # --- leaving

    def leave(self, *, finished: bool) -> None:
        """Give the lock up, if it was ever asked for and not given up yet.

        Args:
            finished: The call has run to its end: another delivery of it need not run, and ``lock_min_hold`` counts.
        """
        if self._hold is not None:
            self._runtime.keeper.drop(self._hold)
        if not self._asked or self._pid != os.getpid():  # a process forked by the body must not free its parent's lock
            return
        if self.lock is not None:
            self.lock.leave()
        again, self._tried_to_leave = self._tried_to_leave, True
        try:
            released = self._runtime.store.release(self._release(finished))
        except LockUnavailable as error:
            released = None
            self.outage("release", "warn", error)
            if self._hold is not None:  # or calls would be denied for the rest of the TTL, and nobody running
                self._runtime.keeper.release_later(self._release(finished), self._hold.deadline)
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            # a store's bug must not change what the finished run has come to
            released = None
            logger.exception("%s: releasing %s failed; the lease ends by its TTL", self._task, self.key)
        self._asked = False
        if released is not None and self.lock is not None:
            # the first time may have been interrupted when the key was gone already
            owned = released.owned or (again and released.holder is None)
            self._tell_released(replace(released, owned=owned))

    def _release(self, finished: bool) -> Release:
        options, token = self._options, self._token.encode()
        keep = options.min_hold - (time.monotonic() - self._taken) if finished and self.lock is not None else 0.0
        return Release(
            Lease(self.key, token, options.ttl),
            keep=max(0.0, keep),
            tombstone=TOMBSTONE + token,
            done_key=self._done_key if finished and self.lock is not None else None,
            done_ttl=options.done_ttl,
        )

    def _tell_released(self, released: Released) -> None:
        runtime, hold = self._runtime, self._hold
        if not released.owned and hold is not None and hold.loss is None:
            hold.loss, hold.final = Loss.MISSING if released.holder is None else Loss.TAKEN, True
            runtime.emit(LockWentLost(**self.about, fence=self.fence, reason=hold.loss.value))
        elif released.owned and runtime.heard("lock_released"):
            runtime.emit(LockReleased(**self.about, fence=self.fence, held=time.monotonic() - self._taken))

    # --- what else is to be told

    def conflict(self, denial: Contended, policy: str, countdown: float | None = None) -> None:
        """Tell that the call was denied, and what it does now."""
        holder = denial.holder
        self._runtime.emit(
            LockConflicted(
                **self.about,
                policy=policy,
                holder=str(holder),
                holder_task_id=holder.task_id,
                remaining=denial.remaining,
                countdown=countdown,
            )
        )

    def dropped(self) -> None:
        """Tell that the call does nothing, for another copy of its message has run to its end."""
        self._runtime.emit(
            LockConflicted(
                **self.about,
                policy="drop",
                holder="another copy of this message, which has run to its end",
                holder_task_id=self._identity.task_id,
                remaining=0.0,
                countdown=None,
            )
        )

    def outage(self, operation: str, policy: str, error: BaseException) -> None:
        """Tell that the store or the broker could not be asked, and what the call does now."""
        self._runtime.emit(LockOutage(**self.about, operation=operation, policy=policy, reason=str(error)))


class Pauses:
    """Growing, jittered pauses up to a fixed end.

    Args:
        end: Monotonic time, s.
    """

    FIRST: Final = 0.01
    LONGEST: Final = 0.25

    def __init__(self, end: float) -> None:
        self._end = end
        self._next = self.FIRST

    def sleep(self, remaining: float) -> bool:
        """Sleep a little, no longer than ``remaining`` s of a lease; False, at once, if the end has been reached."""
        left = self._end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._next, left, max(remaining, self.FIRST)) * random.uniform(0.5, 1.0))
        self._next = min(2 * self._next, self.LONGEST)
        return True
