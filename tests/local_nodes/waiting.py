"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMEOUT = 30.0  # seconds: far more than anything takes, so that only what never happens fails


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "",
    *,
    timeout: float = TIMEOUT,
    interval: float = 0.02,
) -> T:
    """Call ``condition`` until it is true, and return what it returned.

    ``what`` is said when it fails: a text, or a function that makes one (such as the end of a log).
    AssertionError after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        last_try = time.monotonic() > deadline  # looked at before the condition: a stalled machine gets one more try
        if result := condition():
            return result
        if last_try:
            raise AssertionError(f"not within {timeout} s: {what() if callable(what) else what or condition}")
        time.sleep(interval)
