"""The thread that keeps this process's leases alive.

One native daemon thread per process, started by the first lease. The table of holds is all that it goes by: `hold` and
`drop` are one dict operation each, and the thread looks into the table before it sends and before it acts on an
answer. In prefork the pool's processes have theirs entered into the table of the main process (channel.py). A lease
that has been dropped is never renewed again; a renewal in flight cannot re-create it, for a missing key is not taken
again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from celery_redislock.errors import LockUnavailable
from celery_redislock.keeper.channel import Gateway
from celery_redislock.keeper.native import WakeUp, start_thread
from celery_redislock.keeper.plan import Change, Hold, due, next_time
from celery_redislock.lease import Renewal
from celery_redislock.stores.base import LockStore, Release

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

LATE: Final = 1 / 3
"""Part of a TTL by which a renewal may be overdue before somebody is told: one of the three chances is gone then."""
PAUSE_AFTER_A_BUG: Final = 1.0
SHORTEST_TIMEOUT: Final = 0.05

RELEASE_PAUSE: Final = 0.5
"""Pause before a release that has failed is tried again, s."""

_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()


@dataclass(slots=True)
class _Unreleased:
    """A release that has failed: until when it matters, until when the key is to stay, and when to try again."""

    release: Release
    until: float
    keep_until: float
    again: float


class Keeper:
    """Renews the leases that it is told to hold.

    Args:
        store: Asked for renewals, from the keeper's thread only.
        timeout: Longest time for one round of renewals, s.
        on_change: Called in the keeper's thread with a hold and what has become of it.
        on_late: Called in the keeper's thread with a hold and how late its renewal is sent, s.
        on_answer: Called in the keeper's thread with a hold and what the store said to its renewal (None: nothing).
    """

    def __init__(
        self,
        store: LockStore,
        timeout: float,
        on_change: Callable[[Hold, Change], None],
        on_late: Callable[[Hold, float], None],
        on_answer: Callable[[Hold, Renewal | None], None] = lambda hold, answer: None,
    ) -> None:
        self._store = store
        self._timeout = timeout
        self._on_change = on_change
        self._on_late = on_late
        self._on_answer = on_answer
        self._start_over()
        _keepers.add(self)

    def _start_over(self) -> None:
        self._holds: dict[str, Hold] = {}
        self._unreleased: dict[str, _Unreleased] = {}
        self._lives = False
        self._vacancy: list[None] = [None]  # whoever pops it is the thread; a pop is atomic
        self._bell: WakeUp | Gateway = WakeUp()
        self._wakes_at = -inf  # awake: it will see what is in the table before it sleeps

    # --- for those who run tasks

    def hold(self, hold: Hold) -> None:
        """Keep this lease alive from now on."""
        self._holds[hold.lease.token] = hold
        if not self._lives:
            # a soft limit may land on any line, and several threads may come here: start one too many rather than none
            start_thread(self._live)
        elif min(hold.due, hold.deadline) < self._wakes_at:
            self._bell.ring()

    def drop(self, hold: Hold) -> None:
        """Forget this lease; harmless if it is not held."""
        self._holds.pop(hold.lease.token, None)

    def release_later(self, release: Release, until: float) -> None:
        """Go on trying to give up a lease whose release has failed, until it ends by itself.

        Args:
            release: What could not be done; `Release.keep` counts from now.
            until: The lease's deadline, monotonic s.
        """
        now = time.monotonic()
        self._unreleased[release.lease.token] = _Unreleased(release, until, now + release.keep, now + RELEASE_PAUSE)
        if not self._lives:
            start_thread(self._live)
        elif now + RELEASE_PAUSE < self._wakes_at:
            self._bell.ring()

    def holds(self) -> list[Hold]:
        """Return what is held now."""
        return list(self._holds.values())

    def attend(self, gateway: Gateway) -> None:
        """Listen to other processes as well: from now on the keeper sleeps in the gateway."""
        self._bell = gateway
        start_thread(self._live)

    # --- the thread

    def _live(self) -> None:
        try:
            self._vacancy.pop()
        except IndexError:  # there is one already
            return
        self._lives = True
        threading.current_thread().name = "redislock-keeper"
        pid = os.getpid()
        while pid == os.getpid():
            try:
                self._round()
            except BaseException:
                logger.critical("the keeper of leases met a bug and goes on after a pause", exc_info=True)
                time.sleep(PAUSE_AFTER_A_BUG)

    def _round(self) -> None:
        try:
            self._bell.drain()
            self._renew(time.monotonic())
        finally:
            self._step_down()
        self._release()
        while True:
            wakes_at = self._next_time()
            self._wakes_at = wakes_at
            if self._next_time() >= wakes_at:  # nobody came in between; later ones ring
                break
        self._bell.sleep(wakes_at - time.monotonic() if wakes_at < inf else inf)
        self._wakes_at = -inf

    def _renew(self, now: float) -> None:
        ready = due(self.holds(), now)
        if not ready:
            return
        for hold in ready:
            if hold.lateness(now) > LATE * hold.lease.ttl:
                self._on_late(hold, hold.lateness(now))
        # no longer than the most urgent lease can wait for another try
        timeout = max(SHORTEST_TIMEOUT, min(self._timeout, *(hold.lease.ttl / 3 for hold in ready)))
        sent = time.monotonic()
        answers = self._store.renew([hold.lease for hold in ready], timeout)
        self._bell.drain()  # what was given up meanwhile is not to be taken for lost
        for hold, answer in zip(ready, answers, strict=True):
            if self._still_holds(hold):
                change = hold.answered(answer, sent=sent, now=time.monotonic())
                self._on_answer(hold, answer)
                self._tell(hold, change)

    def _step_down(self) -> None:
        now = time.monotonic()
        for hold in self.holds():
            if self._still_holds(hold):
                self._tell(hold, hold.check(now))

    def _next_time(self) -> float:
        return min(next_time(self.holds()), min((late.again for late in list(self._unreleased.values())), default=inf))

    def _release(self) -> None:
        """Repeat the releases that have failed; no further than to the first one that fails again."""
        for token, late in list(self._unreleased.items()):
            now = time.monotonic()
            if now >= late.until:
                del self._unreleased[token]
            elif now >= late.again:
                try:
                    self._store.release(replace(late.release, keep=max(0.0, late.keep_until - now)))
                except LockUnavailable:
                    late.again = time.monotonic() + RELEASE_PAUSE
                    return
                self._unreleased.pop(token, None)

    def _still_holds(self, hold: Hold) -> bool:
        # looked at before the hold is told, not after: what it has been told, somebody has to hear
        return hold.lease.token in self._holds

    def _tell(self, hold: Hold, change: Change | None) -> None:
        if change is not None:
            self._on_change(hold, change)


def _after_fork_in_child() -> None:
    """The parent's leases are the parent's, and its thread does not exist here."""
    for keeper in list(_keepers):
        keeper._start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
