"""Run a command that must not outlive the process that asked for it: ``GuardedProcess``.

This file is also the script that it starts, the guard: ``python -I -S _guard.py PARENT CLEAN_UP COMMAND...``. PARENT is
the process id of the asker, CLEAN_UP a directory to delete when the asker has died ("" for none). The guard prints the
command's process id on its standard output; the command writes to the guard's standard error. Exit code: the command's
own, or 128 + the signal that ended it. Slower imports are made where they are used: a guard is up in 20 ms. Coverage
does not see the script's part: it has no site-packages.

Why a process of its own: a parent killed with SIGKILL runs no ``atexit``; ``PR_SET_PDEATHSIG`` set in the asker would
need a ``preexec_fn`` (unsafe with threads) and fire at the end of the *thread* that started the command. The guard has
one thread, so both objections are gone: it watches the asker, and the command dies with the guard.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

TYPE_CHECKING = False  # as type checkers read it, without the import of typing
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from pathlib import Path

POLL = 0.2  # seconds between two looks at the parent; the death of the command itself is noticed at once


def _die_with_parent() -> None:  # pragma: no cover
    """Ask the kernel for SIGKILL when the guard is gone (Linux; elsewhere only the guard's own watch protects)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG; kept over exec


def _run(command: list[str], guard: int) -> None:  # pragma: no cover
    """In the forked child: become the command, as leader of its own process group."""
    try:
        os.setpgid(0, 0)
        _die_with_parent()
        if os.getppid() != guard:  # it died before the kernel knew what to do about it
            os._exit(1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
            signal.signal(number, signal.SIG_DFL)
        os.dup2(2, 1)
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"cannot run {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def main(parent: int, clean_up: str, command: list[str]) -> int:  # pragma: no cover
    """Run ``command`` and wait for its end or the parent's; return the exit code (module docstring)."""
    wake_up, waker = os.pipe()
    for fd in (wake_up, waker):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    guard = os.getpid()
    child = os.fork()
    if not child:
        _run(command, guard)
    with contextlib.suppress(OSError):  # both sides do it: whoever is first, the group is there from now on
        os.setpgid(child, child)
    with contextlib.suppress(OSError):  # nobody reads it any more: the loop below will find out
        os.write(1, b"%d\n" % child)
    os.dup2(2, 1)  # the asker sees the end of the stream
    while os.getppid() == parent:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if select.select([wake_up], [], [], POLL)[0]:
            os.read(wake_up, 4096)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if clean_up:
        import shutil

        shutil.rmtree(clean_up, ignore_errors=True)
    return 1


class GuardedProcess:
    """A child process that dies with this one, however this one dies.

    It has its own session and process group, so Ctrl-C in a terminal does not reach it: whoever started it stops it.

    Args:
        command: what to run; a bare name is looked up on PATH.
        log: a file to which its standard output and error are appended.
        env: its whole environment; None = this process's.
        cwd: its working directory; None = this process's.
        clean_up: a directory to delete should this process die first.

    Raises:
        OSError: the guard could not be started. A command that cannot be run ends with code 127 and a line in the log.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        clean_up: Path | None = None,
    ) -> None:
        import subprocess

        guard = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        with log.open("ab") as output:
            self._guard: subprocess.Popen[bytes] = subprocess.Popen(
                [*guard, str(clean_up or ""), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        assert self._guard.stdout is not None
        with self._guard.stdout as said:
            pid = said.readline()
        if not pid:
            raise OSError(f"the guard of {command[0]} did not start: see {log}")
        self.pid = int(pid)

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs."""
        code = self._guard.poll()
        return code if code is None or code <= 128 else 128 - code

    def wait(self, timeout: float | None = None) -> int:
        """Wait up to ``timeout`` seconds for its end and return the exit code, as poll() does.

        Raises:
            TimeoutError: it is still running.
        """
        import subprocess

        try:
            self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s") from None
        code = self.poll()
        assert code is not None
        return code

    def send(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        if self._guard.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)


if __name__ == "__main__":  # pragma: no cover
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
