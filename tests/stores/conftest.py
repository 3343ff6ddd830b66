"""Servers of the store tests: Debian's Redis beside the embedded Valkey, and one that speaks TLS."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.fixtures import started_server
from tests.local_nodes.require import require_server

pytest.register_assert_rewrite("tests.stores.conformance", "tests.stores.harness")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    openssl = require_server("openssl")
    directory = tmp_path_factory.mktemp("certificate")
    certificate, key = directory / "server.crt", directory / "server.key"
    args = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    args += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    args += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *args], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="session")
def session_redis(no_process_is_left_over: str, certificate: tuple[Path, Path]) -> Iterator[EmbeddedServer]:
    """Debian's Redis, over TLS and a Unix socket: the embedded Valkey is built without TLS."""
    cert, key = map(str, certificate)
    args = ["--port", "0", "--tls-port", "{port}", "--tls-cert-file", cert, "--tls-key-file", key]
    args += ["--tls-ca-cert-file", cert, "--tls-auth-clients", "no"]
    server = started_server(require_server("redis-server"), args)
    yield server
    server.close()


@pytest.fixture
def redis_server(session_redis: EmbeddedServer) -> EmbeddedServer:
    """Debian's Redis, empty. It runs all the time: whoever stops or freezes a server takes the embedded one."""
    session_redis.flush()
    return session_redis
