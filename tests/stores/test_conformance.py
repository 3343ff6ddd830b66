"""The conformance suite, on every store and on every way to a server."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.utils

from celery_redislock.testing import EmbeddedServer
from tests.stores.conformance import ROOT, ServerConformance, StoreConformance
from tests.stores.harness import MemorySubject, ServerSubject


class TestMemory(StoreConformance):
    rounds = 500

    @pytest.fixture
    def subject(self) -> MemorySubject:
        return MemorySubject()


def connected(url: str, server: EmbeddedServer, **options: Any) -> Iterator[ServerSubject]:
    subject = ServerSubject(url, options, server)
    yield subject
    subject.close()


class TestValkeyOverTcp(ServerConformance):
    rounds = 500

    @pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
    def subject(self, server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[ServerSubject]:
        yield from connected(server.url, server, protocol=request.param)


class TestValkeyOverAUnixSocket(ServerConformance):
    @pytest.fixture
    def subject(self, server: EmbeddedServer) -> Iterator[ServerSubject]:
        yield from connected(server.unix_url, server)


@pytest.mark.servers
class TestRedisOverAUnixSocket(ServerConformance):
    @pytest.fixture
    def subject(self, redis_server: EmbeddedServer) -> Iterator[ServerSubject]:
        yield from connected(redis_server.unix_url, redis_server, protocol=3)


@pytest.mark.servers
class TestRedisOverTls(ServerConformance):
    @pytest.fixture
    def subject(self, redis_server: EmbeddedServer, certificate: tuple[Path, Path]) -> Iterator[ServerSubject]:
        yield from connected(redis_server.url, redis_server, ssl_ca_certs=str(certificate[0]))


@pytest.mark.slow
def test_the_suite_passes_without_hiredis_too(tmp_path: Path) -> None:
    """redis-py has a parser of its own for whoever has not installed the extra."""
    if importlib.util.find_spec("hiredis") is None:
        assert not redis.utils.HIREDIS_AVAILABLE
        pytest.skip("there is no hiredis here: all the other tests are this test")
    (tmp_path / "no_hiredis.py").write_text("import sys\n\nsys.modules['hiredis'] = None\n")
    args = ["-q", "-p", "no_hiredis", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=-p no:valkey"]
    args += ["-k", "parser or (TestValkeyOverTcp and (renewal or denied or inspect or foreign or type or flush))"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/stores/test_conformance.py", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "REDISLOCK_NO_HIREDIS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "passed" in done.stdout


def test_the_parser_is_the_one_that_is_meant() -> None:
    available = importlib.util.find_spec("hiredis") is not None and "REDISLOCK_NO_HIREDIS" not in os.environ
    assert available == redis.utils.HIREDIS_AVAILABLE
