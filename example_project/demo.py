"""Two workers, two beats and impatient users for 15 seconds, on a server of its own: ``python -m example_project.demo``.

Exit code 0 if the event log proves that nothing overlapped and nothing was lost, 1 if it does not.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from celery_redislock.testing import EmbeddedServer
from example_project.history import History
from example_project.processes import EndedByItselfError, Processes
from example_project.verify import verify
from example_project.view import View

CELERY = ("celery", "-A", "example_project.app")
WORKERS = ("worker1", "worker2")
BEATS = ("beat1", "beat2")
PATIENCE = 60  # seconds for the workers to start, and for the last calls to run


class Demo:
    """Starts the processes, and follows their event log: the only thing that it knows of them."""

    def __init__(self, logs, locks, view):
        self.history = History()
        self._logs = logs
        self._locks = locks
        self._view = view
        self._log_path = logs / "events.jsonl"
        self._log_path.write_text("")
        self._rest = ""

    def run(self, seconds):
        with self._log_path.open() as self._log:
            with EmbeddedServer() as server, Processes(self._logs, self._environment(server)) as self._processes:
                self._run(seconds)
            self._read()
        return verify(self.history)

    def _run(self, seconds):
        start = self._processes.start
        for name in WORKERS:
            options = ("-P", "prefork", "-c", "4", "-n", f"{name}@demo", "-l", "INFO")
            start(name, *CELERY, "worker", *options, "--without-mingle", "--without-gossip")
        if not self._watch("starting", lambda: len(self.history.workers) == len(WORKERS), PATIENCE):
            raise EndedByItselfError(f"the workers are not ready after {PATIENCE} s: see {self._logs}")
        for name in BEATS:
            start(name, *CELERY, "beat", "-s", str(self._logs / f"{name}.schedule"), "--pidfile=")
        start("users", "example_project.load", str(seconds), may_end=True)
        self._watch("running", lambda: self._processes.has_ended("users"))
        self._processes.end(*BEATS)
        self._watch("settling", lambda: not self.history.unsettled(), PATIENCE)  # what is left then counts as lost

    def _environment(self, server):
        env = {"EXAMPLE_REDIS_URL": server.url, "EXAMPLE_EVENT_LOG": str(self._log_path)}
        return env if self._locks else {**env, "EXAMPLE_WITHOUT_LOCKS": "1"}

    def _watch(self, phase, done, timeout=float("inf")):
        """Follow the log until ``done()``; False if that takes too long."""
        end = time.monotonic() + timeout
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
            self._processes.check()
            self._read()
            self._view.update(self.history, phase)
        return True

    def _read(self):
        *lines, self._rest = (self._rest + self._log.read()).split("\n")  # the last line may not be complete yet
        for line in lines:
            self.history.add(json.loads(line))


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15, help="how long the users click (default: 15)")
    parser.add_argument("--without-locks", action="store_true", help="see what happens without celery-redislock")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the event log and the processes' logs there")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    console, locks = Console(), not options.without_locks
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    logs = (options.logs or Path(tempfile.mkdtemp(prefix="redislock-demo-"))).absolute()
    keep = True
    try:
        with View(console) as view:
            demo = Demo(logs, locks, view)
            report = demo.run(options.seconds)
        view.close(demo.history, report, locks)
        keep = bool(options.logs) or (locks and not report.ok)
        code = 0 if report.ok else 1
    except EndedByItselfError as error:
        print(error)
        code = 1
    except KeyboardInterrupt:
        print("interrupted: all processes have been ended")
        code, keep = 130, bool(options.logs)
    finally:
        if keep:
            print(f"Logs: {logs}")
        else:
            shutil.rmtree(logs, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
