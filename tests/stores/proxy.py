"""A TCP proxy between store and server that loses, delays and cuts at the command of your choice.

Each connection is served in lockstep: one command from the client, its whole reply from the server. Leaving the block
fails if a fault was not consumed: a test whose fault never happened has shown nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import sha1
from importlib.resources import files
from types import TracebackType
from typing import BinaryIO, Self

from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.waiting import wait_until

PATIENCE = 60.0
SCRIPTS: dict[str, str] = {}
"""The scripts' names, by their source and by its hash."""
for _name in ("acquire", "renew", "release"):
    _source = (files("celery_redislock.stores") / "lua" / f"{_name}.lua").read_bytes()
    SCRIPTS[_source.decode()] = SCRIPTS[sha1(_source, usedforsecurity=False).hexdigest()] = _name


def role(words: list[str]) -> str:
    """The name of the script that is called, however it is called, else the command itself."""
    name = words[0].upper()
    return SCRIPTS[words[1]] if name in {"EVAL", "EVALSHA"} else name


class Action(Enum):
    """What happens to a command."""

    DROP_REPLY = auto()
    """Executed; the reply is lost, and the connection stays open."""
    CUT_BEFORE = auto()
    """Not executed; the connection is closed."""
    CUT_AFTER = auto()
    """Executed; the connection is closed instead of a reply."""
    DELAY_REPLY = auto()
    """Executed; the reply waits for `Fault.let_go`."""
    HOLD = auto()
    """It, and what the client sends behind it, waits for `Fault.let_go`, also when the client has hung up since."""
    GARBAGE = auto()
    """Not executed; something that is no Redis reply comes back, and the connection is closed."""


DROP_REPLY, CUT_BEFORE, CUT_AFTER, DELAY_REPLY, HOLD, GARBAGE = Action


@dataclass(frozen=True)
class Seen:
    """A command that has come to the proxy.

    Attributes:
        connection: Number of the client's connection.
        words: The command and its arguments.
        at: Monotonic time when it came.
    """

    connection: int
    words: list[str]
    at: float


@dataclass
class Fault:
    """One thing that goes wrong, ``times`` times (0: always), from the ``first`` matching command on."""

    name: str
    action: Action
    first: int
    times: int
    about: str
    garbage: bytes = b""
    matched: int = 0
    consumed: int = 0
    served: int = 0
    """How many of the consumed commands have been dealt with to their end."""
    gate: threading.Event = field(default_factory=threading.Event)

    def let_go(self) -> None:
        """End a delay or a hold."""
        self.gate.set()

    def takes(self, words: list[str]) -> bool:
        if role(words) != self.name or not any(self.about in word for word in words):
            return False
        self.matched += 1
        if self.matched < self.first or self.consumed >= self.times > 0:
            return False
        self.consumed += 1
        return True


class Proxy:
    """Listens on a port of 127.0.0.1 and forwards to the server's Unix socket."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._open: set[socket.socket] = set()
        self._thawed = threading.Event()
        self._thawed.set()
        self._closed = False
        self.connections = 0
        self.seen: list[Seen] = []

    @property
    def url(self) -> str:
        """Where the store is to connect to."""
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def fault(
        self, name: str, action: Action, *, first: int = 1, times: int = 1, about: str = "", garbage: bytes = b""
    ) -> Fault:
        """Let ``action`` happen to the ``first`` command of this `role` that mentions ``about``, and the next ones."""
        fault = Fault(name, action, first, times, about, garbage)
        with self._lock:
            self._faults.append(fault)
        return fault

    def freeze(self) -> None:
        """Stop forwarding, either way, on all connections; new ones are accepted."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Go on where it stopped."""
        self._thawed.set()

    def cut_all(self) -> None:
        """Close all connections of clients."""
        with self._lock:
            for client in self._open:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def commands(self, name: str, about: str) -> list[Seen]:
        """The commands of this `role`, with a word that contains ``about``, that have come so far."""
        with self._lock:
            named = [seen for seen in self.seen if role(seen.words) == name]
        return [seen for seen in named if any(about in word for word in seen.words)]

    # --- serving

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                number = self.connections
                self._open.add(client)
            threading.Thread(target=self._serve, args=(client, number), daemon=True).start()

    def _serve(self, client: socket.socket, number: int) -> None:
        upstream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with client, upstream, client.makefile("rb") as requests, upstream.makefile("rb") as replies:
                upstream.connect(str(self._server.socket_path))
                while self._forward(client, number, upstream, requests, replies):
                    pass
        except OSError:
            pass  # one of the two has gone
        finally:
            with self._lock:
                self._open.discard(client)

    def _forward(
        self, client: socket.socket, number: int, upstream: socket.socket, requests: BinaryIO, replies: BinaryIO
    ) -> bool:
        """Serve one command; False: the connection is over."""
        raw, words = _request(requests)
        if not raw:
            return False
        with self._lock:
            self.seen.append(Seen(number, words, time.monotonic()))
            fault = next((fault for fault in self._faults if fault.takes(words)), None)
        try:
            return self._treat(fault, client, upstream, raw, replies)
        finally:
            if fault is not None:
                fault.served += 1

    def _treat(
        self, fault: Fault | None, client: socket.socket, upstream: socket.socket, raw: bytes, replies: BinaryIO
    ) -> bool:
        action = fault.action if fault else None
        if action is CUT_BEFORE:
            return False
        if action is GARBAGE:
            client.sendall(fault.garbage)
            return False
        if action is HOLD:
            fault.gate.wait(PATIENCE)
        self._thawed.wait(PATIENCE)
        upstream.sendall(raw)
        reply = _reply(replies)
        self._thawed.wait(PATIENCE)
        if action is CUT_AFTER or not reply:
            return False
        if action is DELAY_REPLY:
            fault.gate.wait(PATIENCE)
        if action is not DROP_REPLY:
            # a client that has hung up may have sent more before it did
            with contextlib.suppress(OSError):
                client.sendall(reply)
        return True

    # --- beginning and end

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def close(self) -> None:
        """End everything that goes on."""
        self._thawed.set()
        for fault in self._faults:
            fault.let_go()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        wait_until(lambda: not self._open, "the proxy's connections to end")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        if error is None:
            left = [fault for fault in self._faults if fault.consumed < max(1, fault.times)]
            assert not left, f"faults that never happened: {left}"


def _request(stream: BinaryIO) -> tuple[bytes, list[str]]:
    head = stream.readline()
    if not head.endswith(b"\r\n"):
        return b"", []
    raw, words = [head], []
    for _ in range(int(head[1:])):
        size = stream.readline()
        word = stream.read(int(size[1:]) + 2)
        raw += [size, word]
        words.append(word[:-2].decode("utf-8", "replace"))
    return b"".join(raw), words


def _reply(stream: BinaryIO) -> bytes:
    """One whole reply, RESP2 or RESP3; empty when the server has hung up."""
    head = stream.readline()
    if not head.endswith(b"\r\n"):
        return b""
    kind, count = head[:1], head[1:-2]
    if kind in b"$!=" and count != b"-1":
        return head + stream.read(int(count) + 2)
    if kind in b"*~>" and count != b"-1":
        return head + b"".join(_reply(stream) for _ in range(int(count)))
    if kind in b"%":
        return head + b"".join(_reply(stream) for _ in range(2 * int(count)))
    return head
