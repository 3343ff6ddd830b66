"""The keeper's thread against a real server."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from celery_redislock.errors import LockUnavailable
from celery_redislock.keeper import keeper as keeper_module
from celery_redislock.keeper.keeper import Keeper
from celery_redislock.keeper.plan import Change, Hold, Loss
from celery_redislock.lease import Acquired, Lease, Renewal
from celery_redislock.stores.base import LockStore
from celery_redislock.stores.connect import make_store
from celery_redislock.stores.memory import MemoryStore
from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.waiting import wait_until
from tests.stores.conformance import ROOT
from tests.stores.harness import Lock, Monitor, granted, in_threads, monitor, token

RECOVERED = Change(None)


class Kept:
    """A keeper, and what it has told."""

    def __init__(self, store: LockStore, timeout: float = 5.0) -> None:
        self.store = store
        self.changes: list[tuple[Lock, Change]] = []
        self.late: list[float] = []
        self.keeper = Keeper(
            store,
            timeout,
            lambda hold, change: self.changes.append((hold.owner, change)),
            lambda hold, late: self.late.append(late),
        )

    def keep(self, ttl: float, lock: Lock | None = None, *, age: float = 0.0, **options: Any) -> tuple[Lock, Hold]:
        """Take a lock and keep it, as if it had been taken ``age`` s ago."""
        lock, mine = lock or Lock(), token()
        grant = granted(self.store.acquire(lock.ask(mine, ttl)))
        hold = Hold(lock.lease(mine, ttl), lock, sent=grant.deadline - ttl - age, **options)
        self.keeper.hold(hold)
        return lock, hold

    def told(self, lock: Lock) -> list[Loss | None]:
        return [change.loss for owner, change in self.changes if owner is lock]


@pytest.fixture
def store(server: EmbeddedServer) -> Iterator[LockStore]:
    store = make_store(server.url, {}, 5.0)
    yield store
    store.close()


@pytest.fixture
def kept(store: LockStore) -> Iterator[Kept]:
    kept = Kept(store)
    yield kept
    for hold in kept.keeper.holds():
        kept.keeper.drop(hold)


@pytest.fixture
def watch(server: EmbeddedServer) -> Iterator[Monitor]:
    with monitor(server) as watch:
        yield watch


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        yield client


def keeper_threads() -> int:
    return sum(thread.name == "redislock-keeper" for thread in threading.enumerate())


def renewals(watch: Monitor, lock: Lock, at_least: int) -> list[float]:
    """When the next renewals of the lock came, by the server's clock."""
    times: list[float] = []

    def look() -> bool:
        times.extend(each.at for each in watch.commands(lock.key) if each.words[0].upper() == "EVALSHA")
        return len(times) >= at_least

    wait_until(look, lambda: f"{at_least} renewals, not {len(times)}")
    return times


# --- renewing


def test_a_lease_is_renewed_each_third_of_it_and_its_key_never_ends(
    kept: Kept, watch: Monitor, client: redis.Redis
) -> None:
    kept.keep(0.1)  # the scripts are known to the server from now on
    ttl = 1.5
    lock, hold = kept.keep(ttl)
    watch.commands("")
    started, samples = time.monotonic(), []
    while time.monotonic() < started + 3 * ttl:
        samples.append(client.pttl(lock.key))
        time.sleep(0.02)
    times = renewals(watch, lock, at_least=5)
    assert min(samples) > 0
    assert len(times) <= (times[-1] - times[0]) / (ttl / 3) + 2
    assert client.get(lock.key).decode() == hold.lease.token
    assert kept.told(lock) == []


def test_a_thousand_leases_are_renewed_in_few_round_trips(kept: Kept, client: redis.Redis) -> None:
    now = time.monotonic()
    holds = []
    with client.pipeline() as pipeline:
        for number in range(1_000):
            lock, mine = Lock(f"v1-{number}", "proj.many"), token()
            holds.append(Hold(lock.lease(mine, 90.0), lock, sent=now - 30.0))
            pipeline.set(lock.key, mine.encode(), ex=60)
        pipeline.execute()
    before = client.info("stats")["total_reads_processed"]
    for hold in holds:
        kept.keeper.hold(hold)
    wait_until(lambda: all(hold.deadline > now + 80 for hold in holds), "all renewals")
    reads = client.info("stats")["total_reads_processed"] - before
    assert reads < 300, "one by one it would be a thousand"
    assert all(client.pttl(hold.lease.key) > 60_000 for hold in holds)


def test_a_short_lease_that_comes_while_the_keeper_sleeps_wakes_it(kept: Kept, client: redis.Redis) -> None:
    kept.keep(600.0)
    time.sleep(0.1)  # it sleeps; no matter if not
    lock, hold = kept.keep(1.8)
    first = hold.deadline
    wait_until(lambda: hold.deadline > first + 2.0, "renewals for longer than the lease")
    assert client.exists(lock.key)
    assert kept.told(lock) == []


def test_a_dropped_lease_is_never_renewed_again(kept: Kept, watch: Monitor, client: redis.Redis) -> None:
    dropped, hold = kept.keep(0.6)
    other, _ = kept.keep(0.6)
    renewals(watch, dropped, at_least=2)
    kept.keeper.drop(hold)
    kept.keeper.drop(hold)
    renewals(watch, other, at_least=1)  # what was under way has arrived
    watch.commands("")
    started = time.monotonic()
    seen = []
    while time.monotonic() < started + 1.0:
        seen += watch.commands(dropped.key)
        time.sleep(0.05)
    assert seen == []
    wait_until(lambda: not client.exists(dropped.key), "the dropped lease to end")
    assert client.exists(other.key)
    assert kept.told(dropped) == []


def test_a_release_that_races_renewals_never_leaves_a_key(kept: Kept, client: redis.Redis) -> None:
    lock = Lock()
    for _ in range(150):
        _, hold = kept.keep(30.0, lock, age=10.0)  # due at once
        kept.keeper.drop(hold)
        assert kept.store.release(_release(hold)).owned
    time.sleep(0.2)  # whatever was under way
    assert not client.exists(lock.key)
    assert kept.told(lock) == []
    assert kept.keeper.holds() == []


def _release(hold: Hold) -> Any:
    from celery_redislock.stores.base import Release

    return Release(hold.lease)


def test_nothing_is_renewed_after_max_hold(kept: Kept, watch: Monitor, client: redis.Redis) -> None:
    kept.keep(0.1)
    lock, _ = kept.keep(0.9, max_hold=0.8)
    wait_until(lambda: kept.told(lock), "the loss")
    assert kept.told(lock) == [Loss.MAX_HOLD]
    assert not client.exists(lock.key)
    taken, *renewed = (each for each in watch.commands(lock.key) if each.words[0].upper() == "EVALSHA")
    assert all(each.at - taken.at < 0.8 for each in renewed)


def test_a_lease_without_renewal_ends_and_is_told_as_expired(kept: Kept, watch: Monitor, client: redis.Redis) -> None:
    lock, _ = kept.keep(0.4, renew=False)
    wait_until(lambda: kept.told(lock), "the loss")
    assert kept.told(lock) == [Loss.EXPIRED]
    wait_until(lambda: not client.exists(lock.key), "the key to go")
    assert len([each for each in watch.commands(lock.key) if each.origin != "lua" and "EVAL" in each.words[0]]) <= 2


# --- releases that have failed


@pytest.fixture
def hasty(server: EmbeddedServer) -> Iterator[Kept]:
    """A keeper whose store gives up soon."""
    store = make_store(server.url, {}, 0.6)
    yield Kept(store, timeout=0.6)
    store.close()


@pytest.mark.parametrize("keep", [0.0, 40.0])
def test_a_release_that_has_failed_is_repeated_until_it_works(hasty: Kept, client: redis.Redis, keep: float) -> None:
    lock, mine = Lock(), token()
    wait_until(lambda: isinstance(_tried(lambda: hasty.store.acquire(lock.ask(mine, 60.0))), Acquired), "the lock")
    client.replicaof("127.0.0.1", 1)  # read-only
    assert _tried(lambda: hasty.store.release(lock.release(mine, keep))) is None
    hasty.keeper.release_later(lock.release(mine, keep), time.monotonic() + 60.0)
    client.replicaof("NO", "ONE")
    if keep:
        wait_until(lambda: client.get(lock.key) == b"-" + mine.encode().encode(), "the tombstone")
        assert 0 < client.pttl(lock.key) <= 40_000
    else:
        wait_until(lambda: not client.exists(lock.key), "the key to go")


def test_a_failed_release_is_not_repeated_when_its_lease_has_ended(hasty: Kept, client: redis.Redis) -> None:
    lock, mine = Lock(), token()
    client.set(lock.key, mine.encode(), px=60_000)
    client.replicaof("127.0.0.1", 1)
    hasty.keeper.release_later(lock.release(mine), time.monotonic() + 1.0)
    wait_until(lambda: not hasty.keeper._unreleased, "the end of the lease")
    client.replicaof("NO", "ONE")
    assert client.exists(lock.key), "it was somebody else's by then, for all that is known"


def _tried(operation: Callable[[], Any]) -> Any:
    try:
        return operation()
    except LockUnavailable:
        return None


# --- losing


def test_a_deleted_key_is_lost_as_missing_once_and_never_made_again(
    kept: Kept, watch: Monitor, client: redis.Redis
) -> None:
    lock, hold = kept.keep(0.9)
    client.delete(lock.key)
    wait_until(lambda: kept.told(lock), "the loss")
    watch.commands("")
    time.sleep(0.7)
    assert kept.told(lock) == [Loss.MISSING]
    assert hold.final
    assert not client.exists(lock.key)
    assert watch.commands(lock.key)[:-1] == [], "nobody asks any more (the last one was this test)"


def test_a_key_that_somebody_else_has_is_lost_as_taken_once_and_left_alone(kept: Kept, client: redis.Redis) -> None:
    lock, _ = kept.keep(0.9)
    client.set(lock.key, "somebody else", px=60_000)
    wait_until(lambda: kept.told(lock), "the loss")
    time.sleep(0.7)
    assert kept.told(lock) == [Loss.TAKEN]
    assert client.get(lock.key) == b"somebody else"
    assert client.pttl(lock.key) <= 60_000


@pytest.mark.parametrize("still_there", [True, False])
def test_a_server_that_stands_still_for_longer_than_a_lease_loses_it_for_good_or_not(
    kept: Kept, server: EmbeddedServer, client: redis.Redis, still_there: bool
) -> None:
    lock, hold = kept.keep(0.9)
    if still_there:
        client.persist(lock.key)
    server.pause()
    wait_until(lambda: kept.told(lock), "the loss")
    assert kept.told(lock) == [Loss.UNREACHABLE]
    assert not hold.final
    if not still_there:
        time.sleep(1.0)  # longer than the last renewal that may have arrived has given it
    server.resume()
    if still_there:
        wait_until(lambda: len(kept.told(lock)) == 2, "news")
        assert kept.told(lock) == [Loss.UNREACHABLE, None]
        assert 0 < client.pttl(lock.key) <= 900
    else:
        wait_until(lambda: hold.final, "the truth")
        assert kept.told(lock) == [Loss.UNREACHABLE], "told once"
        assert not client.exists(lock.key)


def test_a_server_that_stands_still_for_less_than_a_lease_costs_nothing(
    kept: Kept, server: EmbeddedServer, client: redis.Redis
) -> None:
    lock, hold = kept.keep(20.0, age=6.6)
    server.pause()
    time.sleep(0.5)
    server.resume()
    before = hold.deadline
    wait_until(lambda: hold.deadline > before, "the next renewal")
    assert kept.told(lock) == []


def test_a_restarted_server_has_lost_every_lease(kept: Kept, server: EmbeddedServer) -> None:
    locks = [kept.keep(1.5)[0] for _ in range(3)]
    server.restart()
    wait_until(lambda: all(kept.told(lock) for lock in locks), "the losses")
    assert [kept.told(lock) for lock in locks] == [[Loss.MISSING]] * 3


# --- the thread


class Broken:
    """A store whose renewals raise."""

    def __init__(self, store: LockStore, times: float) -> None:
        self._store = store
        self.left = times

    def renew(self, leases: Sequence[Lease], timeout: float) -> list[Renewal | None]:
        if self.left > 0:
            self.left -= 1
            raise RuntimeError("a bug")
        return self._store.renew(leases, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_bug_is_shouted_about_and_the_thread_goes_on(
    store: LockStore, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(Broken(store, times=1))
    lock, hold = kept.keep(30.0, age=10.0)
    before = hold.deadline
    wait_until(lambda: hold.deadline > before, "a renewal after the bug")
    assert [record.levelno for record in caplog.records if "met a bug" in record.message] == [logging.CRITICAL]
    assert "RuntimeError: a bug" in caplog.text
    assert kept.told(lock) == []
    kept.keeper.drop(hold)


def test_a_bug_that_stays_does_not_hide_that_leases_end(store: LockStore, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(Broken(store, times=float("inf")))
    lock, hold = kept.keep(0.6)
    wait_until(lambda: kept.told(lock), "the loss")
    kept.keeper.drop(hold)
    assert kept.told(lock) == [Loss.EXPIRED]


def test_a_listener_that_raises_does_not_stop_renewals(store: LockStore, caplog: pytest.LogCaptureFixture) -> None:
    def listen(*_: object) -> None:
        raise RuntimeError("a listener's bug")

    kept = Kept(store)
    kept.keeper = Keeper(store, 5.0, listen, listen)
    _, hold = kept.keep(30.0, age=10.0)
    _, gone = kept.keep(0.3, renew=False)
    wait_until(lambda: "a listener's bug" in caplog.text, "the bug")
    _, third = kept.keep(30.0, age=10.0)
    before = third.deadline
    wait_until(lambda: third.deadline > before, "a renewal after the bug")
    for each in (hold, gone, third):
        kept.keeper.drop(each)


def test_a_renewal_that_is_sent_late_is_told_with_how_late_it_is(kept: Kept) -> None:
    kept.keep(30.0, age=12.0)  # 2 s late: may happen
    kept.keep(30.0, age=25.0)  # 15 s late: one of three chances is gone
    wait_until(lambda: kept.late, "the warning")
    assert len(kept.late) == 1
    assert 15.0 <= kept.late[0] < 25.0


def test_many_threads_that_hold_at_once_start_one_thread() -> None:
    before, keepers = keeper_threads(), 20
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(keepers):
            kept, barrier = Kept(MemoryStore()), threading.Barrier(8)

            def work(_: int, kept: Kept = kept, barrier: threading.Barrier = barrier) -> None:
                barrier.wait(30)
                for _ in range(5):
                    kept.keeper.drop(kept.keep(30.0)[1])

            in_threads(8, work)
            assert kept.keeper.holds() == []
    finally:
        sys.setswitchinterval(interval)
    assert keeper_threads() - before == keepers


def test_the_thread_stays_one_however_many_leases_come_and_go(kept: Kept) -> None:
    before = keeper_threads()
    for number in range(300):
        _, hold = kept.keep(0.3 if number % 3 else 30.0, age=10.0 if number % 5 == 0 else 0.0)
        kept.keeper.drop(hold)
    wait_until(lambda: keeper_threads() > before, "the thread")
    assert keeper_threads() == before + 1
    assert kept.keeper.holds() == []


def test_a_thread_that_could_not_be_started_is_started_with_the_next_lease(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(target: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(keeper_module, "start_thread", fail)
        with pytest.raises(RuntimeError):
            kept.keep(30.0)
    _, hold = kept.keep(30.0, age=10.0)
    before = hold.deadline
    wait_until(lambda: hold.deadline > before, "a renewal")


def test_a_forked_child_keeps_its_own_leases_and_none_of_its_parents(server: EmbeddedServer) -> None:
    parent, child = Lock("v1-parent", "proj.kept"), Lock("v1-child", "proj.kept")
    with monitor(server) as watch:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.stores.forking", "keeper", server.url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        watch.commands("")
        origins: dict[str, list[str]] = {parent.key: [], child.key: []}

        def look() -> bool:
            for each in watch.commands("proj.kept"):
                if each.origin != "lua":
                    origins[next(word for word in each.words if word in origins)].append(each.origin)
            return all(len(set(of)) >= 1 and len(of) >= 4 for of in origins.values())

        wait_until(look, lambda: f"renewals by both: {origins}")
        _, errors = process.communicate("", timeout=30)
        assert (process.returncode, errors) == (0, "")
    assert len(set(origins[parent.key])) == 1, "the parent's lease is the parent's"
    assert set(origins[parent.key]).isdisjoint(origins[child.key])
