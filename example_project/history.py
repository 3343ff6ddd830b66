"""What an event log tells, put together: the calls that were sent, and what became of each."""

import json
from dataclasses import dataclass, field

SKIPPED = {"skip", "ignore"}
REFUSED = {"raise", "wait"}  # ended with LockConflict
WAITING = {"retry", "come_back"}


@dataclass
class Call:
    task: str
    key: str | None
    label: str
    sent: float


@dataclass
class Run:
    task: str
    key: str | None
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
    skipped: dict[str, str] = field(default_factory=dict)  # task id -> key
    refused: dict[str, str] = field(default_factory=dict)
    waits: list[tuple[str, str]] = field(default_factory=list)  # (task id, key), once for each time it came back
    schedules: dict[str, float] = field(default_factory=dict)  # task -> period
    trouble: list[str] = field(default_factory=list)  # leases lost, store not reached
    workers: list[str] = field(default_factory=list)
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
        return list(self._open.values())

    def finished(self):
        """Ids of the calls that have run to an end."""
        return {run.task_id for run in self.runs if run.end is not None}

    def unsettled(self):
        """Ids of the calls of which nothing has come yet."""
        return self.calls.keys() - self.finished() - self.skipped.keys() - self.refused.keys()

    def add(self, record):
        handler = getattr(self, f"_{record['event']}", None)
        if handler is not None:
            handler(record)
        elif record["event"].startswith("lock_"):
            self.trouble.append(f"{record['event']}: {record['task']} {record['key']}")

    # --- one for each event

    def _sent(self, record):
        call = Call(record["task"], record["key"], record["label"] or _short(record["task"]), record["mono"])
        self.calls.setdefault(record["task_id"], call)

    def _start(self, record):
        names = ("task", "key", "task_id", "worker", "pid", "fence")
        run = Run(**{name: record[name] for name in names}, start=record["mono"])
        self.runs.append(run)
        self._open[run.task_id, run.pid] = run

    def _end(self, record):
        run = self._open.pop((record["task_id"], record["pid"]))
        run.end, run.ok, run.entry = record["mono"], record["ok"], record.get("entry")

    def _lock_conflict(self, record):
        policy, task_id, key = record["policy"], record["task_id"], record["key"]
        if policy in SKIPPED:
            self.skipped[task_id] = key
        elif policy in REFUSED:
            self.refused[task_id] = key
        elif policy in WAITING:
            self.waits.append((task_id, key))

    def _schedule(self, record):
        self.schedules[record["task"]] = record["period"]
        self.began = min(self.began or record["mono"], record["mono"])

    def _closing(self, record):
        self.closing = record["mono"]

    def _worker_ready(self, record):
        self.workers.append(record["worker"])


def _short(task):
    return task.rpartition(".")[2]
