"""Two workers, two beats and impatient users, on a server of its own: ``python -m example_project.demo``.

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
from example_project.processes import ProcessError, Processes
from example_project.verify import verify
from example_project.view import View

CELERY = ("celery", "-A", "example_project.app")
WORKERS = ("worker1", "worker2")
BEATS = ("beat1", "beat2")
PATIENCE = 30  # seconds without any news, after which it does not wait any longer


class Demo:
    """Starts the processes, and follows their event log: the only thing that it knows of them."""

    def __init__(self, logs, scratch, locks, view):
        self.history = History()
        self._logs = logs
        self._scratch = scratch
        self._locks = locks
        self._view = view
        self._log_path = logs / "events.jsonl"
        self._log_path.write_text("")
        self._rest = ""

    def run(self, seconds):
        with self._log_path.open() as self._log:
            with EmbeddedServer() as server, self._make_processes(server) as self._processes:
                self._run(seconds)
            self._read()
        return verify(self.history)

    def _run(self, seconds):
        start = self._processes.start
        for name in WORKERS:
            options = ("-P", "prefork", "-c", "4", "-n", f"{name}@demo", "-l", "INFO")
            start(name, *CELERY, "worker", *options, "--without-mingle", "--without-gossip")
        self._wait_for("workers", lambda: len(self.history.workers) == len(WORKERS))
        for number, name in enumerate(BEATS, 1):  # one by one: on two machines they would be out of step, too
            start(name, *CELERY, "beat", "-s", str(self._scratch / f"{name}.schedule"), "--pidfile=")
            self._wait_for("beats", lambda number=number: len(self.history.beats) == number)
        start("users", "example_project.load", str(seconds), may_end=True)
        self._watch("running", lambda: self._processes.has_ended("users"))
        self._processes.end(*BEATS)
        self._watch("settling", lambda: not self.history.unsettled())  # what is left then counts as lost

    def _make_processes(self, server):
        env = {"EXAMPLE_REDIS_URL": server.url, "EXAMPLE_EVENT_LOG": str(self._log_path)}
        if not self._locks:
            env["EXAMPLE_WITHOUT_LOCKS"] = "1"
        return Processes(self._logs, self._scratch, env)

    def _wait_for(self, who, started):
        if not self._watch("starting", started):
            raise ProcessError(f"the {who} have not started within {PATIENCE} s: see {self._logs}")

    def _watch(self, phase, done):
        """Follow the log until ``done()``; False if nothing new is written to it for too long."""
        last_news = time.monotonic()
        while not done():
            if time.monotonic() - last_news > PATIENCE:
                return False
            time.sleep(0.1)
            self._processes.check()
            if self._read():
                last_news = time.monotonic()
            self._view.update(self.history, phase)
        return True

    def _read(self):
        """Take in what is new in the log; whether there was anything."""
        *lines, self._rest = (self._rest + self._log.read()).split("\n")  # the last line may not be complete yet
        for line in lines:
            self.history.add(json.loads(line))
        return bool(lines)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, help="how long the users click (default: 15; without locks: 5)")
    parser.add_argument("--without-locks", action="store_true", help="see what happens without celery-redislock")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the event log and the processes' logs there")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 5 if options.without_locks else 15  # without, all the duplicates have to be worked off
    return options


def main(arguments=None):
    options = parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # the same as Ctrl-C
    scratch = Path(tempfile.mkdtemp(prefix="redislock-demo-"))
    logs = (options.logs or scratch).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    locks, console, keep = not options.without_locks, Console(), False
    try:
        with View(console) as view:
            demo = Demo(logs, scratch, locks, view)
            report = demo.run(options.seconds)
        view.close(demo.history, report, locks)
        keep = locks and not report.ok
        return 0 if report.ok else 1
    except KeyboardInterrupt:
        print("interrupted: all processes have been ended")
        return 130
    except BaseException:
        keep = True
        raise
    finally:
        if keep or options.logs:
            print(f"Logs: {logs}")
        if logs != scratch or not keep:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ProcessError as error:
        sys.exit(str(error))
