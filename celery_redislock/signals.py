"""Celery-style signals, one per event of `celery_redislock.observe.events`.

``sender`` is the task's name; the event's fields come as keyword arguments. A receiver that raises is logged and
changes nothing. Receivers of `lock_lost`, `lock_recovered` and `lock_renewal_late` run in the keeper's thread: keep
them short.

Example:
    >>> from celery_redislock.signals import lock_conflict
    >>> @lock_conflict.connect
    ... def count(sender, key, policy, **fields):
    ...     print(f"{sender} was denied {key}: {policy}")
"""

from collections.abc import Callable
from typing import Any

from celery.utils.dispatch import Signal

__all__ = [
    "lock_acquired",
    "lock_conflict",
    "lock_lost",
    "lock_orphaned",
    "lock_recovered",
    "lock_released",
    "lock_renewal_late",
    "lock_unavailable",
]

lock_acquired = Signal(name="lock_acquired")
lock_released = Signal(name="lock_released")
lock_conflict = Signal(name="lock_conflict")
lock_lost = Signal(name="lock_lost")
lock_recovered = Signal(name="lock_recovered")
lock_renewal_late = Signal(name="lock_renewal_late")
lock_orphaned = Signal(name="lock_orphaned")
lock_unavailable = Signal(name="lock_unavailable")


def heard(name: str) -> bool:
    """Tell whether the signal of this name has receivers."""
    return bool(globals()[name].receivers)


def send(name: str, sender: str, fields: Callable[[], dict[str, Any]]) -> None:
    """Send the signal of this name, if anybody listens; ``fields`` is called only then."""
    signal: Signal = globals()[name]
    if signal.receivers:
        signal.send(sender=sender, **fields())
