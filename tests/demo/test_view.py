"""What the demo shows fits a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from example_project.history import Call, History, Run
from example_project.verify import Problem, Report
from example_project.view import table, verdict

WHAT = "rebuild_search_index"


def shown(what: object) -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def history(*pids: int) -> History:
    found = History(calls={f"{n}": Call("proj.rebuild", WHAT, 0.0) for n in range(1234)})
    for pid in pids:
        run = Run(WHAT, True, str(pid), "worker1@demo", pid, 1_764_540_012_345_678, start=1.0)
        found.runs.append(run)
        found._open[run.task_id, pid] = run
    found.skipped = {str(n) for n in range(1000)}
    found.waits = ["1"] * 100
    return found


def test_a_row_says_who_holds_the_lock() -> None:
    header, row = shown(table(history(4194304)))
    assert row.split() == [WHAT, "worker1", "4194304", "..12345678", "1234", "0", "1000", "100"]
    assert header.split() == ["what", "runs", "on", "pid", "fence", "sent", "ran", "skipped", "waits"]
    assert max(len(header.rstrip()), len(row.rstrip())) <= 80


def test_two_holders_stand_out() -> None:
    assert "2 AT ONCE" in shown(table(history(4194304, 4194305)))[1]


def test_the_verdict_shows_some_problems_of_each_kind() -> None:
    problems = [Problem(kind, f"number {n}") for kind in ("overlap", "lost call") for n in range(50)]
    text = "\n".join(shown(verdict(Report("sent 7 calls", problems), locks=True)))
    assert text.count("overlap: ") == text.count("lost call: ") == 2
    assert "NOT SAFE" in text
