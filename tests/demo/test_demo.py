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
def all_is_gone(tmp_path: Path) -> Callable[[], None]:
    """Wait until neither a process that the demo has started nor a file is left."""
    directory = tmp_path / "tmp"

    def left() -> list[object]:
        found: list[object] = list(directory.iterdir())
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(directory) and not is_gone(process):
                    found.append(process)
        return found

    def all_is_gone() -> None:
        wait_until(lambda: not left(), lambda: f"the end of {left()}", timeout=10)

    return all_is_gone


def number(what: str, output: str) -> int:
    """The last number before ``what`` in the verdict, however its lines are wrapped."""
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", output).split())
    return int(re.findall(rf"(\d+) {what}", text)[-1])


def test_with_locks_it_ends_green(start: Start, all_is_gone: Callable[[], None], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    demo = start("--seconds", "5", "--logs", str(logs))
    output, _ = demo.communicate(timeout=100)
    assert demo.returncode == 0, output
    assert (number("overlaps?", output), number("lost calls?", output)) == (0, 0)
    assert number("as duplicates", output) > 20
    assert number("periodic ticks?", output) >= 1
    assert max(len(line) for line in output.splitlines() if not line.startswith("Logs: ")) <= 80
    all_is_gone()
    assert {path.stem for path in logs.iterdir()} == {"beat1", "beat2", "events", "users", "worker1", "worker2"}
    again = [sys.executable, "-m", "example_project.verify", str(logs / "events.jsonl")]
    assert subprocess.run(again, cwd=ROOT, check=False).returncode == 0


def test_without_locks_it_ends_red(start: Start, all_is_gone: Callable[[], None]) -> None:
    demo = start("--seconds", "2", "--without-locks")
    output, _ = demo.communicate(timeout=100)
    assert demo.returncode == 1, output
    assert number("overlaps?", output) > 0
    assert number("lost calls?", output) == 0
    assert "NOT SAFE" in output
    all_is_gone()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_all_its_processes(
    start: Start, all_is_gone: Callable[[], None], sent: signal.Signals
) -> None:
    demo = start("--seconds", "60")
    assert demo.stdout is not None
    assert any("running" in line for line in demo.stdout)
    demo.send_signal(sent)
    output, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130, output
    all_is_gone()


def test_killed_it_takes_its_processes_along(start: Start, all_is_gone: Callable[[], None]) -> None:
    demo = start("--seconds", "60")
    assert demo.stdout is not None
    assert any("running" in line for line in demo.stdout)
    demo.kill()
    all_is_gone()
