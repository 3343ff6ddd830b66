"""What the store tests share: one view of every store, tokens, and a look over the server's shoulder."""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import redis

from celery_redislock.keys import KeyScheme
from celery_redislock.lease import TOMBSTONE, Acquired, Lease, Token
from celery_redislock.options import LockOptions
from celery_redislock.run import Identity, LockRun
from celery_redislock.runtime import Runtime
from celery_redislock.settings import Settings
from celery_redislock.stores.base import Ask, LockStore, Release
from celery_redislock.stores.connect import make_store
from celery_redislock.stores.memory import MemoryStore
from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.waiting import wait_until

PREFIX = "redislock"
_names = itertools.count()


def token(task_id: str = "call-1", retries: int = 0) -> Token:
    """A fresh token of this process."""
    return Token.new(task_id, retries, "celery@here", os.getpid(), 4711)


class Lock:
    """One lock key and what belongs to it. Each has a name of its own unless told otherwise."""

    def __init__(self, id: str = "v1-0", name: str | None = None) -> None:  # noqa: A002
        self.scheme = KeyScheme(PREFIX, name or f"proj.task{next(_names)}")
        self.key = self.scheme.lock(id)
        self.fence_key = self.scheme.fence

    def ask(self, mine: Token, ttl: float = 30.0, *, done: str | None = None) -> Ask:
        done_key = self.scheme.done(done) if done else None
        return Ask(self.lease(mine, ttl), self.fence_key, mine.tombstone_prefix, done_key)

    def lease(self, mine: Token, ttl: float = 30.0) -> Lease:
        return Lease(self.key, mine.encode(), ttl)

    def release(self, mine: Token, keep: float = 0.0, *, done: str | None = None, done_ttl: float = 0.0) -> Release:
        done_key = self.scheme.done(done) if done else None
        return Release(self.lease(mine), keep, TOMBSTONE + mine.encode(), done_key, done_ttl)


def granted(answer: object) -> Acquired:
    assert isinstance(answer, Acquired), answer
    return answer


class Subject(Protocol):
    """A store under test, and a way behind its back."""

    store: Any
    slack: float
    """By how much a remaining time may be shorter than what was set, s."""

    def now(self) -> float: ...
    def pass_time(self, seconds: float) -> None: ...
    def plant_fence(self, key: str, fence: int) -> None: ...
    def plant(self, key: str, value: bytes, ttl: float | None = None) -> None: ...
    def value(self, key: str) -> bytes | None: ...
    def ttl(self, key: str) -> float: ...
    def delete(self, key: str) -> None: ...
    def flush(self) -> None: ...
    def keys(self) -> list[str]: ...


class MemorySubject:
    """`MemoryStore` with a clock that only the test moves."""

    slack = 1e-6

    def __init__(self) -> None:
        self._now = 1_000.0
        self.store = MemoryStore(clock=self.now)

    def now(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds

    def plant_fence(self, key: str, fence: int) -> None:
        self.store._fences[key] = fence

    def plant(self, key: str, value: bytes, ttl: float | None = None) -> None:
        self.store._values[key] = (value.decode("utf-8", "replace"), math.inf if ttl is None else self._now + ttl)

    def value(self, key: str) -> bytes | None:
        found = self.store._get(key, self._now)
        return None if found is None else found.encode()

    def ttl(self, key: str) -> float:
        return self.store._values[key][1] - self._now

    def delete(self, key: str) -> None:
        self.store._values.pop(key, None)
        self.store._fences.pop(key, None)

    def flush(self) -> None:
        self.store._values.clear()
        self.store._fences.clear()

    def keys(self) -> list[str]:
        return list(self.store._values)


class ServerSubject:
    """A store on a real server, and a plain client of the same server."""

    slack = 10.0  # a machine that stands still for seconds is no fault of the store

    def __init__(self, url: str, options: dict[str, Any], server: EmbeddedServer) -> None:
        self.url = url
        self.options = options
        self.store = make_store(url, options, 5.0)
        self.server = server
        self.client = redis.Redis(unix_socket_path=str(server.socket_path))

    def close(self) -> None:
        self.store.close()
        self.client.close()

    def now(self) -> float:
        return time.monotonic()

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    def plant_fence(self, key: str, fence: int) -> None:
        self.client.set(key, fence, ex=60)

    def plant(self, key: str, value: bytes, ttl: float | None = None) -> None:
        self.client.set(key, value, px=None if ttl is None else math.ceil(ttl * 1000))

    def value(self, key: str) -> bytes | None:
        return self.client.get(key)

    def ttl(self, key: str) -> float:
        left = self.client.pttl(key)
        return math.inf if left == -1 else max(0, left) / 1000

    def delete(self, key: str) -> None:
        self.client.delete(key)

    def flush(self) -> None:
        self.client.flushall()

    def keys(self) -> list[str]:
        return [key.decode() for key in self.client.scan_iter()]


class Executed(NamedTuple):
    """A command that a server has executed.

    Attributes:
        at: When, s by the server's clock.
        origin: The client's address, or "lua": from inside a script.
        words: The command and its arguments.
    """

    at: float
    origin: str
    words: list[str]


class Monitor:
    """What a server executes, by MONITOR."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(30)
        self._socket.connect(str(path))
        self._socket.sendall(b"MONITOR\r\n")
        self._lines = self._socket.makefile("rb")
        assert self._lines.readline() == b"+OK\r\n"

    def commands(self, about: str) -> list[Executed]:
        """All since the last call, up to now, that have a word which contains ``about``."""
        mark = f"mark-{time.monotonic_ns()}"
        with redis.Redis(unix_socket_path=str(self._path)) as client:
            client.echo(mark)
        found = []
        for line in iter(self._lines.readline, b""):
            text = line.decode("utf-8", "replace")
            if mark in text:
                return found
            where, _, rest = text.partition("] ")
            words = [word.strip('"') for word in rest.strip().split('" "')]
            if any(about in word for word in words[1:]):
                found.append(Executed(float(where[1:].partition(" ")[0]), where.rpartition(" ")[2], words))
        raise AssertionError("the server has closed the MONITOR connection")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def monitor(server: EmbeddedServer) -> Iterator[Monitor]:
    watch = Monitor(server.socket_path)
    try:
        yield watch
    finally:
        watch.close()


def clients(server: EmbeddedServer) -> int:
    """How many connections the server has, the one that asks not counted."""
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        return int(client.info("clients")["connected_clients"]) - 1


def in_threads(count: int, work: Callable[[int], None], timeout: float = 60.0) -> None:
    """Run ``work(0)`` to ``work(count - 1)`` at the same time; the first error is raised here."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "still at it"
    if errors:
        raise errors[0]


def runtime(store: LockStore, timeout: float = 5.0) -> Runtime:
    """A runtime round a store, without a Celery app."""
    settings = Settings.read({"redislock_url": "redis://unused", "redislock_timeout": timeout})
    return Runtime(settings, store)


def lock_run(of: Runtime, lock: Lock, task_id: str = "call-1", **options: Any) -> LockRun:
    """One call's way through the lock, as the gate goes it."""
    resolved = LockOptions.resolve("proj.task", call=options or None)
    return LockRun(of, "proj.task", resolved, lock.scheme, lock.key, Identity(task_id, 0, "celery@here"))


def gone(server: EmbeddedServer, key: str) -> None:
    """Wait until the key is gone."""
    wait_until(lambda: server.command("EXISTS", key) == b"0", f"{key} to go")
