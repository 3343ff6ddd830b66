"""One real Celery worker: ``python -m celery -A ... worker`` as a process of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from celery_redislock._guard import GuardedProcess
from tests.local_nodes import app as app_module
from tests.local_nodes.recorder import URL
from tests.local_nodes.waiting import TIMEOUT, wait_until

POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 60.0  # seconds
COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
GRACE = 10.0  # seconds


def worker_command(
    *,
    app: str = "tests.local_nodes.app",
    pool: str | None = None,
    concurrency: int | None = None,
    queues: str | None = None,
    log_level: str = "INFO",
    extra_args: Sequence[str] = (),
) -> list[str]:
    """``celery -A app worker ...`` without a name; no gossip, mingle and heartbeat, for a quick start."""
    command = ["celery", "-A", app, "worker", "-l", log_level]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    for option, value in (("-P", pool), ("-c", concurrency), ("-Q", queues)):
        command += [option, str(value)] if value else []
    return [*command, *extra_args]


class LocalWorker:
    """A worker process that can be stopped, killed, frozen and started again under its old name.

    It has its own process group and dies with the test process. Its log is one file over all its starts; the methods
    that look at it see the part since the last start, or "ready." of an earlier run would be taken for this one's.

    command: as worker_command() makes it; ``-n`` is added, unless it is there: ``%h`` in it becomes a unique host.
    name: "w1" (the unique host follows) or "w1@host".
    conf: Celery settings, JSON; conf["include"]: task modules besides tests/local_nodes/tasks.py.
    env: added to the environment of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        conf: Mapping[str, Any],
        log_path: Path,
        name: str = "worker",
        recorder_url: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.host = uuid.uuid4().hex[:12]
        command = [part.replace("%h", self.host) for part in command]
        if command.count("-P") > 1:  # the last one would be used, but the first decides about monkey patching
            raise ValueError(f"more than one pool in {command}: set the fixture worker_pool")
        if "-n" in command:
            self.hostname = command[command.index("-n") + 1]
        else:
            self.hostname = name if "@" in name else f"{name}@{self.host}"
            command += ["-n", self.hostname]
        self.command = [sys.executable, "-m", *command]
        self.conf = dict(conf)
        self.log_path = log_path
        self.env = {
            **os.environ,
            app_module.CONF: json.dumps(self.conf),
            URL: recorder_url,
            "REDISLOCK_TEST_WORKER": self.hostname,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONFAULTHANDLER": "1",
            **(env or {}),
        }
        self._process: GuardedProcess | None = None
        self._log_start = 0

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"pid {self.pid}, exit code {self.exit_code}"
        return f"<LocalWorker {self.hostname}: {state}>"

    # Life

    def start(self, *, wait: bool = True, timeout: float = START_TIMEOUT) -> Self:
        """Start it; ``wait=False``: several workers boot at the same time, and wait_until_ready() follows."""
        if self.running:
            raise RuntimeError(f"{self.hostname} already runs")
        self.log_path.touch()
        self._log_start = self.log_path.stat().st_size
        self._process = GuardedProcess(self.command, log=self.log_path, env=self.env, cwd=ROOT)
        if wait:
            self.wait_until_ready(timeout)
        return self

    def wait_until_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until it consumes its queue."""
        self.wait_for_log(f"{self.hostname} ready.", timeout=timeout)

    def stop(self, timeout: float = TIMEOUT) -> int:
        """Warm shutdown: SIGTERM, and wait until the running tasks have ended. The exit code; TimeoutError."""
        self.send(signal.SIGTERM)
        self.resume()
        return self.wait(timeout)

    def kill(self) -> None:
        """SIGKILL for the main process; returns when it and its pool processes are gone.

        The kernel ends the pool processes of a dead worker (prefork asks it to, on Linux).
        """
        family = self.family()
        self.send(signal.SIGKILL)
        self.wait()
        end_all(family)

    def restart(self, *, kill: bool = False) -> None:
        """stop() or kill(), if it runs, and start it again under the same name."""
        if self.running:
            if kill:
                self.kill()
            else:
                self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze the main process and the pool processes, as a paused virtual machine would be."""
        family = self.family()
        self._send_group(signal.SIGSTOP)
        states = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
        wait_until(lambda: all(is_gone(process) or process.status() in states for process in family), "all stopped")

    def resume(self) -> None:
        """Let a frozen worker go on."""
        self._send_group(signal.SIGCONT)

    def send(self, number: int) -> None:
        """Send the main process a signal, if it runs."""
        if self._process is not None:
            self._process.send(number)

    def _send_group(self, number: int) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait for its end; the exit code, negative for a signal. TimeoutError with the end of its log."""
        if self._process is None:
            raise RuntimeError(f"{self.hostname} was never started")
        try:
            return self._process.wait(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.tail()}") from None

    def close(self) -> None:
        """End it and what it has started, at once: a warm shutdown takes 1.3 s (threads) to 5.5 s (gevent).

        Only where coverage is measured it may end by itself first, for that is when it writes its data.
        """
        if self._process is None:
            return
        family = self.family()
        if not set(COVERAGE).isdisjoint(self.env):
            with contextlib.suppress(TimeoutError):
                self.stop(timeout=GRACE)
        self.send(signal.SIGKILL)
        end_all(family)
        self.wait()

    # What it is

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The worker's main process."""
        if self._process is None:
            raise RuntimeError(f"{self.hostname} was never started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def worker_queue(self) -> str:
        """The (first) queue that it consumes."""
        if "-Q" in self.command:
            return self.command[self.command.index("-Q") + 1].partition(",")[0]
        return str(self.conf.get("task_default_queue", "celery"))

    def family(self) -> list[psutil.Process]:
        """The main process and its descendants, as far as they live."""
        if not self.running:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.pid)
            return [main, *main.children(recursive=True)]
        return []

    def child_pids(self, count: int | None = None) -> list[int]:
        """The pool processes (none but in prefork), oldest first; waits until there are ``count``, if given."""

        def children() -> list[psutil.Process]:
            found = sorted((p for p in self.family()[1:] if not is_gone(p)), key=lambda p: (p.create_time(), p.pid))
            return found if count is None or len(found) >= count else []

        if count is None:
            return [process.pid for process in children()]
        return [process.pid for process in wait_until(children, lambda: f"{count} children of {self}")]

    # What it says

    @property
    def log(self) -> str:
        """All it has said, over all its starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_since_start(self) -> str:
        """What it has said since it was last started."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def tail(self, lines: int = 60) -> str:
        """The end of the log, for error messages."""
        return f"the log of {self.hostname} ends:\n" + "\n".join(self.log.splitlines()[-lines:])

    def wait_for_log(self, what: str | re.Pattern[str], timeout: float = TIMEOUT, *, count: int = 1) -> str:
        """Wait until ``what`` (a text or a pattern) is in the log since the last start, ``count`` times.

        Returns the line with the last of these. AssertionError in the end, or once the worker has ended without.
        """
        pattern = re.compile(re.escape(what)) if isinstance(what, str) else what
        deadline = time.monotonic() + timeout
        while True:
            ended, late = not self.running, time.monotonic() > deadline  # before the look: what it said last counts
            log = self.log_since_start()
            found = list(pattern.finditer(log))
            if len(found) >= count:
                match = found[count - 1]
                end = log.find("\n", match.end())
                return log[log.rfind("\n", 0, match.start()) + 1 : end if end >= 0 else None]
            if ended or late:
                why = f"it ended with code {self.exit_code}" if ended else f"{timeout} s are over"
                raise AssertionError(f"{self.hostname} did not log {pattern.pattern!r} {count} x: {why}; {self.tail()}")
            time.sleep(0.02)

    def assert_log_exists(self, what: str | re.Pattern[str], timeout: float = TIMEOUT) -> None:
        self.wait_for_log(what, timeout)

    def assert_log_does_not_exist(self, what: str | re.Pattern[str], timeout: float = 0.0) -> None:
        """Fail if ``what`` is in the log since the last start, or comes within ``timeout`` seconds."""
        try:
            line = self.wait_for_log(what, timeout)
        except AssertionError:
            return
        raise AssertionError(f"{self.hostname} logged: {line}")


def is_gone(process: psutil.Process) -> bool:
    """Ended, even if nobody has asked for its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_all(processes: Iterable[psutil.Process], grace: float = 2.0) -> None:
    """Wait until the processes are gone; after ``grace`` seconds, help."""
    processes = list(processes)
    deadline = time.monotonic() + grace
    while not all(map(is_gone, processes)):
        if time.monotonic() > deadline:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            wait_until(lambda: all(map(is_gone, processes)), lambda: f"the end of {processes}")
            return
        time.sleep(0.01)
