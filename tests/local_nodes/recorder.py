"""Which task bodies ran, when, and which ran at the same time: a log in Redis that all workers write and tests read.

The log of a key is one Redis stream, so its entries have one order, and the server's clock, whatever worker wrote
them. A body is *running* from its "enter" to its last entry: "leave" if it ended, else the last "beat". So one that was
killed counts up to its death, and one that was frozen is seen to have overlapped as soon as it goes on, with nobody
having to say that either has happened. Bodies that may be killed or frozen therefore beat: ``work()``.

    @shared_task(bind=True, base=SingletonTask)
    def job(self, key, seconds):
        Recorder.from_env().work(key, seconds, self.request.id, self.lock.fence)
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from redis import Redis

from tests.local_nodes.waiting import TIMEOUT, wait_until

URL = "REDISLOCK_TEST_RECORDER"
PREFIX = "recorder:"
BEAT = 0.02  # seconds


@dataclass
class Run:
    """One run of a body. Positions are places in the log of its key; times are seconds of the server's clock."""

    id: str
    task_id: str
    fence: int | None
    worker: str
    pid: int
    entered: float
    first: int
    last: int
    seen: float  # time of its last entry
    outcome: str | None = None  # "ok", or the name of the exception; None = it never left
    notes: list[dict[str, str]] = field(default_factory=list)

    @property
    def left(self) -> bool:
        return self.outcome is not None


class Recorder:
    """Writes in workers (enter, beat, leave; or run, work), reads in tests (runs, max_overlap)."""

    def __init__(self, url: str) -> None:
        self.redis: Any = Redis.from_url(url, decode_responses=True)

    @classmethod
    def from_env(cls) -> Recorder:
        """The recorder of this worker process."""
        return _recorder(os.environ[URL])

    # In the body

    def enter(self, key: str, task_id: str | None, fence: int | None = None) -> str:
        """Say that a body begins; returns the id of the run, for leave() and beat()."""
        run = uuid.uuid4().hex
        self._write(
            key,
            run,
            "enter",
            task_id=task_id or "",
            fence="" if fence is None else fence,
            worker=os.environ.get("REDISLOCK_TEST_WORKER", ""),
            pid=os.getpid(),
        )
        return run

    def leave(self, key: str, run: str, outcome: str = "ok") -> None:
        self._write(key, run, "leave", outcome=outcome)

    def beat(self, key: str, run: str) -> None:
        self._write(key, run, "beat")

    def note(self, key: str, run: str, **what: str | int | float) -> None:
        """Keep something that the test will look at: ``runs(key)[n].notes``."""
        self._write(key, run, "note", **what)

    @contextmanager
    def run(self, key: str, task_id: str | None, fence: int | None = None) -> Iterator[str]:
        """enter() and leave() round a block; its exceptions go on."""
        run = self.enter(key, task_id, fence)
        try:
            yield run
        except BaseException as error:
            self.leave(key, run, type(error).__name__)
            raise
        self.leave(key, run)

    def work(self, key: str, seconds: float, task_id: str | None, fence: int | None = None) -> str:
        """A body that runs for ``seconds`` and beats all the while; returns the id of the run."""
        end = time.monotonic() + seconds
        with self.run(key, task_id, fence) as run:
            while (rest := end - time.monotonic()) > 0:
                time.sleep(min(rest, BEAT))
                self.beat(key, run)
        return run

    def _write(self, key: str, run: str, event: str, **more: str | int | float) -> None:
        self.redis.xadd(PREFIX + key, {**more, "event": event, "run": run})

    # In the test

    def runs(self, key: str) -> list[Run]:
        """The runs so far, in the order in which they began."""
        runs: dict[str, Run] = {}
        for position, (entry, said) in enumerate(self.redis.xrange(PREFIX + key)):
            now, event = int(entry.partition("-")[0]) / 1000, said.pop("event")
            if event == "enter":
                runs[said["run"]] = Run(
                    id=said["run"],
                    task_id=said["task_id"],
                    fence=int(said["fence"]) if said["fence"] else None,
                    worker=said["worker"],
                    pid=int(said["pid"]),
                    entered=now,
                    first=position,
                    last=position,
                    seen=now,
                )
                continue
            run = runs[said.pop("run")]
            run.last, run.seen = position, now
            if event == "leave":
                run.outcome = said["outcome"]
            elif event == "note":
                run.notes.append(said)
        return list(runs.values())

    def max_overlap(self, key: str) -> int:
        """How many bodies ran at once, at most: 1 is mutual exclusion."""
        runs = self.runs(key)
        return max((sum(other.first <= run.first <= other.last for other in runs) for run in runs), default=0)

    def wait_for_runs(self, key: str, count: int, *, left: bool = False, timeout: float = TIMEOUT) -> list[Run]:
        """Wait until at least ``count`` bodies have begun (``left``: have ended)."""

        def there() -> list[Run]:
            runs = self.runs(key)
            return runs if sum(run.left or not left for run in runs) >= count else []

        return wait_until(there, lambda: f"{count} runs of {key}; there are {self.runs(key)}", timeout=timeout)

    def close(self) -> None:
        self.redis.close()


_recorder = cache(Recorder)
