"""What every store must do. A new one is right when a subclass of `StoreConformance` passes whose fixture ``subject``
hands it out; one that talks to a server, when a subclass of `ServerConformance` does.
"""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from celery_redislock.lease import TOMBSTONE, AlreadyDone, Contended, Holder, Released, Renewal, Token
from celery_redislock.stores.base import Release
from tests.stores.harness import Executed, Lock, ServerSubject, Subject, clients, granted, in_threads, monitor, token

SHORT = 0.15  # a lease that ends within the test, s
ROOT = Path(__file__).parents[2]

HOSTILE = {
    "a foreign plain string": b"somebody else",
    "an empty string": b"",
    "seven fields of garbage": b"1|a|b|c|d|e|f",
    "seven fields, numbers too long to read": b"1|t|%b|n|w|1|1" % (b"9" * 5000),
    "another version": b"2|call-1|0|nonce|worker|1|1",
    "a field too many": b"1|call-1|0|nonce|worker|1|1|",
    "broken escapes": b"1|%FF%zz%|0|nonce|%ED%A0%80%|1|1",
    "nothing but a tombstone's mark": b"-",
    "binary": bytes(range(256)),
    "a long one": b"x" * 100_000,
}


class StoreConformance:
    """The contract of `celery_redislock.stores.base.LockStore`."""

    # --- grant and deny

    def test_a_free_lock_is_granted_and_holds_the_token(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        before = subject.now()
        answer = granted(subject.store.acquire(lock.ask(mine, 30.0)))
        assert subject.value(lock.key) == mine.encode().encode()
        assert 0 <= answer.deadline - before - 30.0 <= subject.slack
        assert 30.0 - subject.slack <= subject.ttl(lock.key) <= 30.0 + 1e-6

    def test_a_held_lock_is_denied_to_everybody_else(self, subject: Subject) -> None:
        lock, first = Lock(), token("call-1")
        granted(subject.store.acquire(lock.ask(first)))
        for task_id in ("call-2", "call-1"):
            assert isinstance(subject.store.acquire(lock.ask(token(task_id))), Contended)
        assert subject.value(lock.key) == first.encode().encode()

    def test_the_denied_learns_who_holds_the_lock_and_for_how_long(self, subject: Subject) -> None:
        lock = Lock()
        first = Token.new("call|with %strange\nname\ud800", 3, "celery@host|1", 4242, 987654321)
        granted(subject.store.acquire(lock.ask(first, 30.0)))
        denied = subject.store.acquire(lock.ask(token("call-2")))
        assert isinstance(denied, Contended)
        holder = denied.holder
        assert (holder.task_id, holder.retries) == ("call|with %strange\nname\ud800", 3)
        assert (holder.worker, holder.pid, holder.start) == ("celery@host|1", 4242, 987654321)
        assert not holder.released
        assert holder.value == first.encode()
        assert 30.0 - subject.slack <= denied.remaining <= 30.0 + 1e-6
        assert denied.began is None

    def test_the_stores_clock_goes_on_between_two_denials(self, subject: Subject) -> None:
        lock = Lock()
        granted(subject.store.acquire(lock.ask(token())))
        first = subject.store.acquire(lock.ask(token("call-2")))
        subject.pass_time(SHORT)
        second = subject.store.acquire(lock.ask(token("call-2")))
        assert SHORT * 0.99 <= second.now - first.now <= SHORT + subject.slack

    def test_different_keys_do_not_exclude_each_other(self, subject: Subject) -> None:
        name = "proj.shared"
        for id_ in ("v1-0", "v1-1", "q:v1-0"):
            granted(subject.store.acquire(Lock(id_, name).ask(token())))

    def test_a_lease_that_nobody_renews_ends_by_itself(self, subject: Subject) -> None:
        lock = Lock()
        granted(subject.store.acquire(lock.ask(token("call-1"), SHORT)))
        subject.pass_time(2 * SHORT)
        assert subject.store.inspect(lock.key) is None
        granted(subject.store.acquire(lock.ask(token("call-2"))))

    def test_inspect_tells_the_holder_and_changes_nothing(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        assert subject.store.inspect(lock.key) is None
        granted(subject.store.acquire(lock.ask(mine, 30.0)))
        seen = subject.store.inspect(lock.key)
        assert seen is not None
        assert seen.holder.value == mine.encode()
        assert 30.0 - subject.slack <= seen.remaining <= 30.0 + 1e-6
        assert subject.value(lock.key) == mine.encode().encode()

    def test_a_closed_store_opens_again_when_it_is_used(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine)))
        subject.store.renew([lock.lease(mine)], 5.0)
        subject.store.close()
        assert subject.store.renew([lock.lease(mine)], 5.0) == [Renewal(held=True)]
        assert subject.store.release(lock.release(mine)).owned

    # --- fencing

    def test_each_grant_has_a_greater_fence_than_all_before_it_under_the_same_name(self, subject: Subject) -> None:
        fences = []
        for number in range(40):
            lock, mine = Lock(f"v1-{number % 7}", "proj.fenced"), token()
            fences.append(granted(subject.store.acquire(lock.ask(mine))).fence)
            subject.store.release(lock.release(mine))
        assert fences == sorted(set(fences))

    @pytest.mark.parametrize("loss", ["flush", "fence key deleted", "lock and fence key deleted"])
    def test_the_fence_does_not_go_back_when_the_store_loses_it(self, subject: Subject, loss: str) -> None:
        lock = Lock()
        fences = []
        for _ in range(5):
            mine = token()
            fences.append(granted(subject.store.acquire(lock.ask(mine))).fence)
            subject.store.release(lock.release(mine))
            subject.pass_time(0.002)
            if loss == "flush":
                subject.flush()
            else:
                subject.delete(lock.fence_key)
        assert fences == sorted(set(fences))

    def test_a_fence_of_the_future_is_counted_on(self, subject: Subject) -> None:
        """As after a fail-over to a server whose clock is behind."""
        lock, mine = Lock(), token()
        ahead = granted(subject.store.acquire(lock.ask(mine))).fence + 10**9
        subject.store.release(lock.release(mine))
        subject.plant_fence(lock.fence_key, ahead)
        assert granted(subject.store.acquire(lock.ask(token()))).fence == ahead + 1

    # --- release

    def test_the_owner_frees_the_lock(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine)))
        assert subject.store.release(lock.release(mine)) == Released(owned=True)
        assert subject.value(lock.key) is None
        granted(subject.store.acquire(lock.ask(token("call-2"))))

    def test_nobody_else_frees_the_lock_not_even_another_attempt_of_the_same_call(self, subject: Subject) -> None:
        lock, mine = Lock(), token("call-1")
        granted(subject.store.acquire(lock.ask(mine)))
        for other in (token("call-2"), token("call-1")):
            answer = subject.store.release(lock.release(other))
            assert not answer.owned
            assert answer.holder is not None
            assert answer.holder.value == mine.encode()
        assert subject.value(lock.key) == mine.encode().encode()

    def test_a_stale_holder_leaves_its_successor_alone(self, subject: Subject) -> None:
        lock, stale, successor = Lock(), token("call-1"), token("call-2")
        granted(subject.store.acquire(lock.ask(stale, SHORT)))
        subject.pass_time(2 * SHORT)
        granted(subject.store.acquire(lock.ask(successor, 30.0)))
        assert not subject.store.release(lock.release(stale)).owned
        assert not subject.store.release(lock.release(stale, keep=5.0)).owned
        assert subject.value(lock.key) == successor.encode().encode()
        assert subject.ttl(lock.key) > 30.0 - subject.slack

    def test_releasing_twice_is_harmless(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine)))
        subject.store.release(lock.release(mine))
        assert subject.store.release(lock.release(mine)) == Released(owned=False)
        successor = token("call-2")
        granted(subject.store.acquire(lock.ask(successor)))
        subject.store.release(lock.release(mine))
        assert subject.value(lock.key) == successor.encode().encode()

    # --- the same token again: my reply was lost

    def test_asking_again_with_the_same_token_is_granted_with_the_full_time(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        first = granted(subject.store.acquire(lock.ask(mine, 10.0)))
        again = granted(subject.store.acquire(lock.ask(mine, 30.0)))
        assert again.fence > first.fence
        assert subject.value(lock.key) == mine.encode().encode()
        assert 30.0 - subject.slack <= subject.ttl(lock.key) <= 30.0 + 1e-6

    # --- renewal

    def test_a_renewal_sets_the_full_time_again(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine, 10.0)))
        assert subject.store.renew([lock.lease(mine, 30.0)], 5.0) == [Renewal(held=True)]
        assert subject.value(lock.key) == mine.encode().encode()
        assert 30.0 - subject.slack <= subject.ttl(lock.key) <= 30.0 + 1e-6

    def test_a_renewal_never_makes_a_key(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine)))
        subject.store.release(lock.release(mine))
        assert subject.store.renew([lock.lease(mine)], 5.0) == [Renewal(held=False)]
        assert subject.value(lock.key) is None

    def test_a_renewal_leaves_a_tombstone_alone(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine)))
        subject.store.release(lock.release(mine, keep=10.0))
        (answer,) = subject.store.renew([lock.lease(mine, 60.0)], 5.0)
        assert not answer.held
        assert answer.holder.released
        assert subject.ttl(lock.key) <= 10.0 + 1e-6

    def test_renewals_are_answered_one_by_one_in_order(self, subject: Subject) -> None:
        held, missing, taken = Lock(), Lock(), Lock()
        mine, other = token("call-1"), token("call-2")
        granted(subject.store.acquire(held.ask(mine)))
        granted(subject.store.acquire(taken.ask(other)))
        leases = [held.lease(mine), missing.lease(mine), taken.lease(mine)]
        for order in (leases, leases[::-1], leases * 2):
            answers = subject.store.renew(order, 5.0)
            expected = {held.key: (True, None), missing.key: (False, None), taken.key: (False, other.encode())}
            got = [(answer.held, answer.holder.value if answer.holder else None) for answer in answers]
            assert got == [expected[lease.key] for lease in order]
        assert subject.store.renew([], 5.0) == []

    def test_many_renewals_keep_their_order_over_several_batches(self, subject: Subject) -> None:
        locks = [Lock(f"v1-{number}", "proj.many") for number in range(1_200)]
        mine, other = token("call-1"), token("call-2")
        for lock in locks:
            subject.plant(lock.key, mine.encode().encode(), 60.0)
        subject.plant(locks[600].key, other.encode().encode(), 60.0)
        subject.delete(locks[1_100].key)
        answers = subject.store.renew([lock.lease(mine, 90.0) for lock in locks], 30.0)
        assert len(answers) == 1_200
        assert [number for number, answer in enumerate(answers) if not answer.held] == [600, 1_100]
        assert answers[600].holder.task_id == "call-2"
        assert answers[1_100].holder is None
        assert all(subject.ttl(lock.key) > 60.0 for lock in locks[:3])
        assert subject.ttl(locks[600].key) <= 60.0 + 1e-6

    # --- min_hold

    def test_a_tombstone_keeps_others_out_for_the_rest_of_min_hold(self, subject: Subject) -> None:
        lock, mine = Lock(), token("call-1")
        granted(subject.store.acquire(lock.ask(mine)))
        assert subject.store.release(lock.release(mine, keep=20.0)).owned
        denied = subject.store.acquire(lock.ask(token("call-2")))
        assert isinstance(denied, Contended)
        assert denied.holder.released
        assert denied.holder.task_id == "call-1"
        assert 20.0 - subject.slack <= denied.remaining <= 20.0 + 1e-6

    def test_a_tombstone_ends_by_itself(self, subject: Subject) -> None:
        lock, mine = Lock(), token("call-1")
        granted(subject.store.acquire(lock.ask(mine)))
        assert subject.store.release(lock.release(mine, keep=SHORT)).owned
        subject.pass_time(2 * SHORT)
        granted(subject.store.acquire(lock.ask(token("call-2"))))

    def test_the_call_that_left_a_tombstone_takes_over_and_others_do_not(self, subject: Subject) -> None:
        lock, mine = Lock(), token("call-1")
        granted(subject.store.acquire(lock.ask(mine)))
        subject.store.release(lock.release(mine, keep=60.0))
        for other in ("call-", "call-11", "call-1|0", "call-1%7C", "Call-1", "-", ""):
            assert isinstance(subject.store.acquire(lock.ask(token(other))), Contended), other
        retry = token("call-1", retries=1)
        granted(subject.store.acquire(lock.ask(retry, 30.0)))
        assert subject.value(lock.key) == retry.encode().encode()
        assert subject.ttl(lock.key) <= 30.0 + 1e-6

    def test_releasing_into_a_tombstone_twice_is_owned_twice(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine)))
        for _ in range(2):
            assert subject.store.release(lock.release(mine, keep=60.0)) == Released(owned=True)
        assert subject.value(lock.key) == (TOMBSTONE + mine.encode()).encode()

    # --- done markers

    def test_an_attempt_that_has_run_to_its_end_is_not_granted_again(self, subject: Subject) -> None:
        lock, mine = Lock(), token("call-1")
        granted(subject.store.acquire(lock.ask(mine, done="call-1.0")))
        subject.store.release(lock.release(mine, done="call-1.0", done_ttl=60.0))
        assert subject.store.acquire(lock.ask(token("call-1"), done="call-1.0")) == AlreadyDone()
        assert subject.value(lock.key) is None
        granted(subject.store.acquire(lock.ask(token("call-1", 1), done="call-1.1")))
        assert subject.store.acquire(lock.ask(token("call-1"), done="call-1.0")) == AlreadyDone()

    def test_an_attempt_that_was_given_up_is_not_done(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine, done="call-1.0")))
        subject.store.release(lock.release(mine))
        granted(subject.store.acquire(lock.ask(token(), done="call-1.0")))

    def test_a_done_marker_ends(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine, done="call-1.0")))
        subject.store.release(lock.release(mine, done="call-1.0", done_ttl=SHORT))
        subject.pass_time(2 * SHORT)
        granted(subject.store.acquire(lock.ask(token(), done="call-1.0")))

    def test_my_own_token_counts_for_more_than_a_done_marker(self, subject: Subject) -> None:
        """Whoever holds the lock is not told that it is done: it would not give the lock up."""
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine, done="call-1.0")))
        subject.store.release(lock.release(token(), done="call-1.0", done_ttl=60.0))
        granted(subject.store.acquire(lock.ask(mine, done="call-1.0")))

    def test_the_denied_learns_whether_its_own_attempt_had_begun(self, subject: Subject) -> None:
        lock, first, other = Lock(), token("call-1"), token("call-2")
        granted(subject.store.acquire(lock.ask(first, SHORT, done="call-1.0")))
        subject.pass_time(2 * SHORT)
        granted(subject.store.acquire(lock.ask(other, done="call-2.0")))
        assert subject.store.acquire(lock.ask(token("call-1"), done="call-1.0")).began is True
        assert subject.store.acquire(lock.ask(token("call-3"), done="call-3.0")).began is False
        assert subject.store.acquire(lock.ask(token("call-3"))).began is None

    def test_a_release_that_comes_too_late_marks_the_attempt_as_done_nevertheless(self, subject: Subject) -> None:
        lock, mine = Lock(), token("call-1")
        granted(subject.store.acquire(lock.ask(mine, SHORT, done="call-1.0")))
        subject.pass_time(2 * SHORT)
        assert not subject.store.release(lock.release(mine, done="call-1.0", done_ttl=60.0)).owned
        assert subject.store.acquire(lock.ask(token("call-1"), done="call-1.0")) == AlreadyDone()

    # --- what others have put there

    @pytest.mark.parametrize("kind", HOSTILE)
    def test_a_foreign_value_is_held_by_somebody_unknown_and_never_deleted(self, subject: Subject, kind: str) -> None:
        lock, mine, value = Lock(), token(), HOSTILE[kind]
        subject.plant(lock.key, value, 60.0)
        stored = subject.value(lock.key)
        denied = subject.store.acquire(lock.ask(mine))
        assert isinstance(denied, Contended)
        assert denied.holder.task_id is None
        assert str(denied.holder) == "an unknown client"
        for release in (lock.release(mine), lock.release(mine, keep=5.0), Release(lock.lease(mine))):
            answer = subject.store.release(release)
            assert not answer.owned
            assert answer.holder == denied.holder
        assert subject.store.renew([lock.lease(mine)], 5.0) == [Renewal(held=False, holder=denied.holder)]
        assert subject.store.inspect(lock.key).holder == denied.holder
        assert subject.value(lock.key) == stored
        assert 60.0 - subject.slack <= subject.ttl(lock.key) <= 60.0 + 1e-6

    def test_a_foreign_lock_without_an_end_stays_for_ever(self, subject: Subject) -> None:
        lock, mine = Lock(), token()
        subject.plant(lock.key, b"somebody else")
        assert subject.store.acquire(lock.ask(mine)).remaining == math.inf
        assert subject.store.inspect(lock.key).remaining == math.inf
        subject.store.release(lock.release(mine, keep=1.0))
        subject.store.renew([lock.lease(mine)], 5.0)
        assert subject.ttl(lock.key) == math.inf

    # --- the wire format

    def test_token_and_keys_are_spelt_as_documented(self, subject: Subject) -> None:
        mine = Token("a|b%c d\u00e9", 2, "00112233445566778899aabb", "celery@h-1", 77, 123)
        encoded = "1|a%7Cb%25c%20d%C3%A9|2|00112233445566778899aabb|celery@h-1|77|123"
        lock = Lock("v1-0123456789abcdef0123456789abcdef", "proj.tasks.sync")
        assert lock.key == "redislock:{proj.tasks.sync}:v1-0123456789abcdef0123456789abcdef"
        assert lock.fence_key == "redislock:{proj.tasks.sync}:fence"
        assert lock.scheme.done("call-1.0.0") == "redislock:{proj.tasks.sync}:done:call-1.0.0"
        assert mine.encode() == encoded
        assert mine.tombstone_prefix == "-1|a%7Cb%25c%20d%C3%A9|"
        granted(subject.store.acquire(lock.ask(mine)))
        assert subject.value(lock.key) == encoded.encode()
        subject.store.release(lock.release(mine, keep=60.0))
        assert subject.value(lock.key) == f"-{encoded}".encode()
        assert re.fullmatch(r"[0-9a-f]{24}", token().nonce)
        assert Holder.parse(f"-{encoded}").released

    # --- many at a time

    def test_threads_exclude_each_other_on_a_few_keys(self, subject: Subject) -> None:
        locks = [Lock(f"v1-{number}", "proj.few") for number in range(3)]
        inside = [0] * len(locks)
        grants, overlaps = [0] * 8, []

        def work(number: int) -> None:
            choice = random.Random(number)
            for _ in range(self.rounds):
                which = choice.randrange(len(locks))
                lock, mine = locks[which], token(f"call-{number}")
                if isinstance(subject.store.acquire(lock.ask(mine)), Contended):
                    continue
                inside[which] += 1
                time.sleep(0)  # let the others run into it
                if inside[which] != 1:
                    overlaps.append(which)
                inside[which] -= 1
                grants[number] += 1
                assert subject.store.release(lock.release(mine)).owned

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            in_threads(8, work)
        finally:
            sys.setswitchinterval(interval)
        assert not overlaps
        assert sum(grants) > 8

    rounds = 60


class ServerConformance(StoreConformance):
    """What holds, beyond the contract, for whatever talks to a Redis or Valkey server."""

    # --- no key without an end

    def test_no_key_is_ever_left_without_an_end(self, subject: ServerSubject) -> None:
        subject.flush()
        for number in range(30):
            lock, mine, done = Lock(), token(f"call-{number}"), f"call-{number}.0"
            granted(subject.store.acquire(lock.ask(mine, done=done)))
            granted(subject.store.acquire(lock.ask(mine, done=done)))
            subject.store.acquire(lock.ask(token("other")))
            subject.store.renew([lock.lease(mine)], 5.0)
            if number % 3:
                done_key = done if number % 2 else None
                subject.store.release(lock.release(mine, keep=30.0 * (number % 4), done=done_key, done_ttl=60.0))
        keys = subject.keys()
        assert len(keys) > 60
        assert {key for key in keys if subject.ttl(key) == math.inf} == set()

    # --- values of other types

    @pytest.mark.parametrize("kind", ["hash", "list", "set", "stream"])
    def test_a_value_of_another_type_is_a_holder_like_any_other(self, subject: ServerSubject, kind: str) -> None:
        lock, mine, client = Lock(), token(), subject.client
        {
            "hash": lambda: client.hset(lock.key, "field", "value"),
            "list": lambda: client.rpush(lock.key, "value"),
            "set": lambda: client.sadd(lock.key, "value"),
            "stream": lambda: client.xadd(lock.key, {"field": "value"}),
        }[kind]()
        unknown = Holder("")
        denied = subject.store.acquire(lock.ask(mine))
        assert isinstance(denied, Contended)
        assert (denied.holder, denied.remaining) == (unknown, math.inf)
        assert subject.store.release(lock.release(mine, keep=1.0)) == Released(False, unknown)
        assert subject.store.renew([lock.lease(mine)], 5.0) == [Renewal(False, unknown)]
        assert subject.store.inspect(lock.key).holder == unknown
        assert client.type(lock.key).decode() == kind

    @pytest.mark.parametrize("value", ["nonsense", "", "inf", "nan", "1e300", "-5", "0x10", "9" * 40, "1.5"])
    def test_a_fence_counter_that_others_have_spoilt_starts_from_the_clock(
        self, subject: ServerSubject, value: str
    ) -> None:
        lock = Lock()
        subject.plant(lock.fence_key, value.encode())
        clock = int(subject.client.time()[0]) * 1_000_000
        fences = []
        for _ in range(3):
            mine = token()
            fences.append(granted(subject.store.acquire(lock.ask(mine))).fence)
            subject.store.release(lock.release(mine))
        assert clock <= fences[0] < clock + 3600 * 1_000_000
        assert fences == sorted(set(fences))

    def test_a_fence_counter_and_a_done_marker_of_another_type_are_replaced(self, subject: ServerSubject) -> None:
        lock, mine = Lock(), token()
        for key in (lock.fence_key, lock.scheme.done("call-1.0")):
            subject.client.rpush(key, "value")
        granted(subject.store.acquire(lock.ask(mine, done="call-1.0")))
        subject.store.release(lock.release(mine, done="call-1.0", done_ttl=60.0))
        assert subject.store.acquire(lock.ask(token(), done="call-1.0")) == AlreadyDone()

    # --- scripts that the server has forgotten

    def test_a_script_flush_between_two_operations_goes_unnoticed(self, subject: ServerSubject) -> None:
        lock, mine = Lock(), token()
        locks = [Lock() for _ in range(5)]
        subject.client.script_flush()
        granted(subject.store.acquire(lock.ask(mine)))
        for other in locks:
            granted(subject.store.acquire(other.ask(mine)))
        subject.client.script_flush()
        leases = [lock.lease(mine), *(other.lease(mine) for other in locks)]
        assert subject.store.renew(leases, 5.0) == [Renewal(held=True)] * 6
        subject.client.script_flush()
        assert isinstance(subject.store.acquire(lock.ask(token("call-2"))), Contended)
        subject.client.script_flush()
        assert subject.store.release(lock.release(mine)).owned
        assert subject.value(lock.key) is None

    def test_script_flushes_during_operations_go_unnoticed(self, subject: ServerSubject) -> None:
        over = threading.Event()

        def work(number: int) -> None:
            if number == 0:
                while not over.is_set():
                    subject.client.script_flush()
                return
            try:
                for _ in range(60):
                    lock, mine = Lock(), token()
                    granted(subject.store.acquire(lock.ask(mine)))
                    if number == 1:  # renewals belong to one thread
                        assert subject.store.renew([lock.lease(mine)], 5.0) == [Renewal(held=True)]
                    assert subject.store.release(lock.release(mine)).owned
            finally:
                if number == 1:
                    over.set()

        in_threads(4, work)

    # --- what is sent

    def test_each_operation_is_one_script_and_no_key_is_touched_outside_of_scripts(
        self, subject: ServerSubject
    ) -> None:
        lock, mine = Lock(), token()
        subject.store.release(lock.release(mine))  # the server knows the scripts now
        granted(subject.store.acquire(lock.ask(mine)))
        subject.store.renew([lock.lease(mine)], 5.0)
        subject.store.release(lock.release(mine))
        with monitor(subject.server) as watch:
            granted(subject.store.acquire(lock.ask(mine, 30.0, done="call-1.0")))
            taken = watch.commands(lock.scheme.name)
            subject.store.acquire(lock.ask(token("call-2")))
            denied = watch.commands(lock.scheme.name)
            subject.store.renew([lock.lease(mine, 30.0)], 5.0)
            renewed = watch.commands(lock.scheme.name)
            subject.store.release(lock.release(mine, keep=5.0, done="call-1.0", done_ttl=9.0))
            subject.store.release(lock.release(mine))
            released = watch.commands(lock.scheme.name)
        for seen, operations in ((taken, 1), (denied, 1), (renewed, 1), (released, 2)):
            outside = [each.words[0].upper() for each in seen if each.origin != "lua"]
            assert outside == ["EVALSHA"] * operations
        writes = [words for words in _inside(taken) if words[0] != "GET"]
        assert ["SET", lock.key, mine.encode(), "PX", "30000"] == writes[-1], "the lock is written last, with its end"
        assert all("PX" in words for words in writes if words[0] == "SET")
        assert {words[0] for words in _inside(denied)} == {"GET", "PTTL"}
        assert _inside(renewed) == [["GET", lock.key], ["PEXPIRE", lock.key, "30000"]]

    def test_a_renewal_batch_takes_few_round_trips(self, subject: ServerSubject) -> None:
        locks = [Lock(f"v1-{number}", "proj.batch") for number in range(1_000)]
        mine = token()
        subject.store.renew([lock.lease(mine) for lock in locks[:1]], 5.0)
        before = subject.client.info("stats")["total_reads_processed"]
        subject.store.renew([lock.lease(mine) for lock in locks], 30.0)
        reads = subject.client.info("stats")["total_reads_processed"] - before
        assert reads < 150, "one by one it would be a thousand"

    # --- connections

    def test_an_idle_connection_is_used_again(self, subject: ServerSubject) -> None:
        lock, mine = Lock(), token()
        granted(subject.store.acquire(lock.ask(mine)))
        before = subject.client.info("stats")["total_connections_received"]
        for _ in range(3):
            time.sleep(SHORT)
            assert subject.store.inspect(lock.key) is not None
        assert subject.client.info("stats")["total_connections_received"] == before

    def test_as_many_connections_are_open_as_threads_have_asked(self, subject: ServerSubject) -> None:
        before = clients(subject.server)

        def work(number: int) -> None:
            for _ in range(30):
                lock, mine = Lock(), token()
                granted(subject.store.acquire(lock.ask(mine)))
                subject.store.release(lock.release(mine))

        in_threads(8, work)
        assert clients(subject.server) <= before + 8
        subject.store.close()
        deadline = time.monotonic() + 10
        while clients(subject.server) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert clients(subject.server) <= before

    def test_a_store_made_before_a_fork_works_in_each_child_on_sockets_of_its_own(self, subject: ServerSubject) -> None:
        with monitor(subject.server) as watch:
            done = subprocess.run(
                [sys.executable, "-m", "tests.stores.forking", "store", subject.url, repr(subject.options)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
            assert done.stdout.split() == ["5", "processes", "1000", "operations"]
            users: dict[str, set[str]] = {}
            for each in watch.commands("proj.forked"):
                if each.origin != "lua":
                    tokens = [word for word in each.words if re.fullmatch(r"1\|([^|]*\|){5}[^|]*", word)]
                    users.setdefault(each.origin, set()).update(value.split("|")[5] for value in tokens)
        if not subject.url.startswith("unix"):  # there all clients have the same address
            assert len(set.union(*users.values())) == 5
            assert all(len(pids) == 1 for pids in users.values()), users


def _inside(seen: list[Executed]) -> list[list[str]]:
    """What scripts have done."""
    return [[each.words[0].upper(), *each.words[1:]] for each in seen if each.origin == "lua"]
