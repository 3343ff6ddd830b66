"""``python -m tests.stores.interrupting lines|signals URL SOCKET``: a soft limit lands on any line of a lock's code.

``lines`` raises at the first line that runs between take and leave, at the second, and so on, until a run gets through;
``signals`` raises at random moments by a real signal, which also lands while the process waits for a reply. After each:
the key is free, nothing is held, and the next operations get their own replies. A process of its own, for tracing does
not go with measuring coverage, and the signal not with pytest-timeout.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import redis
from celery.exceptions import SoftTimeLimitExceeded

import celery_redislock
from celery_redislock.run import LockRun
from celery_redislock.runtime import Runtime
from celery_redislock.stores.base import LockStore
from celery_redislock.stores.connect import make_store
from tests.local_nodes.waiting import wait_until
from tests.stores.harness import Lock, granted, lock_run, runtime, token

OURS = str(Path(celery_redislock.__file__).parent)
WHERE = (OURS, str(Path(redis.__file__).parent))
TTL = 600.0


def through_the_gate(run: LockRun) -> None:
    """What `Gate.pass_through` does, with a body that does nothing."""
    try:
        try:
            run.take()
        finally:
            run.leave(finished=True)
    except BaseException:
        run.leave(finished=True)
        raise


class Checks:
    """What has to hold after an interruption."""

    def __init__(self, of: Runtime, path: str) -> None:
        self.of = of
        self.client = redis.Redis(unix_socket_path=path)
        self.number = 0
        self.waited = 0

    def __call__(self, lock: Lock) -> None:
        if self.client.exists(lock.key):
            # closed without a word, a connection may still be read by the server when the release has been answered
            self.waited += 1
            wait_until(lambda: not self.client.exists(lock.key), f"{lock.key} to go", timeout=10)
        assert self.of.keeper.holds() == []
        self.number += 1
        other, mine = Lock(f"v1-{self.number}", "proj.next"), token(f"call-{self.number}")
        granted(self.of.store.acquire(other.ask(mine)))
        seen = self.of.store.inspect(other.key)
        assert seen is not None
        assert seen.holder.value == mine.encode(), "a reply that belongs to another command"
        assert self.of.store.inspect(lock.key) is None
        assert self.of.store.release(other.release(mine)).owned


class Line:
    """Raises at the n-th line that runs."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.hit = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(WHERE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.hit = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
                raise SoftTimeLimitExceeded
        return self


def lines(store: LockStore, path: str, prepare: Callable[[], object]) -> None:
    of = runtime(store)
    check = Checks(of, path)
    where: Counter[str] = Counter()
    number, hit = 0, True
    while hit:
        number += 1
        prepare()
        lock, line = Lock(), Line(number)
        run = lock_run(of, lock, ttl=TTL)
        try:
            sys.settrace(line)
            through_the_gate(run)
        except SoftTimeLimitExceeded:
            pass
        finally:
            sys.settrace(None)
        hit = bool(line.hit)
        where[line.hit.partition(":")[0]] += 1
        check(lock)
    print(number - 1, "lines", check.waited, "late", dict(where), file=sys.stderr)
    assert where["redis.py"] > 50
    assert where["run.py"] > 30
    assert where["connection.py"] > 20


def signals(store: LockStore, path: str, wanted: int) -> None:
    of = runtime(store)
    check = Checks(of, path)
    armed = False
    where: Counter[str] = Counter()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            while frame is not None and not frame.f_code.co_filename.startswith(OURS):
                frame = frame.f_back
            where[frame.f_code.co_name if frame else "?"] += 1
            raise SoftTimeLimitExceeded

    signal.signal(signal.SIGALRM, interrupt)
    usual = 0.002
    choice = random.Random(1)
    deadline = time.monotonic() + 60
    while where.total() < wanted and time.monotonic() < deadline:
        lock = Lock()
        run = lock_run(of, lock, ttl=TTL)
        started = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, choice.uniform(1e-5, 1.1 * usual))
            armed = True
            through_the_gate(run)
            armed = False
        except SoftTimeLimitExceeded:
            pass
        else:
            usual = 0.9 * usual + 0.1 * (time.monotonic() - started)
        signal.setitimer(signal.ITIMER_REAL, 0)
        check(lock)
    print(where.total(), "signals", check.waited, "late", dict(where), file=sys.stderr)
    assert where.total() >= wanted


def main(how: str, url: str, path: str) -> None:
    store = make_store(url, {}, 5.0)
    if how == "signals":
        signals(store, path, 250)
        return
    admin = redis.Redis(unix_socket_path=path)

    def the_longest_way() -> None:
        """The connection is to be opened, and the server does not know the scripts."""
        store.close()
        admin.script_flush()

    lines(store, path, the_longest_way)


if __name__ == "__main__":
    main(*sys.argv[1:])
