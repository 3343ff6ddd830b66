"""Leases on one Redis or Valkey server: TCP, TLS or a Unix socket.

Each operation is one script and one round trip. Retries are ours, not redis-py's, because only we know what makes a
repetition safe: the tries of one attempt share a token, and an attempt that is given up is followed, on each connection
that may still execute it, by its own compare-and-delete.

It works on redis-py's `Connection` level: half of what `execute_command` costs is spent above it.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.resources import files
from math import ceil, inf
from typing import Any, Final

from redis.connection import ConnectionPool
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_redislock.errors import LockUnavailable
from celery_redislock.lease import Acquired, AlreadyDone, Contended, Grant, Holder, Lease, Released, Renewal
from celery_redislock.stores.base import FENCE_TTL, Ask, Release

__all__ = ["RedisStore"]

BATCH: Final = 500
"""Renewals in one round trip: from there on larger batches gain nothing, and the server is kept from others longer."""
FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.5
IDLE: Final = 0.05
"""How long a connection may have been idle, s, before it is looked at before use: a busy worker pays nothing for it."""
_TROUBLE: Final = (RedisError, OSError, ValueError)
"""What trouble with a server looks like. ValueError: redis-py's own parser, where something else than Redis answers."""


class _Script:
    """A script and its packed EVALSHA and EVAL heads (RESP: all parts but the arguments are constant)."""

    def __init__(self, name: str) -> None:
        source = (files("celery_redislock.stores") / "lua" / f"{name}.lua").read_bytes()
        sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self._evalsha = b"$7\r\nEVALSHA\r\n" + _bulk(sha)
        self._eval = b"$4\r\nEVAL\r\n" + _bulk(source)

    def pack(self, keys: Sequence[str], args: Sequence[str | int], *, full: bool = False) -> bytes:
        """Return the packed command; ``full`` sends the source along, which needs no SCRIPT LOAD permission."""
        head = self._eval if full else self._evalsha
        parts = [b"*%d\r\n" % (3 + len(keys) + len(args)), head, _bulk(b"%d" % len(keys))]
        parts.extend(_bulk(str(part).encode()) for part in (*keys, *args))
        return b"".join(parts)


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _milliseconds(seconds: float) -> int:
    return max(1, ceil(seconds * 1000))


def _holder(value: bytes) -> Holder:
    return Holder.parse(value.decode("utf-8", "replace"))


ACQUIRE: Final = _Script("acquire")
RELEASE: Final = _Script("release")
RENEW: Final = _Script("renew")


class RedisStore:
    """Leases on one server (see `LockStore`).

    Args:
        pool: Makes connections. Its own retries must be off and its socket timeouts `try_timeout(timeout)`.
        timeout: Bound for one operation with all its tries, s.
    """

    def __init__(self, pool: ConnectionPool, timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout
        self._pid = os.getpid()
        self._idle: deque[tuple[Any, float]] = deque()  # and since when; those that are closed on the left, since never
        self._keepers: Any = None
        self._always_eval = False

    @staticmethod
    def try_timeout(timeout: float) -> float:
        """How long one connect or one reply may take, s. A third leaves room to try again on another connection."""
        return timeout / 3

    # --- the protocol

    def acquire(self, ask: Ask) -> Grant:
        """See `LockStore.acquire`."""
        start = time.monotonic()
        lease = ask.lease
        keys = [lease.key, ask.fence_key]
        args: list[str | int] = [lease.token, _milliseconds(lease.ttl), _milliseconds(FENCE_TTL), ask.tombstone_prefix]
        if ask.done_key:
            keys.append(ask.done_key)
            args.append(_milliseconds(FENCE_TTL))
        suspects: list[Any] = []
        try:
            reply = self._run(ACQUIRE, keys, args, suspects)
        except BaseException:
            self._abandon(suspects, lease)
            raise
        self._discard(suspects)
        if reply[0] == 1:
            return Acquired(int(reply[1]), start + lease.ttl)
        if reply[0] == 2:
            return AlreadyDone()
        _, holder, pttl, now, began = reply
        return Contended(_holder(holder), _remaining(pttl), int(now) / 1e6, None if began < 0 else bool(began))

    def release(self, release: Release) -> Released:
        """See `LockStore.release`."""
        keys = [release.lease.key]
        args: list[str | int] = [release.lease.token, 0, release.tombstone]
        if release.keep > 0:
            args[1] = _milliseconds(release.keep)
        if release.done_key:
            keys.append(release.done_key)
            args.append(_milliseconds(release.done_ttl))
        suspects: list[Any] = []
        try:
            reply = self._run(RELEASE, keys, args, suspects)
        finally:
            self._discard(suspects)
        # not mine any more: an earlier try may have removed it, and only its reply was lost
        owned = reply[0] == 1 or bool(suspects)
        return Released(owned, _holder(reply[1]) if len(reply) > 1 else None)

    def renew(self, leases: Sequence[Lease], timeout: float) -> list[Renewal | None]:
        """See `LockStore.renew`."""
        self._check_pid()
        if self._keepers is None:
            self._keepers = self._pool.make_connection()
        connection = self._keepers
        connection.socket_connect_timeout = min(timeout, self.try_timeout(self._timeout))
        end = time.monotonic() + timeout
        answers: list[Renewal | None] = []
        try:
            for first in range(0, len(leases), BATCH):
                answers.extend(self._renew_batch(connection, leases[first : first + BATCH], end))
        except _TROUBLE:
            pass
        finally:
            if len(answers) < len(leases):
                connection.disconnect()  # replies may yet come that nobody waits for
        answers.extend([None] * (len(leases) - len(answers)))
        return answers

    def inspect(self, key: str) -> Contended | None:
        """See `LockStore.inspect`."""
        name = _bulk(key.encode())
        packed = b"*2\r\n$3\r\nGET\r\n%s*2\r\n$4\r\nPTTL\r\n%s*1\r\n$4\r\nTIME\r\n" % (name, name)
        suspects: list[Any] = []
        try:
            value, pttl, now = self._exchange(packed, 3, suspects)
        except NoPermissionError as error:
            raise LockUnavailable(f"the lock store refuses to tell: {_reason(error)}") from error
        finally:
            self._discard(suspects)
        if value is None or (isinstance(pttl, int) and pttl == -2):
            return None
        holder = Holder("") if isinstance(value, ResponseError) else _holder(value)
        return Contended(holder, _remaining(pttl), int(now[0]) + int(now[1]) / 1e6)

    def sibling(self) -> RedisStore:
        """See `LockStore.sibling`."""
        return RedisStore(self._pool, self._timeout)

    def close(self) -> None:
        """See `LockStore.close`."""
        self._hang_up()
        if self._keepers is not None:
            self._keepers.disconnect()

    # --- one operation, several tries

    def _run(self, script: _Script, keys: Sequence[str], args: Sequence[str | int], suspects: list[Any]) -> Any:
        refused: RedisError | None = None
        for full in (True,) if self._always_eval else (False, True):
            try:
                packed = script.pack(keys, args, full=full)
                (reply,) = self._exchange(packed, 1, suspects, again=lambda: script.pack(keys, args, full=True))
            except (NoScriptError, NoPermissionError) as error:
                refused = error
                continue
            self._always_eval = self._always_eval or isinstance(refused, NoPermissionError)  # +eval, but not +evalsha
            return reply
        assert refused is not None
        raise LockUnavailable(f"the lock store refuses the scripts: {_reason(refused)}") from refused

    def _exchange(
        self, packed: bytes, replies: int, suspects: list[Any], *, again: Callable[[], bytes] | None = None
    ) -> list[Any]:
        """Send and read, again and again until the time is up.

        Connections that may yet execute it end in ``suspects``. ``again`` makes what is sent from the second time on:
        the script's source, for whoever answers late may answer "unknown script" when nobody listens any more.
        """
        self._check_pid()
        end = time.monotonic() + self._timeout
        pause = FIRST_PAUSE
        while True:
            try:
                return self._try(packed, replies, suspects)
            except (NoScriptError, NoPermissionError):
                raise
            except _TROUBLE as error:
                self._hang_up()
                left = end - time.monotonic() - pause
                if isinstance(error, AuthenticationError) or left < self.try_timeout(self._timeout):
                    raise LockUnavailable(f"the lock store can't be used: {_reason(error)}") from error
                if again is not None:
                    packed, again = again(), None
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _try(self, packed: bytes, replies: int, suspects: list[Any]) -> list[Any]:
        connection = self._take()
        sent = answered = False
        try:
            connection.send_packed_command([packed], check_health=False)
            sent = True
            answers = [_read(connection) for _ in range(replies)]
            answered = True
        finally:
            if answered:
                self._idle.append((connection, time.monotonic()))
            elif sent:
                suspects.append(connection)
            else:
                self._put_away(connection)
        for answer in answers:
            if isinstance(answer, ResponseError) and not _is_foreign(answer):
                if not isinstance(answer, NoScriptError):
                    connection.disconnect()  # READONLY and its like: the next try may meet another server
                raise answer
        return answers

    def _abandon(self, suspects: list[Any], lease: Lease) -> None:
        """Send a compare-and-delete behind whatever a connection may still execute, and hang up."""
        packed = RELEASE.pack([lease.key], [lease.token, 0, ""], full=True)
        for connection in suspects:
            try:
                connection.send_packed_command([packed], check_health=False)
            except _TROUBLE:
                continue  # it has died by itself; what it carried may still be executed, and ends by its TTL
        self._discard(suspects)

    def _discard(self, suspects: list[Any]) -> None:
        for connection in suspects:
            self._put_away(connection)

    # --- renewals

    def _renew_batch(self, connection: Any, leases: Sequence[Lease], end: float) -> list[Renewal | None]:
        full = self._always_eval
        packed = [_renewal_of(lease, full=full) for lease in leases]
        replies = _pipeline(connection, packed, end)
        missed = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missed:
            first, *rest = missed
            again = [_renewal_of(leases[first], full=True), *(packed[n] for n in rest)]
            for n, reply in zip(missed, _pipeline(connection, again, end), strict=True):
                replies[n] = reply
        if not full and all(isinstance(reply, NoPermissionError) for reply in replies):
            self._always_eval = True  # from the next round on
        if any(isinstance(reply, ResponseError) for reply in replies):
            connection.disconnect()  # READONLY and its like: the next round may meet another server
        return [_renewal(reply) for reply in replies]

    # --- connections

    def _take(self) -> Any:
        try:
            connection, since = self._idle.pop()
        except IndexError:
            return self._pool.make_connection()
        if time.monotonic() - since > IDLE and _has_news(connection):
            connection.disconnect()  # nobody could tell whether what is sent on it now was executed
        return connection

    def _put_away(self, connection: Any) -> None:
        connection.disconnect()
        self._idle.appendleft((connection, inf))

    def _hang_up(self) -> None:
        """Close the idle connections: where one has failed, the others have most likely died of the same."""
        for _ in range(len(self._idle)):
            try:
                connection, _since = self._idle.pop()
            except IndexError:
                break
            self._put_away(connection)

    def _check_pid(self) -> None:
        if self._pid != os.getpid():
            # the parent's sockets must not be used here; dropping them closes only this process's copies
            self._pid = os.getpid()
            self._idle, self._keepers = deque(), None
            self._pool.reset()


def _has_news(connection: Any) -> bool:
    """Tell whether an idle connection has something to read: nothing but its end, for no reply is outstanding."""
    try:
        return bool(connection.can_read(timeout=0))
    except _TROUBLE:
        return True


def _read(connection: Any) -> Any:
    try:
        return connection.read_response(disable_decoding=True, disconnect_on_error=False)
    except ResponseError as error:
        return error


def _is_foreign(error: ResponseError) -> bool:
    """Tell whether a key holds something else than a string: somebody else's, a holder like any other."""
    return str(error).startswith("WRONGTYPE")


def _pipeline(connection: Any, packed: list[bytes], end: float) -> list[Any]:
    connection.send_packed_command([b"".join(packed)], check_health=False)
    replies = []
    for _ in packed:
        if not connection.can_read(timeout=max(0.0, end - time.monotonic())):
            raise RedisTimeoutError("renewals were not answered in time")
        replies.append(_read(connection))
    return replies


def _renewal_of(lease: Lease, *, full: bool) -> bytes:
    return RENEW.pack([lease.key], [lease.token, _milliseconds(lease.ttl)], full=full)


def _renewal(reply: Any) -> Renewal | None:
    if isinstance(reply, ResponseError):
        return None
    if reply[0] == 1:
        return Renewal(held=True)
    return Renewal(False, _holder(reply[1]) if len(reply) > 1 else None)


def _remaining(pttl: int) -> float:
    """PTTL in s; a foreign value without any TTL (-1) may stay for ever."""
    return inf if pttl == -1 else max(0, pttl) / 1000


def _reason(error: BaseException) -> str:
    """One line without anything of the URL but host and port, which redis-py puts there itself."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
