"""Prefork: the leases of the pool's children are kept alive by the worker's main process.

A child that holds the GIL for seconds misses no renewal, and a child that dies has its leases released at once.

::

    child                                       main process
    hold, drop   -- {"held": ...}, {"dropped"}-->   table of its Keeper
    its holds   <-- {"renewed"}, {"lost"}, ... --   answers of the store

There is no file and no address: main makes a pair of sockets before it forks, and each child sends one end of a pair of
its own through it. Whoever has not been forked by main cannot come in.

An end of file is news of a death, not a proof: main asks the kernel whether the child is dead (a zombie is), and looks
each 0.2 s as well, for a grandchild may keep a socket open. Nothing is released before the death.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from math import ceil, inf
from pathlib import Path
from typing import Any, Final

from celery_redislock.keeper.native import start_thread
from celery_redislock.keeper.plan import Change, Hold, Loss
from celery_redislock.lease import Lease, Renewal
from celery_redislock.stores.base import Release

__all__ = ["ChildKeeper", "Gateway", "Remote", "is_dead", "process_start"]

logger = logging.getLogger(__name__)

WATCH: Final = 0.2
"""How often main looks whether children that hold leases are alive, s."""
SEND_TIMEOUT: Final = 1.0
"""How long a child waits for main to read, s, before it looks after its leases itself."""
CHUNK: Final = 65536


def process_start(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; 0 where the system does not tell; None: it is dead.

    A zombie is dead: it executes nothing any more.
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return 0
        return 0
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat[0] in "ZXx" else int(stat[19])  # state, and field 22 of proc(5), counted behind the name


def is_dead(pid: int, start: int) -> bool:
    """Tell whether the process that was started then is dead, be its number in use again or not."""
    now = process_start(pid)
    return now is None or (start != 0 and now not in (0, start))


def _milliseconds(seconds: float) -> int:
    return max(0, ceil(seconds * 1000))


def _lines(buffer: bytearray) -> Iterator[dict[str, Any]]:
    """Take the whole messages out of a buffer."""
    *whole, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    for line in whole:
        yield json.loads(line)


class _Child:
    """A pool process as main sees it."""

    __slots__ = ("buffer", "holds", "pid", "sock", "start")

    def __init__(self, sock: socket.socket, pid: int, start: int) -> None:
        self.sock: socket.socket | None = sock
        self.pid = pid
        self.start = start
        self.buffer = bytearray()
        self.holds: dict[str, Hold] = {}

    def tell(self, message: dict[str, Any]) -> None:
        """Send; a child that does not read is not waited for: it steps down by its own clock."""
        if self.sock is None:
            return
        with suppress(OSError):
            self.sock.send(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)


class Remote:
    """Owner of a child's hold in main's table.

    Attributes:
        child: The process that holds it.
        about: Fields of its events.
        fence: Fencing token.
    """

    __slots__ = ("about", "child", "fence")

    def __init__(self, child: _Child, about: dict[str, str], fence: int) -> None:
        self.child = child
        self.about = about
        self.fence = fence

    def answered(self, hold: Hold, answer: Renewal | None) -> None:
        """Tell the child until when its lease is certain, or that the store could not be asked."""
        if answer is None:
            self.child.tell({"token": hold.lease.token, "unanswered": True})
        elif answer.held:
            self.child.tell({"token": hold.lease.token, "deadline": hold.deadline})

    def changed(self, hold: Hold, change: Change) -> None:
        """Tell the child what has become of its lease; it tells the listeners."""
        if change.loss is not None:  # otherwise the answer has told it
            self.child.tell({"token": hold.lease.token, "lost": change.loss, "final": hold.final})


class Gateway:
    """Main's side. It stands in for the keeper's bell: the keeper sleeps in it, and is woken by messages, too.

    Args:
        hold: Called with each hold that a child announces.
        drop: Called with each hold that a child gives up, or has left behind.
        orphaned: Called with each hold whose process is dead; its lease is to be released.
        release_later: Called with what a child could not release, and until when that matters.
    """

    def __init__(
        self,
        hold: Callable[[Hold], None],
        drop: Callable[[Hold], None],
        orphaned: Callable[[Hold], None],
        release_later: Callable[[Release, float], None],
    ) -> None:
        self._hold, self._drop, self._orphaned, self._release_later = hold, drop, orphaned, release_later
        self._door, self.entrance = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell_in, self._bell_out = socket.socketpair()
        for sock in (self._door, self._bell_in, self._bell_out):
            sock.setblocking(False)
        self._children: dict[int, _Child] = {}  # by file descriptor of the socket, or minus the pid without one
        self._looked = 0.0
        self.pid = os.getpid()

    # --- the bell

    def ring(self) -> None:
        """Wake the keeper."""
        with suppress(OSError):  # full: it is awake
            self._bell_out.send(b"!")

    def sleep(self, seconds: float) -> None:
        """Sleep until rung, until a child says something or dies, at most ``seconds``."""
        if any(child.holds for child in self._children.values()):
            seconds = min(seconds, WATCH)
        poll = select.poll()
        for fd in (self._door.fileno(), self._bell_in.fileno(), *(fd for fd in self._children if fd >= 0)):
            poll.register(fd, select.POLLIN)
        poll.poll(None if seconds == inf else _milliseconds(seconds))
        self.drain()

    def drain(self) -> None:
        """Take in all that the children have said, and look whether they are alive."""
        with suppress(BlockingIOError):
            while self._bell_in.recv(CHUNK):
                pass
        self._let_in()
        for child in list(self._children.values()):
            self._listen(child)
        if time.monotonic() - self._looked >= WATCH:
            self._look_after_the_dead()

    # --- children

    def _let_in(self) -> None:
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._door, CHUNK, 1)
            except BlockingIOError:
                return
            hello = json.loads(message)
            sock = socket.socket(fileno=fds[0])
            sock.setblocking(False)
            self._children[sock.fileno()] = _Child(sock, hello["pid"], hello["start"])

    def _listen(self, child: _Child) -> None:
        while child.sock is not None:
            try:
                data = child.sock.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up(child)
                self._look_after_the_dead()
                return
            child.buffer += data
            for message in _lines(child.buffer):
                self._take(child, message)

    def _take(self, child: _Child, message: dict[str, Any]) -> None:
        if token := message.get("dropped"):
            if hold := child.holds.pop(token, None):
                self._drop(hold)
            return
        if release := message.get("release"):
            self._release_later(Release(**{**release, "lease": Lease(**release["lease"])}), message["until"])
            return
        held = message["held"]
        lease = Lease(held["key"], held["token"], held["ttl"])
        owner = Remote(child, held["about"], held["fence"])
        hold = Hold(lease, owner, sent=held["sent"], renew=held["renew"], max_hold=held["max_hold"])
        child.holds[lease.token] = hold
        self._hold(hold)

    def _hang_up(self, child: _Child) -> None:
        """The socket is closed; the child is looked at until it is dead, for it may live and have leases."""
        assert child.sock is not None
        del self._children[child.sock.fileno()]
        child.sock.close()
        child.sock = None
        if child.holds:
            self._children[-child.pid] = child

    def _look_after_the_dead(self) -> None:
        self._looked = time.monotonic()
        for key, child in list(self._children.items()):
            if not child.holds:
                if key < 0:
                    del self._children[key]
            elif is_dead(child.pid, child.start):
                for hold in child.holds.values():
                    self._drop(hold)
                    self._orphaned(hold)
                child.holds.clear()

    def close_in_child(self) -> None:
        """After a fork: main's ends must not be kept open here, or nobody would see the end of main."""
        for sock in (self._door, self._bell_in, self._bell_out):
            sock.close()
        for child in self._children.values():
            if child.sock is not None:
                child.sock.close()


class ChildKeeper:
    """The child's side: it has the keeper's `hold` and `drop`, and lets main do the renewing.

    A passive thread reads what main says. Should main die, the leases count as lost; should only the channel break, the
    child looks after them itself.

    Args:
        entrance: The door that was made before the fork.
        main: Pid of the main process.
        on_change: Called in the reading thread with a hold and what has become of it.
        alone: Makes a keeper for this process, once main can't be reached.
    """

    def __init__(
        self,
        entrance: socket.socket,
        main: int,
        on_change: Callable[[Hold, Change], None],
        alone: Callable[[], Any],
    ) -> None:
        self._entrance = entrance
        self._main = main
        self._main_start = process_start(main) or 0
        self._on_change = on_change
        self._make_alone = alone
        self._alone: Any = None
        self._holds: dict[str, Hold] = {}
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()

    def holds(self) -> list[Hold]:
        """Return what is held now."""
        return list(self._holds.values())

    def hold(self, hold: Hold) -> None:
        """Have this lease kept alive from now on."""
        self._holds[hold.lease.token] = hold
        if not self._said({"held": _described(hold)}):
            self._alone.hold(hold)

    def drop(self, hold: Hold) -> None:
        """Forget this lease; harmless if it is not held."""
        known = self._holds.pop(hold.lease.token, None)
        if known is not None and not self._said({"dropped": hold.lease.token}):
            self._alone.drop(hold)

    def release_later(self, release: Release, until: float) -> None:
        """See `Keeper.release_later`: main does it, for this process may end first."""
        if not self._said({"release": asdict(release), "until": until}):
            self._alone.release_later(release, until)

    # --- the channel

    def _said(self, message: dict[str, Any]) -> bool:
        """Tell main; False: it can't be told, and this process looks after its leases itself."""
        if self._alone is None:
            try:
                self._send(message)
            except OSError as error:
                self._go_alone(f"{type(error).__name__}: {error}")
        return self._alone is None

    def _send(self, message: dict[str, Any]) -> None:
        sock = self._sock or self._connect()
        # one call for one message, which a soft limit cannot cut in two
        data = json.dumps(message).encode() + b"\n"
        if sock.send(data) < len(data):
            raise BlockingIOError("main does not read")

    def _connect(self) -> socket.socket:
        with self._lock:
            if self._sock is None:
                mine, theirs = socket.socketpair()
                pid = os.getpid()
                hello = json.dumps({"pid": pid, "start": process_start(pid) or 0}).encode()
                socket.send_fds(self._entrance, [hello], [theirs.fileno()])
                theirs.close()
                mine.settimeout(SEND_TIMEOUT)
                self._sock = mine
                start_thread(lambda: self._read(mine))
            return self._sock

    def _read(self, sock: socket.socket) -> None:
        threading.current_thread().name = "redislock-channel"
        buffer = bytearray()
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while self._alone is None:
            asked = time.monotonic()
            deadlines = [hold.deadline for hold in self.holds() if hold.loss is None]
            wait = max(0.0, min(min(deadlines, default=inf) - asked, SEND_TIMEOUT))
            if deadlines:
                wait = min(wait, WATCH)
            if not poll.poll(_milliseconds(wait)):
                # Not "now": a body that holds the GIL may have kept this thread waiting since, and news may have come.
                if any(hold.neglected(asked + wait) for hold in self.holds()):
                    self._go_alone("it has missed a renewal")
                    return
                for hold in self.holds():
                    if self._still_holds(hold):
                        self._tell(hold, hold.check(asked + wait))
                continue
            try:
                data = sock.recv(CHUNK)
            except OSError:
                data = b""
            if not data:
                self._main_is_gone()
                return
            buffer += data
            for message in _lines(buffer):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        hold = self._holds.get(message["token"])
        if hold is None:
            return
        if "unanswered" in message:
            hold.unanswered()
        elif "deadline" in message:
            self._tell(hold, hold.renewed_until(message["deadline"], time.monotonic()))
        else:
            self._tell(hold, hold.lost(Loss(message["lost"]), final=message["final"]))

    def _still_holds(self, hold: Hold) -> bool:
        # looked at before the hold is told, not after: what it has been told, somebody has to hear
        return hold.lease.token in self._holds

    def _tell(self, hold: Hold, change: Change | None) -> None:
        if change is not None:
            self._on_change(hold, change)

    # --- without main

    def _main_is_gone(self) -> None:
        if not is_dead(self._main, self._main_start):
            self._go_alone("the channel was closed")
            return
        for hold in self.holds():
            if self._still_holds(hold):
                self._tell(hold, hold.lost(Loss.ORPHANED, final=True))

    def _go_alone(self, why: str) -> None:
        with self._lock:
            if self._alone is None:
                logger.warning("no channel to the worker's main process (%s): renewing in the child from now on", why)
                self._alone = self._make_alone()  # first: who comes from now on goes to it by himself
                for hold in self.holds():
                    self._alone.hold(hold)
                if self._sock is not None:
                    self._sock.close()


def _described(hold: Hold) -> dict[str, Any]:
    lease, owner = hold.lease, hold.owner
    return {
        "key": lease.key,
        "token": lease.token,
        "ttl": lease.ttl,
        "sent": hold.deadline - lease.ttl,
        "renew": hold.renew,
        "max_hold": hold.max_hold,
        "about": owner.about,
        "fence": owner.fence,
    }
