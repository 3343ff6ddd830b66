"""Threads and locks of the operating system, also where gevent or eventlet have replaced Python's.

A keeper that ran as a greenlet would miss its beat whenever a task kept the hub busy (measured: 3.1 s of silence
behind 3 s of pure Python; 0.1 s with a native thread). redis-py's sockets work in such a thread: gevent and eventlet
give each native thread a hub of its own, as long as a socket stays in the thread that opened it.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["WakeUp", "start_thread"]


def _original(name: str) -> Any:
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None:
        return gevent.get_original("_thread", name)
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None:
        return getattr(eventlet.original("_thread"), name)
    return getattr(_thread, name)


def start_thread(target: Callable[[], None]) -> None:
    """Start ``target`` in a native daemon thread, which tracers see as they see Python's own."""

    def run() -> None:
        if (trace := threading.gettrace()) is not None:
            sys.settrace(trace)
        target()

    _original("start_new_thread")(run, ())


class WakeUp:
    """A bell that a native thread sleeps by and anybody may ring: ringing twice is ringing once, and never blocks."""

    def __init__(self) -> None:
        self._lock = _original("allocate_lock")()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the sleeper, or keep it from falling asleep."""
        with suppress(RuntimeError):  # rung already
            self._lock.release()

    def sleep(self, seconds: float) -> None:
        """Sleep until rung, at most ``seconds`` (inf: without end)."""
        if seconds > 0:
            self._lock.acquire(True, -1 if seconds > _thread.TIMEOUT_MAX else seconds)
        else:
            self._lock.acquire(False)

    def drain(self) -> None:
        """Nothing comes in by a bell (see `celery_redislock.keeper.channel.Gateway`)."""
