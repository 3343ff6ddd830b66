"""The application's own log of what was sent, ran and was skipped: one JSON object per line, from every process.

`recorded` is used by the task bodies; the rest are receivers of signals. ``what`` is the application's own name for
what must not run twice at once, such as "sync_account 7": a proof that used the library's lock keys would prove less.
``mono`` is one clock for all processes of one machine, but not of several.
"""

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from celery.signals import after_task_publish, beat_init, worker_ready

from celery_redislock import SingletonTask, current_lock, signals

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
    about = {"task": task.name, "task_id": request.id, "what": what(task.name, request.args, request.kwargs)}
    key, alone = lock.key if lock else None, isinstance(task, SingletonTask)
    write("start", **about, alone=alone, worker=request.hostname, key=key, fence=run.fence)
    ok = False
    try:
        yield run
        ok = True
    finally:
        write("end", **about, ok=ok, **run.facts)


def what(task_name, args, kwargs):
    numbers = [str(value) for value in (*args, *kwargs.values()) if type(value) is int]
    return " ".join([task_name.rpartition(".")[2], *numbers])


def call_is_sent(task_name, task_id, args=(), kwargs=None):
    write("sent", task=task_name, task_id=task_id, what=what(task_name, args, kwargs or {}))


@after_task_publish.connect
def _published(sender, headers, body, **_):
    args, kwargs, _canvas = body
    call_is_sent(sender, headers["id"], args, kwargs)


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
