"""Which renewals are due, and what an answer means. PURE: time comes in as an argument.

A `Hold` is one lease as this process sees it. All times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, Final

from celery_redislock.lease import Lease, Renewal

__all__ = ["Change", "Hold", "Loss", "due", "next_time"]

RENEW_AT: Final = 3
"""Renewals are due each ttl/3: two may fail before the lease ends."""


class Loss(StrEnum):
    """Why a lease counts as lost."""

    TAKEN = "taken"
    MISSING = "missing"
    UNREACHABLE = "unreachable"
    EXPIRED = "expired"
    MAX_HOLD = "max_hold"
    ORPHANED = "orphaned"


@dataclass(frozen=True, slots=True)
class Change:
    """News about a lease: it is lost, or (``loss`` None) it has turned out not to be."""

    loss: Loss | None


class Hold:
    """One lease held by this process: its own deadline, its next renewal, and whether it is lost.

    Attributes:
        lease: What is renewed.
        owner: Whoever wants to hear of changes; opaque here.
        deadline: After this the lease may be gone: whoever cannot know steps down.
        due: When the next renewal is to be sent; inf: never.
        loss: Why it counts as lost, or None while it is held.
        final: The loss cannot be undone: somebody else has, or may have, held the lock since.
        renew: Whether it is to be renewed at all.
        max_hold: Renewing stops this long after `sent`, s; None: never.
    """

    __slots__ = ("_asked", "_stop", "deadline", "due", "final", "lease", "loss", "max_hold", "owner", "renew")

    def __init__(
        self, lease: Lease, owner: Any, *, sent: float, renew: bool = True, max_hold: float | None = None
    ) -> None:
        self.lease = lease
        self.owner = owner
        self.deadline = sent + lease.ttl
        self.loss: Loss | None = None
        self.final = False
        self.renew = renew
        self.max_hold = max_hold
        self._stop = inf if max_hold is None or not renew else sent + max_hold
        self._asked = False
        self.due = inf
        if renew:
            self._schedule(sent + lease.ttl / RENEW_AT)

    def _schedule(self, due: float) -> None:
        self.due = due if due < self._stop else inf

    def is_due(self, now: float) -> bool:
        """Whether a renewal is to be sent now: never after ``max_hold``, however late this comes."""
        if now >= self._stop:
            self.due = inf
        return self.due <= now

    def neglected(self, now: float) -> bool:
        """Whether somebody else should have renewed it by now, and has not even tried."""
        late = now >= self.deadline - self.lease.ttl / RENEW_AT
        return late and self.renew and self.loss is None and now < self._stop and not self._asked

    def lateness(self, now: float) -> float:
        """How long the next renewal has been overdue, s."""
        return max(0.0, now - self.due)

    def answered(self, answer: Renewal | None, *, sent: float, now: float) -> Change | None:
        """Take in the answer to a renewal sent at ``sent``; None: the store could not be asked."""
        if self.final:
            return None
        if answer is None:
            self.unanswered()
            self._schedule(now + min(self.lease.ttl / (3 * RENEW_AT), 1.0))
            return self.check(now)
        if not answer.held:
            return self.lost(Loss.MISSING if answer.holder is None else Loss.TAKEN, final=True)
        self._schedule(sent + self.lease.ttl / RENEW_AT)
        return self.renewed_until(sent + self.lease.ttl, now) or self.check(now)

    def unanswered(self) -> None:
        """Take in that the store could not be asked."""
        self._asked = True

    def renewed_until(self, deadline: float, now: float) -> Change | None:
        """Take in that the lease is certain until ``deadline``; news if it counted as lost: nobody was in between."""
        if self.final:
            return None
        self.deadline, self._asked = deadline, False
        if now >= deadline:  # news as old as a lease says nothing about now; newer one may be behind it
            return None
        lost, self.loss = self.loss, None
        return None if lost is None else Change(None)

    def lost(self, loss: Loss, *, final: bool) -> Change | None:
        """Take in that the lease is lost; news only if it did not count as lost before."""
        if self.final:
            return None
        if final:
            self.final, self.due = True, inf
        known, self.loss = self.loss, loss
        return None if known else Change(loss)

    def check(self, now: float) -> Change | None:
        """Step down if the deadline has passed."""
        if self.loss is not None or now < self.deadline:
            return None
        if self._asked:
            self.loss = Loss.UNREACHABLE
        else:
            self.loss = Loss.MAX_HOLD if now >= self._stop else Loss.EXPIRED
        return Change(self.loss)


def due(holds: Iterable[Hold], now: float) -> list[Hold]:
    """Return the holds whose renewal is due."""
    return [hold for hold in holds if hold.is_due(now)]


def next_time(holds: Iterable[Hold]) -> float:
    """Return when something is to be done next: a renewal, or stepping down. inf: nothing."""
    return min((min(hold.due, hold.deadline if hold.loss is None else inf) for hold in holds), default=inf)
