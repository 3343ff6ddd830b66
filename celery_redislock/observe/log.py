"""One log line per event, rate-limited for each event and task, with the event's fields as ``extra``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from celery_redislock.observe.events import Event

__all__ = ["LogListener"]

logger = logging.getLogger("celery_redislock.events")

BURST: Final = 10
PER_SECOND: Final = 1.0
"""Ten lines at once, then one a second, for each event and task: a storm of skips must not become a storm of lines."""

LEVELS: Final = {
    "lock_acquired": logging.DEBUG,
    "lock_released": logging.DEBUG,
    "lock_conflict": logging.INFO,
    "lock_lost": logging.WARNING,
    "lock_recovered": logging.WARNING,
    "lock_renewal_late": logging.WARNING,
    "lock_orphaned": logging.WARNING,
    "lock_unavailable": logging.WARNING,
}
TEXTS: Final = {
    "lock_acquired": "%(task)s[%(task_id)s] holds %(key)s, fence %(fence)d",
    "lock_released": "%(task)s[%(task_id)s] gave up %(key)s after %(held).3f s",
    "lock_conflict": (
        "%(task)s[%(task_id)s] was denied %(key)s, held by %(holder)s for another %(remaining).1f s: %(policy)s"
    ),
    "lock_lost": (
        "%(task)s[%(task_id)s] has lost %(key)s (%(reason)s) before its run ended; another run may have started"
    ),
    "lock_recovered": "%(task)s[%(task_id)s] still has %(key)s: it was never lost",
    "lock_renewal_late": "%(task)s[%(task_id)s] renews %(key)s %(late).1f s late: this process was starved",
    "lock_orphaned": "%(task)s[%(task_id)s] gave up %(key)s: pid %(pid)d, which ran it, has died",
    "lock_unavailable": "%(task)s[%(task_id)s] could not %(operation)s %(key)s: %(policy)s; %(reason)s",
}
LEFT_OUT: Final = " (%(left_out)d such lines left out)"


class LogListener:
    """Writes events to the logger ``celery_redislock.events``.

    Args:
        clock: Monotonic time, s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def wants(self, name: str) -> bool:
        """Tell whether an event of this name would be written at all."""
        return logger.isEnabledFor(LEVELS[name])

    def __call__(self, event: Event) -> None:
        """Write one line, or count it if there were too many."""
        level = LEVELS[event.name]
        if not logger.isEnabledFor(level):
            return
        bucket = self._buckets.setdefault((event.name, event.task), _Bucket())
        left_out = bucket.take(self._clock())
        if left_out is None:
            return
        fields = event.fields()
        text = TEXTS[event.name] + (LEFT_OUT if left_out else "")
        extra = {"lock_event": event.name, **{f"lock_{name}": value for name, value in fields.items()}}
        logger.log(level, text, {**fields, "left_out": left_out}, extra=extra)


class _Bucket:
    """Tokens for log lines."""

    __slots__ = ("_last", "_left_out", "_tokens")

    def __init__(self) -> None:
        self._tokens = float(BURST)
        self._last: float | None = None
        self._left_out = 0

    def take(self, now: float) -> int | None:
        """Return how many lines were left out since the last one, or None if this one is left out too."""
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        self._tokens = min(float(BURST), self._tokens + passed * PER_SECOND)
        if self._tokens < 1:
            self._left_out += 1
            return None
        self._tokens -= 1
        left_out, self._left_out = self._left_out, 0
        return left_out
