"""What a denied call does. PURE: DESIGN section 7's table as one function.

The heart is rule 3: a copy of *my own* message (a redelivery, a retry, a task that re-enqueues itself) is never dropped
as a duplicate, and neither is one that may have begun before. The model in ``tests/model`` shows what would be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from celery_redislock.lease import Contended, Holder

__all__ = ["Call", "Verdict", "back_off", "decide", "is_same_attempt"]

BASE: Final = 0.25
"""First pause of a copy that waits, s; doubled with each further one."""
LONGEST: Final = 60.0
"""Longest pause, s, whatever the lease."""


class Verdict(Enum):
    """What becomes of a call that was denied."""

    SKIP = "skip"
    IGNORE = "ignore"
    RAISE = "raise"
    RETRY = "retry"
    WAIT = "wait"
    COME_BACK = "come_back"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Call:
    """What the decision needs to know of a message.

    Attributes:
        task_id: Its id.
        retries: Its ``request.retries``.
        parent_id: Id of the task that sent it, or None.
        redelivered: The broker has delivered it before.
        came_back: A copy of it was denied before and was published again.
        uncertain: In this very run an acquire went unanswered: it may have been granted.
    """

    task_id: str
    retries: int = 0
    parent_id: str | None = None
    redelivered: bool = False
    came_back: bool = False
    uncertain: bool = False


def is_same_attempt(call: Call, holder: Holder) -> bool:
    """Tell whether the holder runs another copy of this very message."""
    return holder.task_id == call.task_id and holder.retries == call.retries


def decide(call: Call, denial: Contended, policy: str, *, finished: bool = False) -> Verdict:
    """Return what the denied call does.

    Args:
        call: The message.
        denial: Who holds the lock.
        policy: ``lock_on_conflict``.
        finished: Known for certain that this very attempt has run to its end.
    """
    holder = denial.holder
    if finished and is_same_attempt(call, holder):
        return Verdict.DROP
    if holder.task_id is not None and holder.task_id in (call.task_id, call.parent_id):
        return Verdict.COME_BACK
    # it may have begun, or an acquire of its own that timed out and one of theirs may have denied each other
    if call.uncertain or ((call.redelivered or call.came_back) and denial.began is not False):
        return Verdict.COME_BACK
    return Verdict(policy)


def back_off(attempt: int, remaining: float, *, jitter: float, visibility_timeout: float | None = None) -> float:
    """Return how long a waiting copy stays away, s.

    It grows with each attempt, and is never longer than what is left of the lease (if the holder is dead, that is when
    the lock gets free) nor than a third of the visibility timeout (a copy that waits longer is delivered twice).

    Args:
        attempt: How often this copy has waited before.
        remaining: Time left of the holder's lease, s.
        jitter: Random number from 0 to 1: copies that were denied together must not come back together.
        visibility_timeout: The broker's, s, or None where it has none.
    """
    limits = [BASE * 2.0 ** min(attempt, 20), remaining, LONGEST]
    if visibility_timeout is not None:
        limits.append(visibility_timeout / 3)
    return max(0.0, min(limits)) * (0.5 + jitter / 2)
