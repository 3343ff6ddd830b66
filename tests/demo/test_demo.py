"""The demo as a newcomer runs it: green with locks, red without, and nothing is left behind in any case."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.local_nodes.require import require_module
from tests.local_nodes.waiting import wait_until
from tests.local_nodes.worker import is_gone

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

Start = Callable[..., "subprocess.Popen[str]"]
Left = Callable[[], "list[object]"]
WORKERS = 2 * (1 + 4)  # processes


@pytest.fixture
def start(tmp_path: Path, no_process_is_left_over: str) -> Iterator[Start]:
    """``start("--seconds", "4")`` -> the demo's process; its temporary directories are in tmp_path/tmp."""
    require_module("rich")
    (tmp_path / "tmp").mkdir()
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        demo = subprocess.Popen(
            [sys.executable, "-m", "example_project.demo", *arguments],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "COLUMNS": "80"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(demo)
        return demo

    yield start
    for demo in started:
        demo.kill()
        demo.communicate()


@pytest.fixture
def left(tmp_path: Path) -> Left:
    """What there is of the demo: its temporary files, and the processes that it has started."""
    directory = tmp_path / "tmp"

    def left() -> list[object]:
        found: list[object] = list(directory.iterdir())
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR", "").startswith(str(directory)) and not is_gone(process):
                    found.append(process)
        return found

    return left


def wait_until_nothing_is(left: Left) -> None:
    wait_until(lambda: not left(), lambda: f"the end of {left()}")


def number(what: str, output: str) -> int:
    """The last number before ``what`` in the verdict, however its lines are wrapped."""
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", output).split())
    return int(re.findall(rf"(\d+) {what}", text)[-1])


def test_with_locks_it_ends_green(start: Start, left: Left, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    demo = start("--seconds", "5", "--logs", str(logs))
    output, _ = demo.communicate(timeout=100)
    assert demo.returncode == 0, output
    assert (number("overlaps?", output), number("lost calls?", output)) == (0, 0)
    assert number("as duplicates", output) > 20
    assert number("periodic ticks?", output) >= 1
    assert max(len(line) for line in output.splitlines() if not line.startswith("Logs: ")) <= 80
    wait_until_nothing_is(left)
    assert {path.stem for path in logs.iterdir()} == {"beat1", "beat2", "events", "users", "worker1", "worker2"}
    again = [sys.executable, "-m", "example_project.verify", str(logs / "events.jsonl")]
    assert subprocess.run(again, cwd=ROOT, check=False).returncode == 0


def test_without_locks_it_ends_red(start: Start, left: Left) -> None:
    demo = start("--seconds", "2", "--without-locks")
    output, _ = demo.communicate(timeout=100)
    assert demo.returncode == 1, output
    assert number("overlaps?", output) > 0
    assert number("lost calls?", output) == 0
    assert "NOT SAFE" in output
    wait_until_nothing_is(left)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_all_its_processes(start: Start, left: Left, sent: signal.Signals) -> None:
    demo = start("--seconds", "60")
    assert demo.stdout is not None
    assert any("running" in line for line in demo.stdout)
    assert len(left()) > WORKERS
    demo.send_signal(sent)
    output, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130, output
    wait_until_nothing_is(left)


def test_killed_it_takes_its_processes_along(start: Start, left: Left) -> None:
    demo = start("--seconds", "60")
    assert demo.stdout is not None
    assert any("running" in line for line in demo.stdout)
    assert len(left()) > WORKERS
    demo.kill()
    wait_until_nothing_is(left)
