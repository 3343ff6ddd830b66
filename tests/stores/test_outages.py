"""Servers that refuse, load, are busy, full, read-only or let nobody in: always `LockUnavailable`, in bounded time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from celery_redislock.errors import LockUnavailable
from celery_redislock.lease import Renewal
from celery_redislock.stores.base import LockStore
from celery_redislock.stores.connect import make_store
from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.require import require_server
from tests.local_nodes.waiting import wait_until
from tests.stores.harness import Lock, granted, token

MakeServer = Callable[..., EmbeddedServer]
TIMEOUT = 0.6  # a reply is waited for a third of it; what is expected to work gets several chances, or more time
PATIENCE = 10.0  # far more than an operation takes, far less than for ever
SECRET = "s3cr3t/?#%"

FAILS, WORKS = "fails", "works"


def client(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(server.socket_path))


# --- what can be wrong with a server that answers


@contextmanager
def busy(server: EmbeddedServer) -> Iterator[None]:
    with client(server) as admin:
        admin.config_set("busy-reply-threshold", 20)

        def run_away() -> None:
            with client(server) as other, suppress(redis.RedisError):
                other.eval("while true do end", 0)

        thread = threading.Thread(target=run_away)
        thread.start()
        wait_until(lambda: _error(server, "PING").startswith("BUSY"), "the script to run")
        try:
            yield
        finally:
            wait_until(lambda: "OK" in _error(server, "SCRIPT", "KILL") or not _error(server, "PING"), "its end")
            thread.join()


@contextmanager
def loading(server: EmbeddedServer) -> Iterator[None]:
    with client(server) as admin:
        admin.config_set("key-load-delay", 20_000)  # us for each key
        admin.config_set("loading-process-events-interval-bytes", 1024)
        with admin.pipeline() as pipeline:
            for number in range(1_000):
                pipeline.set(f"ballast:{number}", "x" * 200)
            pipeline.execute()

        def reload() -> None:
            with client(server) as other, suppress(redis.RedisError):
                other.execute_command("DEBUG", "RELOAD")

        thread = threading.Thread(target=reload)
        thread.start()
        wait_until(lambda: _error(server, "GET", "x").startswith("LOADING"), "the server to load")
        yield
        wait_until(lambda: not _error(server, "CONFIG", "SET", "key-load-delay", "0"), "the end of the delay")
        thread.join()
        wait_until(lambda: not _error(server, "PING"), "the server to have loaded")


@contextmanager
def full(server: EmbeddedServer) -> Iterator[None]:
    with client(server) as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1mb")
        yield
        admin.config_set("maxmemory", 0)


@contextmanager
def unable_to_save(server: EmbeddedServer) -> Iterator[None]:
    with client(server) as admin:
        (server.directory / "dump.rdb").mkdir()  # what is to be written there can't be
        admin.config_set("save", "3600 1")
        admin.bgsave()
        wait_until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", "the failure")
        yield
        (server.directory / "dump.rdb").rmdir()
        admin.config_set("save", "")


@contextmanager
def read_only(server: EmbeddedServer) -> Iterator[None]:
    with client(server) as admin:
        admin.replicaof("127.0.0.1", _closed_port())
        yield
        admin.replicaof("NO", "ONE")


@contextmanager
def without_master(server: EmbeddedServer) -> Iterator[None]:
    with client(server) as admin:
        admin.config_set("replica-serve-stale-data", "no")
        with read_only(server):
            yield


@contextmanager
def out_of_connections(server: EmbeddedServer) -> Iterator[None]:
    with client(server) as admin:
        admin.config_set("maxclients", 1)
        admin.client_kill_filter(_type="normal", skipme=True)
        yield
        admin.config_set("maxclients", 1000)


@contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    server.stop()
    yield
    server.start()


# which operations such a server still can do: what it can do is not to be refused either
TROUBLES: dict[str, tuple[Callable[[EmbeddedServer], Any], Mapping[str, str]]] = {
    "busy": (busy, {}),
    "loading": (loading, {}),
    "full": (full, {"release": WORKS, "inspect": WORKS, "renew": WORKS}),
    "unable to save": (unable_to_save, {"inspect": WORKS}),
    "read-only": (read_only, {"inspect": WORKS}),
    "without its master": (without_master, {}),
    "out of connections": (out_of_connections, {}),
    "stopped": (stopped, {}),
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_each_operation_fails_as_unavailable_and_works_again_afterwards(make_server: MakeServer, kind: str) -> None:
    trouble, answers = TROUBLES[kind]
    server = make_server(args=["--enable-debug-command", "local"])
    store = make_store(server.url, {}, TIMEOUT)
    locks = {name: Lock() for name in ("acquire", "release", "inspect", "renew")}
    mine = token()
    patient = make_store(server.url, {}, 30.0)
    for name in ("release", "inspect", "renew"):
        granted(patient.acquire(locks[name].ask(mine, 600.0)))
    patient.close()
    operations = _operations(store, locks, mine)
    for name in ("inspect", "renew"):
        assert _settled(operations[name]) == "right"
    with trouble(server):
        for name, operation in operations.items():
            started = time.monotonic()
            if answers.get(name, FAILS) == WORKS:
                assert _settled(operation) == "right"
            else:
                assert operation() == "unavailable", name
            assert time.monotonic() - started < PATIENCE
    for name, operation in operations.items():
        if name == "release" and answers.get(name, FAILS) == WORKS:
            continue  # done
        if kind == "stopped" and name != "acquire":
            continue  # the server has forgotten everything
        assert _settled(operation) == "right", name
    store.close()


def _operations(store: LockStore, locks: dict[str, Lock], mine: Any) -> dict[str, Callable[[], str]]:
    """Each says "right", "unavailable", or what else has come of it."""

    def call(operation: Callable[[], object], right: Callable[[Any], bool]) -> str:
        try:
            answer = operation()
        except LockUnavailable:
            return "unavailable"
        return "right" if right(answer) else f"wrong: {answer}"

    def renew() -> str:
        (answer,) = store.renew([locks["renew"].lease(mine, 600.0)], TIMEOUT)
        return "unavailable" if answer is None else "right" if answer == Renewal(held=True) else f"wrong: {answer}"

    return {
        "acquire": lambda: call(lambda: granted(store.acquire(locks["acquire"].ask(mine))), bool),
        "inspect": lambda: call(
            lambda: store.inspect(locks["inspect"].key), lambda seen: seen is not None and seen.holder.value
        ),
        "renew": renew,
        "release": lambda: call(lambda: store.release(locks["release"].release(mine)), lambda answer: answer.owned),
    }


def _settled(operation: Callable[[], str]) -> str:
    """Its first answer that is not "unavailable": on a busy machine, an answer may be late."""
    return wait_until(lambda: (answer := operation()) != "unavailable" and answer, "the store to work")


def _error(server: EmbeddedServer, *words: str) -> str:
    """The error reply to a command, or nothing."""
    try:
        server.command(*words)
    except (RuntimeError, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return int(closed.getsockname()[1])


@pytest.mark.parametrize("kind", ["busy", "loading", "read-only", "unable to save", "stopped"])
def test_an_operation_waits_for_a_trouble_to_pass_within_its_time(make_server: MakeServer, kind: str) -> None:
    server = make_server(args=["--enable-debug-command", "local"])
    store = make_store(server.url, {}, 60.0)
    lock, mine = Lock(), token()
    store.release(lock.release(mine))
    answers: list[object] = []
    with TROUBLES[kind][0](server):
        thread = threading.Thread(target=lambda: answers.append(store.acquire(lock.ask(mine))))
        thread.start()
        time.sleep(0.1)  # it has met the trouble; no matter if not
        assert answers == []
    thread.join(60)
    granted(answers[0])
    store.close()


def test_a_full_server_frees_a_lock_even_if_it_cannot_remember_that_its_call_is_done(make_server: MakeServer) -> None:
    server = make_server()
    store = make_store(server.url, {}, 10.0)
    lock, mine = Lock(), token()
    granted(store.acquire(lock.ask(mine, done="call-1.0")))
    with full(server):
        assert store.release(lock.release(mine, done="call-1.0", done_ttl=60.0)).owned
        assert server.command("EXISTS", lock.key) == b"0"
    store.close()


# --- servers that can't be reached


def _blackhole() -> tuple[socket.socket, list[socket.socket]]:
    """A port that takes no more connections: whoever tries waits for an answer to his SYN."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    waiting = []
    for _ in range(4):
        caller = socket.socket()
        caller.setblocking(False)
        caller.connect_ex(listener.getsockname())
        waiting.append(caller)
    return listener, waiting


@pytest.mark.parametrize("address", ["refused", "no such host", "no such socket", "blackhole"])
def test_a_server_that_cannot_be_reached_is_unavailable_in_bounded_time(address: str, tmp_path: Path) -> None:
    listener, waiting = _blackhole()
    url = {
        "refused": f"redis://127.0.0.1:{_closed_port()}/0",
        "no such host": "redis://no-such-host.invalid/0",
        "no such socket": f"unix://{tmp_path}/nobody?db=0",
        "blackhole": f"redis://127.0.0.1:{listener.getsockname()[1]}/0",
    }[address]
    store, lock, mine = make_store(url, {}, TIMEOUT), Lock(), token()
    for operation in _operations(store, dict.fromkeys(("acquire", "release", "inspect", "renew"), lock), mine).values():
        started = time.monotonic()
        assert operation() == "unavailable"
        assert time.monotonic() - started < PATIENCE
    for caller in (listener, *waiting):
        caller.close()


@pytest.mark.servers
@pytest.mark.parametrize("case", ["unknown authority", "TLS to a plain port", "plain to a TLS port"])
def test_tls_that_does_not_come_about_is_unavailable(
    server: EmbeddedServer, redis_server: EmbeddedServer, case: str
) -> None:
    url = {
        "unknown authority": redis_server.url,
        "TLS to a plain port": server.url.replace("redis://", "rediss://"),
        "plain to a TLS port": redis_server.url.replace("rediss://", "redis://"),
    }[case]
    store, lock, mine = make_store(url, {}, TIMEOUT), Lock(), token()
    for operation in _operations(store, dict.fromkeys(("acquire", "release", "inspect", "renew"), lock), mine).values():
        assert operation() == "unavailable"
    store.close()


def test_renewals_do_not_wait_for_a_connection_longer_than_they_are_told() -> None:
    listener, waiting = _blackhole()
    store = make_store(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", {}, 60.0)
    started = time.monotonic()
    assert store.renew([Lock().lease(token())], 0.2) == [None]
    assert time.monotonic() - started < PATIENCE
    for caller in (listener, *waiting):
        caller.close()


def test_more_threads_than_redis_py_has_connections_by_default_find_one_each(server: EmbeddedServer) -> None:
    store = make_store(server.url, {}, 90.0)
    barrier = threading.Barrier(130)
    server.pause()
    answers: list[object] = []

    def ask() -> None:
        barrier.wait(60)
        answers.append(store.acquire(Lock().ask(token())))

    threads = [threading.Thread(target=ask) for _ in range(130)]
    for thread in threads:
        thread.start()
    ours = psutil.Process()
    wait_until(
        # at least: other tests of this process may have left one of theirs open
        lambda: sum(bool(c.raddr) and c.raddr.port == server.port for c in ours.net_connections("tcp")) >= 130,
        "all to have a connection",
    )
    server.resume()
    for thread in threads:
        thread.join(60)
    assert len([granted(answer) for answer in answers]) == 130
    store.close()


def test_a_limit_on_connections_makes_operations_wait_for_one(server: EmbeddedServer) -> None:
    store = make_store(server.url, {"max_connections": 2}, 30.0)
    answers: list[object] = []

    def ask() -> None:
        for _ in range(20):
            lock, mine = Lock(), token()
            answers.append(granted(store.acquire(lock.ask(mine))))
            store.release(lock.release(mine))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 160
    store.close()


# --- servers that do not let us in, or not do all


@pytest.fixture
def guarded(make_server: MakeServer) -> EmbeddedServer:
    return make_server(args=["--requirepass", SECRET])


def _quoted(secret: str) -> str:
    return "".join(f"%{ord(letter):02X}" for letter in secret)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize(
    "login",
    ["", f":{_quoted('wrong-' + SECRET)}@", f"nobody:{_quoted('wrong-' + SECRET)}@"],
    ids=["none", "bad", "user"],
)
def test_a_wrong_password_is_unavailable_at_once_and_is_never_shown(
    guarded: EmbeddedServer, login: str, protocol: int
) -> None:
    store = make_store(f"redis://{login}127.0.0.1:{guarded.port}/0", {"protocol": protocol}, 30.0)
    lock, mine = Lock(), token()
    started = time.monotonic()
    for operation in (
        lambda: store.acquire(lock.ask(mine)),
        lambda: store.release(lock.release(mine)),
        lambda: store.inspect(lock.key),
    ):
        with pytest.raises(LockUnavailable) as raised:
            operation()
        _shows_no_secret(raised.value, store)
    assert store.renew([lock.lease(mine)], 5.0) == [None]
    assert time.monotonic() - started < 10, "trying again does not help"
    store.close()


def test_the_right_password_opens(guarded: EmbeddedServer) -> None:
    store = make_store(f"redis://:{_quoted(SECRET)}@127.0.0.1:{guarded.port}/0", {}, 5.0)
    granted(store.acquire(Lock().ask(token())))
    _shows_no_secret(store)
    store.close()


def _shows_no_secret(*things: object) -> None:
    for thing in things:
        while thing is not None:
            for text in (str(thing), repr(thing), repr(getattr(thing, "args", ""))):
                for secret in (SECRET, _quoted(SECRET), "s3cr3t"):
                    assert secret not in text
            thing = getattr(thing, "__cause__", None) or getattr(thing, "__context__", None)  # noqa: PLW2901


LEAST = ("get", "set", "del", "pttl", "pexpire", "time", "eval", "evalsha")
"""The commands that a lock needs. An ACL checks those inside of scripts, too."""


def _user(
    server: EmbeddedServer, commands: tuple[str, ...], keys: str = "~redislock:*", timeout: float = TIMEOUT
) -> LockStore:
    with client(server) as admin:
        admin.execute_command(
            "ACL", "SETUSER", "locker", "reset", "on", f">{SECRET}", keys, *(f"+{name}" for name in commands)
        )
    return make_store(f"redis://locker:{_quoted(SECRET)}@127.0.0.1:{server.port}/0", {}, timeout)


@pytest.mark.parametrize("binary", [None, pytest.param("redis-server", marks=pytest.mark.servers)])
def test_eight_commands_on_its_own_keys_are_all_the_permissions_that_a_lock_needs(
    make_server: MakeServer, binary: str | None
) -> None:
    server = make_server(binary and require_server(binary))
    store = _user(server, LEAST, timeout=10.0)
    lock, mine = Lock(), token()
    granted(store.acquire(lock.ask(mine, done="call-1.0")))
    store.acquire(lock.ask(token("call-2")))
    assert store.renew([lock.lease(mine)], 5.0) == [Renewal(held=True)]
    assert store.inspect(lock.key) is not None
    assert store.release(lock.release(mine, keep=1.0, done="call-1.0", done_ttl=9.0)).owned
    store.close()


@pytest.mark.parametrize("binary", [None, pytest.param("redis-server", marks=pytest.mark.servers)])
@pytest.mark.parametrize("missing", ["get", "set", "del", "pttl", "pexpire", "time", "eval"])
def test_a_missing_permission_is_unavailable_and_leaves_no_lock_behind(
    make_server: MakeServer, binary: str | None, missing: str
) -> None:
    server = make_server(binary and require_server(binary))
    store = _user(server, tuple(name for name in LEAST if name != missing))
    lock, mine = Lock(), token()
    failed = []
    for name, operation in (
        ("acquire", lambda: store.acquire(lock.ask(mine))),
        ("denied", lambda: store.acquire(lock.ask(token("call-2")))),
        ("renew", lambda: store.renew([lock.lease(mine)], PATIENCE)),
        ("inspect", lambda: store.inspect(lock.key)),
        ("release", lambda: store.release(lock.release(mine))),
    ):
        if _is_refused(operation):
            failed.append(name)
            if name == "acquire":
                assert server.command("EXISTS", lock.key) == b"0", "an acquire that failed must not lock"
    assert (
        failed
        == {
            "get": ["acquire", "denied", "renew", "inspect", "release"],
            "set": ["acquire", "denied"],
            "del": ["release"],
            "pttl": ["denied", "inspect"],
            "pexpire": ["renew"],
            "time": ["acquire", "denied", "inspect"],
            "eval": ["acquire", "denied", "renew", "release"],
        }[missing]
    )
    store.close()


def _is_refused(operation: Callable[[], object]) -> bool:
    while True:
        try:
            return operation() == [None]
        except LockUnavailable as error:
            _shows_no_secret(error)
            if "Timeout" not in str(error):  # a machine that is busy is not a server that refuses
                return True


def test_whoever_may_not_use_evalsha_uses_eval(make_server: MakeServer) -> None:
    server = make_server()
    store = _user(server, tuple(name for name in LEAST if name != "evalsha"), timeout=10.0)
    other = make_store(f"redis://locker:{_quoted(SECRET)}@127.0.0.1:{server.port}/0", {}, 10.0)
    lock, mine = Lock(), token()
    granted(store.acquire(lock.ask(mine)))
    assert store.renew([lock.lease(mine)], 5.0) == [Renewal(held=True)]
    assert other.renew([lock.lease(mine)], 5.0) == [None]
    assert other.renew([lock.lease(mine)], 5.0) == [Renewal(held=True)], "it has learnt"
    assert store.release(lock.release(mine)).owned
    for each in (store, other):
        each.close()


def test_keys_that_may_not_be_touched_are_unavailable(make_server: MakeServer) -> None:
    server = make_server()
    store = _user(server, LEAST, "~elsewhere:*")
    lock, mine = Lock(), token()
    for operation in (
        lambda: store.acquire(lock.ask(mine)),
        lambda: store.release(lock.release(mine)),
        lambda: store.inspect(lock.key),
    ):
        with pytest.raises(LockUnavailable):
            operation()
    assert store.renew([lock.lease(mine)], 5.0) == [None]
    store.close()
