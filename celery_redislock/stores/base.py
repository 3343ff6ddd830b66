"""What a store must be able to do. A new store is one file that meets this protocol and the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from celery_redislock.lease import Contended, Grant, Lease, Released, Renewal

__all__ = ["FENCE_TTL", "Ask", "LockStore", "Release"]

FENCE_TTL: Final = 7 * 86400.0
"""How long a fence counter outlives the last grant, s; and the marker of an attempt that began and never ended. Without
the counter a fence still can't go back, for it is never below the server's clock."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One attempt to get a lease. Its tries share the token; an attempt that fails kills the token.

    Attributes:
        lease: Key, token and length asked for.
        fence_key: Where the last fencing token of this lock name is kept.
        tombstone_prefix: Values that begin so were left by this task id and do not stand in its way.
        done_key: Marker of this very attempt, or None without ``lock_done_ttl``.
    """

    lease: Lease
    fence_key: str
    tombstone_prefix: str = field(repr=False)
    done_key: str | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a lease.

    Attributes:
        lease: What is given up.
        keep: How long the key still stays (rest of ``lock_min_hold``), s.
        tombstone: Value that stays for ``keep``.
        done_key: Marker to be set, or None if the attempt has not run to its end or nobody wants to know.
        done_ttl: How long the marker stays, s.
    """

    lease: Lease
    keep: float = 0.0
    tombstone: str = field(default="", repr=False)
    done_key: str | None = None
    done_ttl: float = 0.0


class LockStore(Protocol):
    """Keeps leases.

    Each method is bounded in time, and raises nothing but `LockUnavailable` for trouble with the server. All may be
    called from any thread or greenlet, but for `renew`, which belongs to the keeper's thread; under gevent and eventlet
    only from one thread of the operating system, see `sibling`. A store that was made before a fork works in the child.
    """

    def acquire(self, ask: Ask) -> Grant:
        """Try to get the lease; the deadline in the answer counts from before the first send.

        When this raises, for whatever reason, nothing that was sent can turn into a lease that stays for longer than
        one TTL, and the token must not be used again.

        Raises:
            LockUnavailable: The store could not be asked, or did not answer in time.
        """
        ...

    def release(self, release: Release) -> Released:
        """Give up the lease if, and only if, the key still holds its token. Harmless when repeated.

        Raises:
            LockUnavailable: The store could not be asked; the lease ends by its TTL.
        """
        ...

    def renew(self, leases: Sequence[Lease], timeout: float) -> list[Renewal | None]:
        """Renew many leases in few round trips.

        One answer each, in order; None: could not be asked within ``timeout`` s.
        """
        ...

    def inspect(self, key: str) -> Contended | None:
        """Return who holds ``key``, or None if nobody does.

        Raises:
            LockUnavailable: The store could not be asked.
        """
        ...

    def sibling(self) -> LockStore:
        """Return the same store with connections of its own, for a thread that shares none with others.

        Under gevent and eventlet a socket belongs to the operating system's thread that opened it.
        """
        ...

    def close(self) -> None:
        """Close what is open. The store opens again when used again."""
        ...
