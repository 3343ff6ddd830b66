"""What the demo shows: a live table on a terminal, a line every two seconds elsewhere, and the closing verdict."""

import time
from collections import Counter, defaultdict

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from example_project.verify import overlaps

LINE_EVERY = 2.0  # seconds
MOST_PROBLEMS = 2  # of each kind are shown


class View:
    """Use it in a ``with`` block, and call `update` some times a second."""

    def __init__(self, console):
        self._console = console
        self._live = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False)
        self._began = self._next_line = time.monotonic()

    def update(self, history, phase):
        seconds = time.monotonic() - self._began
        line = f"{seconds:3.0f} s  {phase}" + (f": {counts(history)}" if history.calls else "")
        if self._live:
            self._live.update(Group(Text(line), table(history)), refresh=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY
            print(line, flush=True)

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._live.stop()

    def close(self, history, report, locks):
        """Show the end: the table, where it was not live, and the verdict."""
        if not self._live:
            self._console.print(table(history))
        self._console.print(verdict(report, locks))


def counts(history):
    return (
        f"sent {len(history.calls)}, ran {len(history.finished())}, running {len(history.running)}, "
        f"skipped {len(history.skipped)}, overlaps {len(list(overlaps(history)))}"
    )


def table(history):
    """One row for each thing that is done: who does it now, under which fence, and how the calls for it have fared."""
    calls = history.calls
    sent = Counter(call.what for call in calls.values())
    ran = Counter(run.what for run in history.runs if run.end is not None)
    skipped = Counter(calls[task_id].what for task_id in history.skipped if task_id in calls)
    waits = Counter(calls[task_id].what for task_id in history.waits if task_id in calls)
    running = defaultdict(list)
    for run in history.running:
        running[run.what].append(run)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column, width in (("what", 20), ("runs on", 9), ("pid", 7), ("fence", 10)):
        shown.add_column(column, no_wrap=True, min_width=width)
    for column in ("sent", "ran", "skipped", "waits"):
        shown.add_column(column, no_wrap=True, justify="right")
    for what in sorted(sent):
        shown.add_row(what, *_holder(running[what]), *(str(count[what]) for count in (sent, ran, skipped, waits)))
    return shown


def _holder(runs):
    """Worker, pid and fence of the one that runs; red if there are more, which no lock allows."""
    if not runs:
        return "", "", ""
    run = runs[0]
    fence = f"..{run.fence % 10**8:08d}" if run.fence else "none"
    if len(runs) > 1:
        return Text(f"{len(runs)} AT ONCE", style="bold red"), str(run.pid), fence
    return run.worker.partition("@")[0], str(run.pid), fence


def verdict(report, locks):
    lines, shown = [report.summary], Counter()
    for problem in report.problems:
        shown[problem.kind] += 1
        if shown[problem.kind] <= MOST_PROBLEMS:
            lines.append(f"{problem.kind}: {problem.text}")
    if not locks:
        lines.append("This was without locks. With them: leave out --without-locks.")
    title = "nothing overlapped, nothing was lost" if report.ok else "NOT SAFE"
    return Panel(Text("\n".join(lines)), title=title, border_style="green" if report.ok else "red", title_align="left")
