"""Proves from the event log that nothing overlapped and nothing was lost: ``python -m example_project.verify <log>``.

Exit code 0 if so, 1 if not; the problems are listed.
"""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from example_project.history import History


@dataclass
class Problem:
    kind: str
    text: str


@dataclass
class Report:
    summary: str
    problems: list[Problem]

    @property
    def ok(self):
        return not self.problems


def verify(history):
    checks = (something_happened, overlaps, fences, overwritten_entries, lost_calls, ticks)
    problems = [problem for check in checks for problem in check(history)]
    return Report(_summary(history, problems), problems)


def _summary(history, problems):
    finished = history.finished()
    later = len(finished.intersection(history.waits))
    parts = [
        f"sent {len(history.calls)} calls",
        f"ran {len(finished)}" + (f" ({later} of them later)" if later else ""),
        f"skipped {len(history.skipped)} as duplicates",
    ]
    calls = history.calls.items()
    notes = {
        "refused call": len(history.refused),
        "failed run": sum(run.end is not None and not run.ok for run in history.runs),
        "cut-off run": sum(run.end is None and run.task_id in finished for run in history.runs),
        "lock warning": len(history.trouble),
        "periodic tick": sum(task_id in finished and call.task in history.schedules for task_id, call in calls),
    }
    kinds = Counter({"overlap": 0, "lost call": 0})
    kinds.update(problem.kind for problem in problems)
    counts = [*(note for note in notes.items() if note[1]), *kinds.items()]
    return ", ".join([*parts, *(f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts)])


def something_happened(history):
    if not history.runs:
        yield Problem("empty log", "nothing ran, so nothing is proved")


def overlaps(history):
    """A run began before another of the same had ended. (When one that was cut off has ended is not known.)"""
    for what, runs in _in_order(history):
        latest = None
        for run in runs:
            if latest and run.start < latest.end:
                early = latest.end - run.start
                yield Problem("overlap", f"{what}: {_who(run)} began {early:.3f} s before {_who(latest)} ended")
            if run.end is not None and (latest is None or run.end > latest.end):
                latest = run


def fences(history):
    """A later run must have a higher fence. Runs without a lock have none."""
    for what, runs in _in_order(history):
        for before, after in pairwise(run for run in runs if run.fence is not None):
            if after.fence <= before.fence:
                yield Problem("older fence", f"{what}: {after.fence} of {_who(after)} came after {before.fence}")


def overwritten_entries(history):
    """Two runs wrote the same entry of the ledger: an update was lost. No clock is needed to see this."""
    for what, runs in _in_order(history):
        for entry, times in Counter(run.entry for run in runs if run.entry is not None).items():
            if times > 1:
                yield Problem("overwrite", f"{what}: entry {entry} was written {times} times")


def lost_calls(history):
    """Each call that was sent ran to its end, was skipped or was refused: one of the three, and nothing else ran.

    A run that was cut off by the death of its process is made good by another run of the same call.
    """
    finished, denied = history.finished(), history.skipped | history.refused
    for task_id in history.unsettled():
        what = history.calls[task_id].what
        yield Problem("lost call", f"{what}: {task_id} was sent, and neither ran to its end nor was skipped")
    for task_id in finished & denied:
        yield Problem("skipped run", f"{task_id} ran, and was skipped or refused as well")
    for task_id in (finished | denied) - history.calls.keys():
        yield Problem("stray run", f"{task_id} was never sent")


def ticks(history):
    """A periodic task ran once per period, whoever sent it.

    Plain beats do not name their ticks, and two of them may be apart by any part of the period. What can be said: two
    calls that ran and were sent within half a period are one tick twice, and where nothing that was sent in one and a
    half periods has run, a tick is missing.
    """
    finished = history.finished()
    for task, period in history.schedules.items():
        ran = sorted(call.sent for task_id, call in history.calls.items() if call.task == task and task_id in finished)
        for before, after in pairwise(ran):
            if after - before < period / 2:
                yield Problem("repeated tick", f"{task}: ran for two calls sent {after - before:.2f} s apart")
        end = history.closing or max([history.began, *ran])
        for before, after in pairwise([history.began, *ran, end]):
            if after - before > 1.5 * period:
                yield Problem("missing tick", f"{task}: nothing sent for {after - before:.2f} s has run")


def _in_order(history):
    """(what, runs in the order of their start) for all of which only one may run."""
    runs = defaultdict(list)
    for run in sorted(history.runs, key=lambda run: run.start):
        if run.alone:
            runs[run.what].append(run)
    return runs.items()


def _who(run):
    return f"{run.worker.partition('@')[0]} pid {run.pid}"


def main(path):
    report = verify(History.read(path))
    print(report.summary)
    for problem in report.problems:
        print(f"{problem.kind}: {problem.text}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
