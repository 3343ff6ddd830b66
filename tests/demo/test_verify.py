"""The check can fail: each kind of bad history is found, and good ones that look odd are not accused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from example_project import verify
from example_project.history import History

SYNC = "sync 1"


class Log:
    """Writes the history of a test, in seconds."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, event: str, at: float, **fields: Any) -> None:
        self.records.append({"event": event, "mono": 100.0 + at, "wall": 1.7e9 + at, "pid": 1, **fields})

    def sent(self, task_id: str, at: float = 0.0, what: str = SYNC) -> None:
        self.add("sent", at, task=f"proj.{what.split(maxsplit=1)[0]}", task_id=task_id, what=what)

    def ran(
        self,
        task_id: str,
        start: float,
        end: float | None,
        *,
        fence: int | None = None,
        pid: int = 1,
        entry: int | None = None,
        what: str = SYNC,
        alone: bool = True,
    ) -> None:
        about = {"task_id": task_id, "what": what, "pid": pid}
        self.add("start", start, **about, alone=alone, worker="worker1@demo", fence=fence or round(start * 1e6) + 1)
        if end is not None:
            self.add("end", end, **about, ok=True, **({} if entry is None else {"entry": entry}))

    def call(self, task_id: str, start: float, end: float | None, **run: Any) -> None:
        self.sent(task_id, start, run.get("what", SYNC))
        self.ran(task_id, start, end, **run)

    def denied(self, task_id: str, policy: str, at: float = 0.5) -> None:
        self.add("lock_conflict", at, task_id=task_id, policy=policy)

    def ticks(self, *times: float, period: float = 3.0, closing: float) -> None:
        self.add("schedule", 0.0, task="proj.tick", period=period)
        for at in times:
            self.call(f"tick{at}", at, at + 0.1, what="tick")
        self.add("closing", closing)

    def report(self) -> verify.Report:
        history = History()
        for record in self.records:
            history.add(record)
        return verify.verify(history)

    def problems(self) -> list[str]:
        return [problem.kind for problem in self.report().problems]


@pytest.fixture
def log() -> Log:
    return Log()


def test_runs_that_follow_each_other_and_skips_in_between_are_fine(log: Log) -> None:
    log.call("a", 0.0, 1.0, entry=1)
    log.sent("b")
    log.denied("b", "skip")
    log.call("c", 1.0, 2.0, entry=2)
    report = log.report()
    assert report.ok
    assert report.summary == "sent 3 calls, ran 2, skipped 1 as duplicates, 0 overlaps, 0 lost calls"


def test_a_run_that_begins_before_the_one_before_has_ended_is_an_overlap(log: Log) -> None:
    log.call("a", 0.0, 1.0)
    log.call("b", 0.999, 2.0, pid=2)
    assert log.problems() == ["overlap"]


def test_an_overlap_with_a_long_run_is_found_behind_a_short_one(log: Log) -> None:
    log.call("long", 0.0, 5.0)
    log.call("short", 1.0, 2.0, pid=2)
    log.call("third", 3.0, 4.0, pid=2)
    assert log.problems() == ["overlap", "overlap"]


def test_the_order_of_lines_does_not_hide_an_overlap(log: Log) -> None:
    log.call("b", 0.5, 2.0, pid=2)
    log.call("a", 0.0, 1.0)
    assert log.problems() == ["overlap"]


def test_runs_of_different_accounts_may_run_side_by_side(log: Log) -> None:
    log.call("a", 0.0, 1.0)
    log.call("b", 0.0, 1.0, pid=2, what="sync 2")
    assert log.report().ok


def test_runs_of_a_task_without_a_lock_may_run_side_by_side(log: Log) -> None:
    log.call("a", 0.0, 1.0, alone=False)
    log.call("b", 0.0, 1.0, pid=2, alone=False)
    assert log.report().ok


@pytest.mark.parametrize("fence", [9, 10])
def test_a_fence_that_does_not_rise_is_found(log: Log, fence: int) -> None:
    log.call("a", 0.0, 1.0, fence=10)
    log.call("b", 2.0, 3.0, fence=fence)
    assert log.problems() == ["older fence"]


def test_fences_of_different_accounts_have_no_order(log: Log) -> None:
    log.call("a", 0.0, 1.0, fence=10)
    log.call("b", 2.0, 3.0, fence=9, what="sync 2")
    assert log.report().ok


def test_an_entry_of_the_ledger_that_was_written_twice_is_found(log: Log) -> None:
    log.call("a", 0.0, 1.0, entry=1)
    log.call("b", 2.0, 3.0, entry=1)
    assert log.problems() == ["overwrite"]


def test_a_call_that_was_sent_and_of_which_nothing_came_is_lost(log: Log) -> None:
    log.call("a", 0.0, 1.0)
    log.sent("b")
    assert log.problems() == ["lost call"]


def test_a_call_that_waits_and_never_runs_is_lost(log: Log) -> None:
    log.call("a", 0.0, 1.0)
    log.sent("b")
    log.denied("b", "retry")
    assert log.problems() == ["lost call"]


def test_a_call_that_begins_and_never_ends_is_lost(log: Log) -> None:
    log.call("a", 0.0, None)
    assert log.problems() == ["lost call"]


def test_a_run_that_was_cut_off_is_made_good_by_another_of_the_same_call(log: Log) -> None:
    log.call("a", 0.0, None)
    log.ran("a", 5.0, 6.0, pid=2)
    report = log.report()
    assert report.ok
    assert "1 cut-off run," in report.summary


def test_a_callback_that_a_chord_has_promised_is_lost_if_the_chord_hangs(log: Log) -> None:
    log.call("a", 0.0, 1.0)
    log.sent("callback", what="combine")
    assert log.problems() == ["lost call"]


@pytest.mark.parametrize("policy", ["raise", "wait"])
def test_a_refused_call_is_not_lost(log: Log, policy: str) -> None:
    log.call("a", 0.0, 1.0)
    log.sent("b")
    log.denied("b", policy)
    report = log.report()
    assert report.ok
    assert "1 refused call," in report.summary


@pytest.mark.parametrize("policy", ["retry", "come_back"])
def test_a_call_that_waits_and_then_runs_is_one_call(log: Log, policy: str) -> None:
    log.call("a", 0.0, 1.0)
    log.sent("b")
    log.denied("b", policy)
    log.sent("b", at=0.6)  # its copy is published
    log.ran("b", 1.5, 2.0)
    report = log.report()
    assert report.ok
    assert report.summary.startswith("sent 2 calls, ran 2 (1 of them later), skipped 0")


def test_a_call_that_ran_and_was_skipped_as_well_is_found(log: Log) -> None:
    log.call("a", 0.0, 1.0)
    log.denied("a", "skip")
    assert log.problems() == ["skipped run"]


def test_a_run_that_nobody_sent_is_found(log: Log) -> None:
    log.ran("a", 0.0, 1.0)
    assert log.problems() == ["stray run"]


def test_nothing_is_proved_by_a_log_without_a_run(log: Log) -> None:
    assert log.problems() == ["empty log"]


def test_one_run_for_each_period_is_fine(log: Log) -> None:
    log.ticks(3.0, 6.1, 9.0, closing=11.9)
    report = log.report()
    assert report.ok
    assert "3 periodic ticks" in report.summary


def test_it_does_not_matter_which_of_two_beats_a_tick_comes_from(log: Log) -> None:
    log.ticks(3.0, 5.4, 8.4, closing=10.0)
    assert log.report().ok


@pytest.mark.parametrize(
    "times", [(6.0, 9.0), (3.0, 9.0), (3.0, 6.0), ()], ids=["the first", "one in between", "the last", "all"]
)
def test_a_missing_tick_is_found(log: Log, times: tuple[float, ...]) -> None:
    log.call("a", 0.0, 1.0)
    log.ticks(*times, closing=11.0)
    assert log.problems() == ["missing tick"]


def test_a_tick_that_was_sent_and_skipped_by_all_is_missing(log: Log) -> None:
    log.ticks(3.0, 9.0, closing=11.0)
    log.sent("b", at=6.0, what="tick")
    log.denied("b", "skip")
    assert log.problems() == ["missing tick"]


def test_a_tick_that_runs_for_both_beats_is_found(log: Log) -> None:
    log.ticks(3.0, 3.3, 6.0, closing=8.0)
    assert log.problems() == ["repeated tick"]


@pytest.mark.parametrize(("end", "code"), [(1.0, 0), (3.0, 1)])
def test_the_command_exits_with_the_verdict(
    log: Log, end: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.call("a", 0.0, end)
    log.call("b", 2.0, 2.5, pid=2)
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in log.records))
    assert verify.main(path) == code
    assert f"{code} overlap" in capsys.readouterr().out
