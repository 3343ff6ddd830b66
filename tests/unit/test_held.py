"""celery_redislock.held: the lock as the code that runs under it sees it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from celery_redislock import held as module
from celery_redislock.errors import LockLost, LockUnavailable
from celery_redislock.held import HeldLock, current_lock, lock_on_stack
from celery_redislock.keeper.plan import Hold, Loss
from celery_redislock.lease import TOMBSTONE, Acquired, Contended, Lease, Renewal, Token
from celery_redislock.stores.base import Ask, Release
from celery_redislock.stores.memory import MemoryStore

KEY, TTL = "redislock:{proj.sync}:v1-0", 30.0


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


class CountingStore(MemoryStore):
    """Counts the questions; may be out of reach."""

    asked = 0
    reachable = True

    def inspect(self, key: str) -> Contended | None:
        self.asked += 1
        if not self.reachable:
            raise LockUnavailable("the lock store can't be used: TimeoutError")
        return super().inspect(key)


@dataclass
class Held:
    """A lock that is held, with all that is behind it."""

    lock: HeldLock
    hold: Hold
    store: CountingStore
    lease: Lease


def take(store: CountingStore, key: str = KEY, *, now: float) -> Held:
    token = Token.new("8c1f", 0, "celery@web1", 4711, 1)
    lease = Lease(key, token.encode(), TTL)
    grant = store.acquire(Ask(lease, "fence", token.tombstone_prefix))
    assert isinstance(grant, Acquired)
    hold = Hold(lease, None, sent=now)
    return Held(HeldLock("proj.sync", hold, grant.fence, store), hold, store, lease)


@pytest.fixture
def held(clock: Clock) -> Held:
    return take(CountingStore(clock), now=clock.now)


@pytest.fixture(autouse=True)
def nothing_is_left_current() -> Iterator[None]:
    assert current_lock() is None
    yield
    left = current_lock()
    if left is not None:  # so that one failure does not make others
        left.leave()
    assert left is None


# --- what it says


def test_it_says_key_fence_token_and_lease(held: Held) -> None:
    lock = held.lock
    assert (lock.key, lock.token, lock.lease) == (KEY, held.lease.token, held.lease)
    assert lock.fence == 1000 * 1_000_000


def test_it_is_shown_without_its_token(held: Held, clock: Clock) -> None:
    clock.now += 10
    assert repr(held.lock) == f"<HeldLock {KEY} fence=1000000000 remaining=20.0s>"
    assert held.lease.token not in f"{held.lock} {held.lock!r}"


# --- how long it is certain


def test_the_time_left_counts_down_to_nothing_and_not_below(held: Held, clock: Clock) -> None:
    left = []
    for _ in range(5):
        left.append(held.lock.remaining())
        clock.now += 10
    assert left == [30.0, 20.0, 10.0, 0.0, 0.0]
    assert held.store.asked == 0


def test_a_renewal_gives_time_again(held: Held, clock: Clock) -> None:
    clock.now += 25
    held.hold.answered(Renewal(held=True), sent=clock.now, now=clock.now)
    assert held.lock.remaining() == TTL


def test_it_is_held_until_the_lease_may_have_ended(held: Held, clock: Clock) -> None:
    assert held.lock.held
    clock.now += TTL - 0.001
    assert held.lock.held
    clock.now += 0.001
    assert not held.lock.held
    assert held.store.asked == 0


def test_a_lock_that_counts_as_lost_is_not_held_but_has_its_time(held: Held) -> None:
    held.hold.loss = Loss.UNREACHABLE
    assert not held.lock.held
    assert held.lock.remaining() == TTL


@pytest.mark.parametrize("loss", [Loss.TAKEN, Loss.MISSING])
def test_a_lock_that_is_lost_for_good_has_no_time_left(held: Held, loss: Loss) -> None:
    held.hold.loss, held.hold.final = loss, True
    assert not held.lock.held
    assert held.lock.remaining() == 0.0


# --- asking the store


def test_asking_costs_one_question_and_says_nothing_while_it_is_held(held: Held) -> None:
    held.lock.ensure_held()
    assert held.store.asked == 1


def test_a_key_that_has_gone_is_lost(held: Held, clock: Clock) -> None:
    clock.now += TTL
    with pytest.raises(LockLost) as caught:
        held.lock.ensure_held()
    assert (caught.value.key, caught.value.reason) == (KEY, "missing")
    assert str(caught.value) == f"proj.sync: the lease on {KEY} is gone (missing); another run may have started"


def test_a_key_that_somebody_else_has_is_lost(held: Held, clock: Clock) -> None:
    clock.now += TTL
    take(held.store, now=clock.now)
    with pytest.raises(LockLost) as caught:
        held.lock.ensure_held()
    assert (caught.value.key, caught.value.reason) == (KEY, "taken")
    assert held.lease.token not in str(caught.value)


def test_what_my_own_run_left_after_its_end_is_not_held(held: Held) -> None:
    held.store.release(Release(held.lease, keep=10.0, tombstone=TOMBSTONE + held.lease.token))
    with pytest.raises(LockLost):
        held.lock.ensure_held()


def test_a_lock_that_was_only_unreachable_is_asked_about_again(held: Held) -> None:
    held.hold.loss = Loss.UNREACHABLE
    held.lock.ensure_held()
    assert held.store.asked == 1


@pytest.mark.parametrize(("loss", "reason"), [(Loss.TAKEN, "taken"), (Loss.MISSING, "missing"), (None, "missing")])
def test_a_lock_that_is_lost_for_good_is_lost_without_asking(held: Held, loss: Loss | None, reason: str) -> None:
    held.hold.loss, held.hold.final = loss, True
    with pytest.raises(LockLost) as caught:
        held.lock.ensure_held()
    assert caught.value.reason == reason
    assert held.store.asked == 0


def test_a_store_that_can_not_be_asked_is_not_taken_for_a_loss(held: Held) -> None:
    held.store.reachable = False
    with pytest.raises(LockUnavailable):
        held.lock.ensure_held()


# --- which one is current


def test_a_lock_is_current_from_entering_to_leaving(held: Held) -> None:
    held.lock.enter()
    assert current_lock() is held.lock
    held.lock.leave()
    assert current_lock() is None


def test_leaving_twice_and_leaving_what_was_not_entered_change_nothing(held: Held, clock: Clock) -> None:
    other = take(held.store, "other", now=clock.now).lock
    other.leave()
    held.lock.enter()
    other.leave()
    assert current_lock() is held.lock
    held.lock.leave()
    held.lock.leave()
    assert current_lock() is None


def test_an_inner_lock_gives_way_to_the_outer_one(held: Held, clock: Clock) -> None:
    inner = take(held.store, "inner", now=clock.now).lock
    held.lock.enter()
    inner.enter()
    assert current_lock() is inner
    inner.leave()
    assert current_lock() is held.lock
    held.lock.leave()


def test_a_lock_may_be_left_in_another_context_than_it_was_entered_in(held: Held) -> None:
    contextvars.copy_context().run(held.lock.enter)
    assert current_lock() is None
    held.lock.leave()
    assert current_lock() is None


def test_a_thread_that_the_run_starts_has_no_current_lock(held: Held) -> None:
    seen: list[object] = []
    held.lock.enter()
    thread = threading.Thread(target=lambda: seen.append(current_lock()))
    thread.start()
    thread.join()
    held.lock.leave()
    assert seen == [None]


def test_every_lock_on_the_call_stack_is_found_by_its_key_and_no_other(held: Held, clock: Clock) -> None:
    inner = take(held.store, "inner", now=clock.now).lock
    assert lock_on_stack(KEY) is None
    held.lock.enter()
    inner.enter()
    assert [lock_on_stack(key) for key in (KEY, "inner", "other")] == [held.lock, inner, None]
    inner.leave()
    assert [lock_on_stack(key) for key in (KEY, "inner", "other")] == [held.lock, None, None]
    held.lock.leave()
    assert lock_on_stack(KEY) is None


def test_a_current_lock_that_left_elsewhere_ends_the_search(held: Held) -> None:
    held.lock.enter()
    contextvars.copy_context().run(held.lock.leave)
    assert current_lock() is held.lock  # this context still thinks so
    assert lock_on_stack("other") is None
    module._current.set(None)
