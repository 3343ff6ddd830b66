"""A soft time limit that lands inside an acquire or a release leaves no lock behind and mixes up no replies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from celery_redislock.testing import EmbeddedServer
from tests.stores.conformance import ROOT


@pytest.mark.parametrize("how", ["lines", "signals"])
def test_an_exception_at_any_moment_leaves_the_key_free_and_the_connections_in_step(
    server: EmbeddedServer, how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.stores.interrupting", how, server.url_for(1), str(server.socket_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
