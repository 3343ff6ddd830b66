"""The demo's child processes: each has a log, and none outlives the demo, whatever becomes of it."""

import contextlib
import os
import signal
import sys
from pathlib import Path

from celery_redislock._guard import GuardedProcess  # this repository's own, not a public name

ROOT = Path(__file__).parents[1]
PATIENCE = 15  # seconds for a warm shutdown


class ProcessError(Exception):
    """A child process that should run does not."""


class Processes:
    """Use it in a ``with`` block: it ends in order, or at once if an exception (Ctrl-C is one) leaves the block.

    logs: the directory for their logs. scratch: one for their temporary files, deleted should the demo be killed.
    """

    def __init__(self, logs, scratch, env):
        self._logs = logs
        self._scratch = scratch
        self._env = {**os.environ, "TMPDIR": str(scratch), **env}
        self._running = {}
        self._may_end = set()

    def start(self, name, *arguments, may_end=False):
        """Start ``python -m ARGUMENTS``; what it says goes into NAME.log."""
        if may_end:
            self._may_end.add(name)
        command = [sys.executable, "-m", *arguments]
        log = self._logs / f"{name}.log"
        self._running[name] = GuardedProcess(command, log=log, env=self._env, cwd=ROOT, clean_up=self._scratch)

    def check(self):
        for name, process in self._running.items():
            code = process.poll()
            if code is not None and not (code == 0 and name in self._may_end):
                raise ProcessError(f"{name} ended with code {code}: see {self._logs / name}.log")

    def has_ended(self, name):
        return self._running[name].poll() == 0

    def end(self, *names):
        """Ask them to end, and wait for that."""
        ending = [self._running.pop(name) for name in names]
        for process in ending:
            process.send(signal.SIGTERM)
        for process in ending:
            with contextlib.suppress(TimeoutError):
                process.wait(PATIENCE)
            _kill(process)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.end(*self._running)
        for process in self._running.values():
            _kill(process)


def _kill(process):
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # each leads a group: a worker's pool processes die with it
        process.wait(PATIENCE)
