"""What a test needs and a laptop may not have: a skip there, a failure in CI (environment variable CI)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip the test, or fail it where everything has to be there."""
    if os.environ.get("CI", "").lower() in {"", "0", "false"}:
        pytest.skip(f"needs {what}")
    pytest.fail(f"CI must have {what}", pytrace=False)


def require_server(name: str) -> str:
    """The path of the program ``name``, such as redis-server."""
    return shutil.which(name) or missing(f"{name} on PATH (.ci/install-servers)")


def require_module(name: str) -> None:
    """Is the Python package there? Not imported: gevent and eventlet stay out of the test process."""
    if importlib.util.find_spec(name) is None:
        missing(f"the Python package {name}")


def require_env(name: str, hint: str) -> str:
    """The value of an environment variable that says where a server is."""
    return os.environ.get(name) or missing(f"{name}: {hint}")
