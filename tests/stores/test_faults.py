"""Replies lost, late and cut off: what a network does between a store and its server (F1...: the model's findings)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from celery_redislock.errors import LockUnavailable
from celery_redislock.lease import Acquired, Contended, Released, Renewal
from celery_redislock.stores.base import LockStore
from celery_redislock.stores.connect import make_store
from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.waiting import wait_until
from tests.stores.harness import Lock, gone, granted, in_threads, lock_run, runtime, token
from tests.stores.proxy import CUT_AFTER, CUT_BEFORE, DELAY_REPLY, DROP_REPLY, GARBAGE, HOLD, Action, Proxy

TIMEOUT = 3.0  # redislock_timeout: a reply is waited for a third of it
TTL = 60.0  # what is gone well before this has not just ended by itself


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: Proxy) -> Iterator[LockStore]:
    """A store behind the proxy, whose scripts the server knows: each operation is one command."""
    store = make_store(proxy.url, {}, TIMEOUT)
    warm_up(store)
    yield store
    store.close()


@pytest.fixture
def direct(server: EmbeddedServer) -> Iterator[LockStore]:
    """Another client, which the faults do not touch."""
    store = make_store(server.unix_url, {}, 10.0)
    yield store
    store.close()


def warm_up(store: LockStore) -> None:
    lock, mine = Lock(), token()
    granted(store.acquire(lock.ask(mine)))
    store.renew([lock.lease(mine)], 10.0)
    store.release(lock.release(mine))


def value(server: EmbeddedServer, lock: Lock) -> str:
    return server.command("GET", lock.key).decode()


def remaining(server: EmbeddedServer, lock: Lock) -> float:
    return int(server.command("PTTL", lock.key)) / 1000


# --- one attempt, several tries


def test_an_acquire_whose_reply_is_lost_is_granted_on_the_second_try_with_the_same_token(
    proxy: Proxy, store: LockStore, server: EmbeddedServer, direct: LockStore
) -> None:
    lock, mine = Lock(), token()
    proxy.fault("acquire", DROP_REPLY, about=lock.key)
    answer = granted(store.acquire(lock.ask(mine, TTL)))
    first, second = proxy.commands("acquire", lock.key)
    assert first.connection != second.connection
    assert first.words[2:] == second.words[2:]
    assert mine.encode() in first.words
    assert value(server, lock) == mine.encode()
    assert isinstance(direct.acquire(lock.ask(token("call-2"))), Contended)
    assert answer.deadline <= first.at + TTL, "the deadline counts from the first send"
    assert remaining(server, lock) >= TTL - (time.monotonic() - second.at) - 0.01, "the server counts from the second"


def test_a_granted_lease_never_outlives_its_key(proxy: Proxy, store: LockStore, server: EmbeddedServer) -> None:
    """F2: two thirds of the lease are over when the second try finds its own token."""
    lock, mine = Lock(), token()
    proxy.fault("acquire", DROP_REPLY, about=lock.key)
    answer = granted(store.acquire(lock.ask(mine, 1.5)))
    left = remaining(server, lock)
    assert time.monotonic() + left >= answer.deadline - 0.002  # PTTL and PEXPIRE count whole milliseconds


@pytest.mark.parametrize("action", [CUT_BEFORE, CUT_AFTER])
def test_an_acquire_whose_connection_is_cut_is_granted_on_another(
    proxy: Proxy, store: LockStore, server: EmbeddedServer, action: Action
) -> None:
    lock, mine = Lock(), token()
    proxy.fault("acquire", action, about=lock.key)
    granted(store.acquire(lock.ask(mine, TTL)))
    assert value(server, lock) == mine.encode()
    assert store.release(lock.release(mine)) == Released(owned=True)
    gone(server, lock.key)


@pytest.mark.parametrize("keep", [0.0, 30.0])
@pytest.mark.parametrize("action", [DROP_REPLY, CUT_BEFORE, CUT_AFTER])
def test_a_release_whose_reply_is_lost_is_still_mine(
    proxy: Proxy, store: LockStore, server: EmbeddedServer, action: Action, keep: float
) -> None:
    lock, mine = Lock(), token()
    granted(store.acquire(lock.ask(mine, TTL)))
    proxy.fault("release", action, about=lock.key)
    assert store.release(lock.release(mine, keep)) == Released(owned=True)
    assert value(server, lock) == ("-" + mine.encode() if keep else "-1")  # EmbeddedServer's way to say nil


def test_a_release_whose_reply_is_lost_is_mine_also_if_somebody_else_was_quicker_than_the_second_try(
    proxy: Proxy, store: LockStore, server: EmbeddedServer, direct: LockStore
) -> None:
    lock, mine, successor = Lock(), token("call-1"), token("call-2")
    granted(store.acquire(lock.ask(mine, TTL)))
    fault = proxy.fault("release", DROP_REPLY, about=lock.key)
    answers: list[Released] = []
    releaser = threading.Thread(target=lambda: answers.append(store.release(lock.release(mine))))
    releaser.start()
    wait_until(lambda: fault.served, "the first try")
    granted(direct.acquire(lock.ask(successor, TTL)))
    releaser.join(30)
    assert answers[0].owned
    assert value(server, lock) == successor.encode()


@pytest.mark.parametrize("action", [DROP_REPLY, CUT_BEFORE, CUT_AFTER])
def test_an_inspection_whose_reply_is_lost_asks_again(proxy: Proxy, store: LockStore, action: Action) -> None:
    lock, mine = Lock(), token()
    granted(store.acquire(lock.ask(mine)))
    proxy.fault("GET", action, about=lock.key)
    seen = store.inspect(lock.key)
    assert seen is not None
    assert seen.holder.value == mine.encode()


@pytest.mark.parametrize("action", [DROP_REPLY, CUT_BEFORE, CUT_AFTER])
def test_renewals_whose_reply_is_lost_are_unknown_and_the_next_ones_are_right(
    proxy: Proxy, store: LockStore, server: EmbeddedServer, action: Action
) -> None:
    locks, mine = [Lock(f"v1-{n}", "proj.some") for n in range(5)], token()
    for lock in locks[:3]:
        granted(store.acquire(lock.ask(mine, TTL)))
    leases = [lock.lease(mine, TTL) for lock in locks]
    proxy.fault("renew", action, about=locks[2].key)
    assert store.renew(leases, 1.0) == [None] * 5
    assert store.renew(leases, 10.0) == [Renewal(held=True)] * 3 + [Renewal(held=False)] * 2


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*x\r\n", b":x\r\n", b"$x\r\n", b"?\r\n", b"\0"]
)
def test_an_answer_that_is_no_redis_reply_is_trouble_like_any_other(
    proxy: Proxy, store: LockStore, garbage: bytes
) -> None:
    lock, mine = Lock(), token()
    proxy.fault("acquire", GARBAGE, about=lock.key, garbage=garbage)
    granted(store.acquire(lock.ask(mine)))
    proxy.fault("renew", GARBAGE, about=lock.key, garbage=garbage)
    assert store.renew([lock.lease(mine)], 10.0) == [None]
    assert store.release(lock.release(mine)).owned


# --- attempts that are given up


def test_an_attempt_that_is_given_up_sends_a_compare_and_delete_behind_each_of_its_tries(
    proxy: Proxy, store: LockStore, server: EmbeddedServer
) -> None:
    lock, mine = Lock(), token()
    fault = proxy.fault("acquire", DROP_REPLY, about=lock.key, times=0)
    with pytest.raises(LockUnavailable):
        store.acquire(lock.ask(mine, TTL))
    gone(server, lock.key)
    wait_until(lambda: len(proxy.commands("release", lock.key)) == fault.consumed, "all compare-and-deletes")
    tries = proxy.commands("acquire", lock.key)
    deletes = proxy.commands("release", lock.key)
    assert {seen.connection for seen in deletes} == {seen.connection for seen in tries}
    assert all(mine.encode() in seen.words for seen in deletes)


def test_a_late_compare_and_delete_never_deletes_a_live_lease(
    proxy: Proxy, store: LockStore, server: EmbeddedServer
) -> None:
    """F1: the first attempt's commands arrive when the second attempt has been granted the lock."""
    lock, of = Lock(), runtime(store, TIMEOUT)
    run = lock_run(of, lock, ttl=TTL)
    first = run._token
    held_up = proxy.fault("acquire", HOLD, about=first.nonce, times=0)
    with pytest.raises(LockUnavailable):
        run.take()
    assert run.lock is None
    assert run.uncertain
    granted(run.take())
    assert run._token.nonce != first.nonce
    assert value(server, lock) == run._token.encode()
    held_up.let_go()
    wait_until(
        lambda: len(proxy.commands("release", lock.key)) == held_up.consumed == held_up.served, "what was held up"
    )
    warm_up(store)  # whatever came before this has been executed
    assert value(server, lock) == run._token.encode()
    assert run.lock is not None
    run.lock.ensure_held()
    run.leave(finished=True)
    gone(server, lock.key)


def test_a_try_that_arrives_when_a_later_one_has_been_granted_does_not_end_the_lease(
    proxy: Proxy, store: LockStore, server: EmbeddedServer
) -> None:
    """F1 again: a compare-and-delete may only follow when the whole attempt is given up."""
    lock, mine = Lock(), token()
    late = proxy.fault("acquire", HOLD, about=lock.key)
    granted(store.acquire(lock.ask(mine, TTL)))
    late.let_go()
    wait_until(lambda: late.served, "the first try")
    warm_up(store)
    assert value(server, lock) == mine.encode()
    assert proxy.commands("release", lock.key) == []


def test_a_new_attempt_waits_for_its_abandoned_predecessor_and_then_holds_the_lock_alone(
    proxy: Proxy, store: LockStore, server: EmbeddedServer
) -> None:
    lock, of = Lock(), runtime(store, TIMEOUT)
    run = lock_run(of, lock, ttl=TTL)
    lost = proxy.fault("acquire", DROP_REPLY, about=run._token.nonce, times=0)
    with pytest.raises(LockUnavailable):
        run.take()
    wait_until(lambda: isinstance(run.take(), Acquired), "the compare-and-delete", timeout=10)
    wait_until(lambda: len(proxy.commands("release", lock.key)) == lost.consumed, "all compare-and-deletes")
    warm_up(store)
    assert value(server, lock) == run._token.encode()
    run.leave(finished=True)
    gone(server, lock.key)


def test_an_acquire_that_arrives_when_its_call_is_long_over_blocks_for_no_more_than_one_lease(
    proxy: Proxy, store: LockStore, server: EmbeddedServer, direct: LockStore
) -> None:
    """F11: nothing can take back a command that the network delivers after a successful second try."""
    lock, mine = Lock(), token()
    late = proxy.fault("acquire", HOLD, about=lock.key)
    granted(store.acquire(lock.ask(mine, 2.0)))
    assert store.release(lock.release(mine)).owned
    late.let_go()
    wait_until(lambda: late.served, "the late acquire")
    assert remaining(server, lock) <= 2.0
    wait_until(lambda: isinstance(direct.acquire(lock.ask(token("call-2"))), Acquired), "the lease to end", timeout=10)


# --- replies that come too late


def after(seconds: float, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def test_a_grant_that_comes_when_most_of_the_lease_is_over_is_given_back_and_the_body_never_starts(
    proxy: Proxy, server: EmbeddedServer
) -> None:
    """F3, with a timeout that is longer than the lease."""
    store = make_store(proxy.url, {}, 60.0)
    warm_up(store)
    lock, of = Lock(), runtime(store, 60.0)
    run = lock_run(of, lock, ttl=3.0)
    late = proxy.fault("acquire", DELAY_REPLY, about=lock.key)
    after(2.2, late.let_go)
    with pytest.raises(LockUnavailable, match="too late to start"):
        run.take()
    assert run.lock is None
    assert of.keeper.holds() == []
    assert remaining(server, lock) < 0, "given back, not left to end"
    store.close()


def test_a_grant_that_comes_after_the_lease_is_over_is_not_started_on(proxy: Proxy, server: EmbeddedServer) -> None:
    store = make_store(proxy.url, {}, 60.0)
    warm_up(store)
    lock, of = Lock(), runtime(store, 60.0)
    run = lock_run(of, lock, ttl=0.3)
    late = proxy.fault("acquire", DELAY_REPLY, about=lock.key)
    after(0.5, late.let_go)
    with pytest.raises(LockUnavailable):
        run.take()
    assert run.lock is None
    store.close()


def test_the_first_renewal_is_due_a_third_of_the_lease_after_the_first_send(proxy: Proxy, store: LockStore) -> None:
    lock, of = Lock(), runtime(store, TIMEOUT)
    run = lock_run(of, lock, ttl=TTL)
    late = proxy.fault("acquire", DELAY_REPLY, about=lock.key)
    after(0.4, late.let_go)
    granted(run.take())
    (hold,) = of.keeper.holds()
    (asked,) = proxy.commands("acquire", lock.key)
    assert hold.due <= asked.at + TTL / 3
    run.leave(finished=True)


# --- servers that stand still


def test_a_frozen_server_makes_acquire_give_up_in_time_and_leaves_no_lock_after_the_thaw(
    server: EmbeddedServer,
) -> None:
    store = make_store(server.url, {}, 1.5)
    warm_up(store)
    lock, mine = Lock(), token()
    server.pause()
    started = time.monotonic()
    with pytest.raises(LockUnavailable):
        store.acquire(lock.ask(mine, TTL))
    took = time.monotonic() - started
    server.resume()
    assert took < 1.5 + 3
    wait_until(lambda: server.command("EXISTS", lock.fence_key) == b"1", "the acquire to be executed")
    gone(server, lock.key)
    warm_up(store)
    gone(server, lock.key)
    store.close()


@pytest.mark.parametrize("operation", ["release", "inspect", "renew"])
def test_a_frozen_server_bounds_every_other_operation_too(server: EmbeddedServer, operation: str) -> None:
    store = make_store(server.url, {}, 1.5)
    warm_up(store)  # what is sent to a frozen server, by its hash, has to be known there after the thaw
    lock, mine = Lock(), token()
    granted(store.acquire(lock.ask(mine, TTL)))
    store.renew([lock.lease(mine, TTL)], 10.0)
    server.pause()
    started = time.monotonic()
    if operation == "renew":
        assert store.renew([lock.lease(mine, TTL)] * 600, 0.5) == [None] * 600
    else:
        with pytest.raises(LockUnavailable):
            store.release(lock.release(mine)) if operation == "release" else store.inspect(lock.key)
    took = time.monotonic() - started
    server.resume()
    assert took < 1.5 + 3
    if operation == "release":
        gone(server, lock.key)  # executed after the thaw
    else:
        assert store.release(lock.release(mine)).owned
    store.close()


def test_a_network_that_stands_still_is_no_different(proxy: Proxy, store: LockStore, server: EmbeddedServer) -> None:
    lock, mine = Lock(), token()
    proxy.freeze()
    with pytest.raises(LockUnavailable):
        store.acquire(lock.ask(mine, TTL))
    proxy.thaw()
    wait_until(lambda: server.command("EXISTS", lock.fence_key) == b"1", "the acquire to be executed")
    gone(server, lock.key)
    granted(store.acquire(lock.ask(token(), TTL)))


# --- connections that have died meanwhile


def test_idle_connections_that_have_died_do_not_fail_the_next_operation(proxy: Proxy, store: LockStore) -> None:
    barrier = threading.Barrier(5)

    def ask(_: int) -> None:
        lock, mine = Lock(), token()
        barrier.wait(30)
        granted(store.acquire(lock.ask(mine)))
        store.release(lock.release(mine))

    in_threads(5, ask)
    for operation in range(4):
        proxy.cut_all()
        lock, mine = Lock(), token()
        if operation % 2:
            assert store.inspect(lock.key) is None
        granted(store.acquire(lock.ask(mine)))
        proxy.cut_all()
        assert store.release(lock.release(mine)).owned


def test_a_restarted_server_does_not_fail_the_next_operation(server: EmbeddedServer) -> None:
    store = make_store(server.url, {}, 10.0)
    for _ in range(2):
        lock, mine = Lock(), token()
        granted(store.acquire(lock.ask(mine)))
        assert store.renew([lock.lease(mine)], 10.0) == [Renewal(held=True)]
        server.restart()
        store.release(lock.release(mine))
        wait_until(lambda: store.renew([lock.lease(mine)], 10.0) == [Renewal(held=False)], "a new connection")  # noqa: B023
    store.close()


def test_an_operation_lasts_over_a_restart(server: EmbeddedServer) -> None:
    store = make_store(server.url, {}, 20.0)
    warm_up(store)
    server.stop()
    after(0.3, server.start)
    lock, mine = Lock(), token()
    granted(store.acquire(lock.ask(mine)))
    assert store.release(lock.release(mine)).owned
    store.close()
