"""The application's own log of what was sent, ran and was skipped: one JSON object per line, from every process.

`recorded` is used by the task bodies; the rest are receivers of signals. The log knows nothing of what the locks look
like in Redis, so `verify` proves something. ``mono`` is one clock for all processes of one machine, not of several.
"""

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from celery import current_app
from celery.signals import after_task_publish, beat_init, worker_ready

from celery_redislock import current_lock, signals

PATH = Path(os.environ.get("EXAMPLE_EVENT_LOG", "events.jsonl"))


def write(event, **fields):
    record = {"event": event, "mono": time.monotonic(), "wall": time.time(), "pid": os.getpid(), **fields}
    with PATH.open("a") as log:  # one small write in append mode: lines of several processes never mix
        log.write(json.dumps(record, default=str) + "\n")


@dataclass
class Run:
    fence: int | None
    facts: dict = field(default_factory=dict)


@contextmanager
def recorded(task):
    """Write the start and the end of the run; what the body puts into ``facts`` is written with the end."""
    lock, request = current_lock(), task.request
    run = Run(fence=lock.fence if lock else None)
    about = {"task": task.name, "task_id": request.id, "key": lock_key(task.name, request.args, request.kwargs)}
    write("start", **about, worker=request.hostname, fence=run.fence)
    ok = False
    try:
        yield run
        ok = True
    finally:
        write("end", **about, ok=ok, **run.facts)


def lock_key(task_name, args, kwargs):
    """The key of a call, also where no lock is taken; None for a task that never takes one."""
    task = current_app.tasks[task_name]
    return task.lock_key_for(*args, **kwargs) if hasattr(task, "lock_key_for") else None


def call_is_sent(task_name, task_id, key=None, label=None):
    write("sent", task=task_name, task_id=task_id, key=key, label=label)


@after_task_publish.connect
def _published(sender, headers, body, **_):
    args, kwargs, _canvas = body
    label = " ".join([sender.rpartition(".")[2], *(str(arg) for arg in args if isinstance(arg, int))])
    call_is_sent(sender, headers["id"], lock_key(sender, args, kwargs), label)


@worker_ready.connect
def _worker_is_ready(sender, **_):
    write("worker_ready", worker=sender.hostname)


@beat_init.connect
def _beat_begins(sender, **_):
    for entry in sender.app.conf.beat_schedule.values():
        write("schedule", task=entry["task"], period=entry["schedule"])


def _lock_event(sender, signal, **fields):
    write(signal.name, **fields)


for _signal in (signals.lock_conflict, signals.lock_lost, signals.lock_renewal_late, signals.lock_unavailable):
    _signal.connect(_lock_event)
