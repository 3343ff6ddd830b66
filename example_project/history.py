"""What an event log tells, put together: the calls that were sent, and what became of each."""

import json
from dataclasses import dataclass, field

SKIPPED = {"skip", "ignore"}
REFUSED = {"raise", "wait"}  # ended with LockConflict
WAITING = {"retry", "come_back"}


@dataclass
class Call:
    task: str
    what: str
    sent: float


@dataclass
class Run:
    what: str
    alone: bool  # whether no other run of the same may be there
    task_id: str
    worker: str
    pid: int
    fence: int | None
    start: float
    end: float | None = None
    ok: bool = False
    entry: int | None = None


@dataclass
class History:
    calls: dict[str, Call] = field(default_factory=dict)  # by task id; a copy that is published again is no new call
    runs: list[Run] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)  # task ids
    refused: set[str] = field(default_factory=set)
    waits: list[str] = field(default_factory=list)  # task ids, once for each time that a call was put off
    schedules: dict[str, float] = field(default_factory=dict)  # task -> period
    trouble: list[str] = field(default_factory=list)  # leases lost, store not reached
    workers: set[str] = field(default_factory=set)
    beats: set[int] = field(default_factory=set)  # pids
    began: float | None = None
    closing: float | None = None
    _open: dict[tuple[str, int], Run] = field(default_factory=dict)

    @classmethod
    def read(cls, path):
        history = cls()
        with path.open() as log:
            for line in log:
                history.add(json.loads(line))
        return history

    @property
    def running(self):
        finished = self.finished()  # also by another run, after the process of the first one has died
        return [run for run in self._open.values() if run.task_id not in finished]

    def finished(self):
        """Ids of the calls that have run to an end."""
        return {run.task_id for run in self.runs if run.end is not None}

    def unsettled(self):
        """Ids of the calls of which nothing has come yet."""
        return self.calls.keys() - self.finished() - self.skipped - self.refused

    def add(self, record):
        handler = getattr(self, f"_{record['event']}", None)
        if handler is not None:
            handler(record)
        elif record["event"].startswith("lock_"):
            self.trouble.append(f"{record['event']}: {record['task']} {record['key']}")

    # --- one for each event

    def _sent(self, record):
        self.calls.setdefault(record["task_id"], Call(record["task"], record["what"], record["mono"]))

    def _start(self, record):
        names = ("what", "alone", "task_id", "worker", "pid", "fence")
        run = Run(**{name: record[name] for name in names}, start=record["mono"])
        self.runs.append(run)
        self._open[run.task_id, run.pid] = run

    def _end(self, record):
        run = self._open.pop((record["task_id"], record["pid"]))
        run.end, run.ok, run.entry = record["mono"], record["ok"], record.get("entry")

    def _lock_conflict(self, record):
        policy, task_id = record["policy"], record["task_id"]
        if policy in SKIPPED:
            self.skipped.add(task_id)
        elif policy in REFUSED:
            self.refused.add(task_id)
        elif policy in WAITING:
            self.waits.append(task_id)

    def _schedule(self, record):
        self.beats.add(record["pid"])
        self.schedules[record["task"]] = record["period"]
        self.began = min(self.began or record["mono"], record["mono"])

    def _closing(self, record):
        self.closing = record["mono"]

    def _worker_ready(self, record):
        self.workers.add(record["worker"])
