"""A store in this process's memory, with a clock of your choice. For tests; it locks nothing across processes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from celery_redislock.lease import Acquired, AlreadyDone, Contended, Grant, Holder, Lease, Released, Renewal
from celery_redislock.stores.base import FENCE_TTL, Ask, Release

__all__ = ["MemoryStore"]

_BEGAN, _DONE = "began", "done"


class MemoryStore:
    """Leases in a dict: the same answers as the scripts of `RedisStore` give, without a server.

    Args:
        clock: Monotonic time in s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._values: dict[str, tuple[str, float]] = {}
        self._fences: dict[str, int] = {}

    def acquire(self, ask: Ask) -> Grant:
        """See `LockStore.acquire`."""
        with self._lock:
            now = self._clock()
            lease = ask.lease
            marker = self._get(ask.done_key, now) if ask.done_key else None
            held = self._get(lease.key, now)
            mine = held == lease.token
            if marker == _DONE and not mine:
                return AlreadyDone()
            if not (held is None or mine or held.startswith(ask.tombstone_prefix)):
                began = marker is not None if ask.done_key else None
                return Contended(Holder.parse(held), self._values[lease.key][1] - now, now, began)
            self._values[lease.key] = (lease.token, now + lease.ttl)
            if ask.done_key:
                self._values[ask.done_key] = (_BEGAN, now + FENCE_TTL)
            fence = max(self._fences.get(ask.fence_key, 0) + 1, int(now * 1_000_000))
            self._fences[ask.fence_key] = fence
            return Acquired(fence, now + lease.ttl)

    def release(self, release: Release) -> Released:
        """See `LockStore.release`."""
        with self._lock:
            now = self._clock()
            key, token = release.lease.key, release.lease.token
            if release.done_key:
                self._values[release.done_key] = (_DONE, now + release.done_ttl)
            held = self._get(key, now)
            if held is None:
                return Released(owned=False)
            if held == token:
                if release.keep > 0:
                    self._values[key] = (release.tombstone, now + release.keep)
                else:
                    del self._values[key]
                return Released(owned=True)
            mine = held == release.tombstone != ""
            return Released(mine, None if mine else Holder.parse(held))

    def renew(self, leases: Sequence[Lease], timeout: float) -> list[Renewal | None]:
        """See `LockStore.renew`."""
        with self._lock:
            return [self._renew(lease, self._clock()) for lease in leases]

    def inspect(self, key: str) -> Contended | None:
        """See `LockStore.inspect`."""
        with self._lock:
            now = self._clock()
            held = self._get(key, now)
            return None if held is None else Contended(Holder.parse(held), self._values[key][1] - now, now)

    def sibling(self) -> MemoryStore:
        """See `LockStore.sibling`; there is nothing that may not be shared."""
        return self

    def close(self) -> None:
        """Nothing is open."""

    def _renew(self, lease: Lease, now: float) -> Renewal:
        held = self._get(lease.key, now)
        if held == lease.token:
            self._values[lease.key] = (held, now + lease.ttl)
            return Renewal(held=True)
        return Renewal(False, None if held is None else Holder.parse(held))

    def _get(self, key: str, now: float) -> str | None:
        value, end = self._values.get(key, ("", -math.inf))
        if end > now:
            return value
        self._values.pop(key, None)
        return None
