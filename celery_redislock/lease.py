"""What a store grants and what a denied caller learns. PURE: values only.

The token's format is part of the public wire format (docs/reference/wire-format.md):
``1|task_id|retries|nonce|worker|pid|start``, each field percent-escaped. It is a plain string, so any
``SET key value NX`` client conflicts correctly with it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

__all__ = ["Acquired", "AlreadyDone", "Contended", "Grant", "Holder", "Lease", "Released", "Renewal", "Token"]

VERSION = "1"
TOMBSTONE = "-"
"""Put before a token whose run has ended but whose key stays for the rest of ``lock_min_hold``."""
NONCE_BYTES = 12
"""96 random bits: with 2**32 tokens alive the chance of one collision is 2**-33 (birthday bound)."""
_FIELDS = 7
_SAFE = "!#$&'()*+,/:;=?@[]^_`{}~"  # as quote() leaves letters, digits and "_.-~" alone; not "|" and "%"


def _quote(text: str) -> str:
    return quote(text, safe=_SAFE, errors="surrogatepass")


def _unquote(text: str) -> str:
    return unquote(text, errors="surrogatepass")  # exact: a call must know its own id again, whatever is in it


def _readable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


@dataclass(frozen=True, slots=True)
class Token:
    """Random proof of one attempt at one lease. A new attempt takes a new nonce; a token never travels in a message.

    Attributes:
        task_id: Id of the task that asks ("-" outside tasks).
        retries: Its ``request.retries``.
        nonce: 96 random bits in hex; never shown.
        worker: Node name of the worker ("-" outside workers).
        pid: Process that runs the task.
        start: Start time of that process in the platform's own unit, so that a reused pid can be told; 0 if unknown.
    """

    task_id: str
    retries: int
    nonce: str = field(repr=False)
    worker: str
    pid: int
    start: int

    @classmethod
    def new(cls, task_id: str, retries: int, worker: str, pid: int, start: int) -> Token:
        """Return a token with a fresh nonce."""
        return cls(task_id, retries, secrets.token_hex(NONCE_BYTES), worker, pid, start)

    def encode(self) -> str:
        """Return the value that is stored under the lock key."""
        call = f"{_quote(self.task_id)}|{self.retries}"
        return f"{VERSION}|{call}|{self.nonce}|{_quote(self.worker)}|{self.pid}|{self.start}"

    @property
    def tombstone_prefix(self) -> str:
        """How the tombstones of this task id begin, whichever attempt left them."""
        return f"{TOMBSTONE}{VERSION}|{_quote(self.task_id)}|"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, read from a stored value. All fields but ``released`` are None for an unknown format.

    Attributes:
        value: The stored value as it is; never shown, compared as a whole.
        released: The run has ended; the key only stays for ``lock_min_hold``.
    """

    value: str = field(repr=False)
    task_id: str | None = None
    retries: int | None = None
    worker: str | None = None
    pid: int | None = None
    start: int | None = None
    released: bool = False

    @classmethod
    def parse(cls, value: str) -> Holder:
        """Read a stored value. An unknown format is a holder of whom nothing is known, never an error."""
        released = value.startswith(TOMBSTONE)
        fields = value.removeprefix(TOMBSTONE).split("|")
        if len(fields) != _FIELDS or fields[0] != VERSION:
            return cls(value)
        _, task_id, retries, _nonce, worker, pid, start = fields
        try:
            return cls(value, _unquote(task_id), int(retries), _unquote(worker), int(pid), int(start), released)
        except ValueError:
            return cls(value)

    def __str__(self) -> str:
        """One readable line without the nonce, for logs and errors."""
        if self.task_id is None:
            return "an unknown client"
        ended = " (ended; the key stays for lock_min_hold)" if self.released else ""
        return f"task {_readable(self.task_id)} on {_readable(self.worker or '-')} pid {self.pid}{ended}"


@dataclass(frozen=True, slots=True)
class Acquired:
    """The lease is granted.

    Attributes:
        fence: Fencing token, greater than that of each earlier grant under this lock name.
        deadline: Monotonic time (s) after which the lease may be gone, counted from before the first send.
    """

    fence: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Contended:
    """Somebody else holds the lock.

    Attributes:
        holder: Who.
        remaining: Time left of the lease, s.
        now: The store's own clock, s. Only differences between two of them mean anything.
        began: With ``lock_done_ttl``: whether this very attempt was ever granted the lock before. None: not known.
    """

    holder: Holder
    remaining: float
    now: float
    began: bool | None = None


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """A done marker (``lock_done_ttl``) says that this very attempt has run to its end."""


Grant = Acquired | Contended | AlreadyDone


@dataclass(frozen=True, slots=True)
class Lease:
    """What is needed to renew or release a grant.

    Attributes:
        key: Lock key.
        token: Encoded token.
        ttl: Length of the lease, s. Each renewal sets the full length again.
    """

    key: str
    token: str = field(repr=False)
    ttl: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """The store's answer to one renewal.

    Attributes:
        held: The key still held my token and has its full TTL again.
        holder: The one who holds it instead, or None where the key is missing.
    """

    held: bool
    holder: Holder | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """The store's answer to a release.

    Attributes:
        owned: The key held my token (or an earlier try of this release may have removed it).
        holder: The one who holds the key instead, or None.
    """

    owned: bool
    holder: Holder | None = None
