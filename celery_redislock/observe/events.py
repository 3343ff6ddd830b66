"""The events: a contract. Names and fields stay within a major version; fields may be added.

Durations are in seconds. ``task`` is the task's name, or ``"-"`` for `Runtime.lock`. No field holds an argument's value
(unless the user put it into ``lock_key``), a token or a password.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

__all__ = [
    "EVENTS",
    "Event",
    "Listener",
    "LockAcquired",
    "LockConflicted",
    "LockOrphaned",
    "LockOutage",
    "LockRecovered",
    "LockReleased",
    "LockWentLost",
    "RenewalLate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events carry.

    Attributes:
        task: Name of the task.
        key: Lock key.
        task_id: Id of the call this happened to.
    """

    name: ClassVar[str] = ""
    task: str
    key: str
    task_id: str

    def fields(self) -> dict[str, Any]:
        """Return the fields by name, without copying."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockAcquired(Event):
    """``lock_acquired``: the lock was granted and the body is about to run.

    Attributes:
        fence: Fencing token.
        waited: Time from the first attempt of this delivery to the grant.
    """

    name: ClassVar[str] = "lock_acquired"
    fence: int
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LockReleased(Event):
    """``lock_released``: the run has ended and the key was given up.

    Attributes:
        fence: Fencing token.
        held: How long the lock was held.
    """

    name: ClassVar[str] = "lock_released"
    fence: int
    held: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LockConflicted(Event):
    """``lock_conflict``: somebody else holds the lock, and this is what the denied call does.

    Attributes:
        policy: skip, ignore, raise, retry, wait; or come_back (it waits for its own other copy), or drop (it has run).
        holder: Readable description of the holder.
        holder_task_id: Its task id, or None if unknown.
        remaining: Time left of its lease.
        countdown: When the copy comes back; None if it does not.
    """

    name: ClassVar[str] = "lock_conflict"
    policy: str
    holder: str
    holder_task_id: str | None
    remaining: float
    countdown: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockWentLost(Event):
    """``lock_lost``: the lease ended before the run did. Told once for each run.

    Attributes:
        reason: taken, missing, unreachable, expired, max_hold or orphaned (the worker's main process has died).
        fence: Fencing token, lower than that of any successor.
    """

    name: ClassVar[str] = "lock_lost"
    reason: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRecovered(Event):
    """``lock_recovered``: a lease that counted as lost is still there, and nobody was in between.

    Attributes:
        fence: Fencing token.
    """

    name: ClassVar[str] = "lock_recovered"
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalLate(Event):
    """``lock_renewal_late``: a renewal is sent more than a third of the TTL late: this process was starved.

    Attributes:
        late: How late.
    """

    name: ClassVar[str] = "lock_renewal_late"
    late: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOrphaned(Event):
    """``lock_orphaned``: the pool process that ran the task has died, and its lock was given up for it.

    Sent in the worker's main process.

    Attributes:
        fence: Fencing token.
        pid: The process that has died.
    """

    name: ClassVar[str] = "lock_orphaned"
    fence: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOutage(Event):
    """``lock_unavailable``: the store could not be asked.

    Attributes:
        operation: acquire, release or publish (a copy that could not be sent).
        policy: What the call does now: come_back, run or raise for acquire; warn for release; reject, retry or raise
            for publish.
        reason: What the store or broker answered.
    """

    name: ClassVar[str] = "lock_unavailable"
    operation: str
    policy: str
    reason: str


Listener = Callable[[Event], None]

EVENTS: dict[str, type[Event]] = {
    event.name: event
    for event in (
        LockAcquired,
        LockReleased,
        LockConflicted,
        LockWentLost,
        LockRecovered,
        RenewalLate,
        LockOrphaned,
        LockOutage,
    )
}
