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
    waited = {task_id for task_id, _ in history.waits} & finished
    failed = [run for run in history.runs if run.end is not None and not run.ok]
    parts = [
        f"sent {len(history.calls)} calls: {len(finished)} ran ({len(waited)} of these after waiting), "
        f"{len(history.skipped)} were skipped as duplicates"
    ]
    ticks_run = [task_id for task_id in finished & history.calls.keys() if history.calls[task_id].task in history.schedules]
    optional = {"periodic ticks ran": ticks_run, "refused": history.refused, "runs failed": failed, "times trouble with the lock": history.trouble}
    parts += [f"{len(found)} {what}" for what, found in optional.items() if found]
    kinds = Counter({"overlaps": 0, "lost calls": 0})
    kinds.update(f"{problem.kind}s" for problem in problems)
    return ", ".join([*parts, *(f"{count} {kind}" for kind, count in kinds.items())])


def something_happened(history):
    if not history.runs:
        yield Problem("empty log", "nothing ran, so nothing is proved")


def overlaps(history):
    """A run of a key begins before another of this key has ended."""
    for label, runs in _by_key(history):
        latest = None
        for run in runs:
            if latest and run.start < latest.end:
                yield Problem(
                    "overlap", f"{label}: {_who(run)} began {latest.end - run.start:.3f} s before {_who(latest)} ended"
                )
            if run.end is not None and (latest is None or run.end > latest.end):
                latest = run


def fences(history):
    """A later run of a key must have a higher fence. Runs without a lock have none."""
    for label, runs in _by_key(history):
        for before, after in pairwise(run for run in runs if run.fence is not None):
            if after.fence <= before.fence:
                yield Problem("older fence", f"{label}: {after.fence} of {_who(after)} came after {before.fence}")


def overwritten_entries(history):
    """Two runs wrote the same entry of the ledger: an update was lost. No clock is needed to see this."""
    for label, runs in _by_key(history):
        for entry, times in Counter(run.entry for run in runs if run.entry is not None).items():
            if times > 1:
                yield Problem("overwrite", f"{label}: entry {entry} was written {times} times")


def lost_calls(history):
    """Each call that was sent ran to its end, was skipped or was refused: one of the three, and nothing else ran."""
    finished, denied = history.finished(), history.skipped.keys() | history.refused.keys()
    for task_id in history.unsettled():
        yield Problem("lost call", f"{history.calls[task_id].label}: {task_id} was sent, and neither ran nor was skipped")
    for task_id in finished & denied:
        yield Problem("skipped run", f"{task_id} ran, and was skipped or refused as well")
    for task_id in (finished | denied) - history.calls.keys():
        yield Problem("stray run", f"{task_id} was never sent")
    for run in history.running:
        if run.task_id in finished:  # else it is a lost call already
            yield Problem("endless run", f"{run.task}: {_who(run)} never ended")


def ticks(history):
    """A periodic task ran once per period, whoever sent it.

    Plain beats do not name their ticks, and two of them are apart by any part of the period. What can be said: of the
    calls that ran, two that were sent within half a period are one tick twice; more than one and a half without any is a
    tick that is missing.
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


def _by_key(history):
    """(label, runs in the order of their start) for each key."""
    labels = {call.key: call.label for call in history.calls.values()}
    runs = defaultdict(list)
    for run in sorted(history.runs, key=lambda run: run.start):
        if run.key is not None:
            runs[run.key].append(run)
    return [(labels.get(key, key), found) for key, found in runs.items()]


def _who(run):
    return f"{run.task_id[:8]} on {run.worker} pid {run.pid}"


def main(path):
    report = verify(History.read(path))
    print(report.summary)
    for problem in report.problems:
        print(f"{problem.kind}: {problem.text}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
