"""Lock options of one call: checked where they are said, carried by the message, kept by its copies."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, chain, chord, group, signature

from celery_redislock import LockConfigError, LockConflict, SingletonTask
from tests.gate.conftest import Hold, InProcessWorker, ttl
from tests.gate.test_declaration import WRONG

TTL = {"lock_ttl": 100}


@pytest.fixture
def sync(app: Celery, redis: Any) -> Any:
    """Returns what its lock has been like."""

    @app.task(base=SingletonTask, bind=True, lock_skip_result="skipped")
    def sync(self: Any, account: Any, full: bool = False) -> Any:
        return [self.lock.key, ttl(redis, self.lock.key)]

    return sync


def test_options_reach_the_run(sync: Any, worker: InProcessWorker) -> None:
    results = [
        sync.apply_async((1,), lock_ttl=timedelta(seconds=100)),
        sync.apply_async((1, True), lock_on=["account"]),
        sync.apply_async((1,), lock_key="account:{account}"),
        sync.s(1).set(**TTL).delay(),
        sync.s(1).set(lock_name="accounts").set(**TTL).apply_async(lock_on=[]),
        sync.delay(1),
    ]
    worker.run_all()
    keys, ttls = zip(*(result.get() for result in results), strict=True)
    assert ttls == (100, 30, 30, 100, 100, 30)
    assert keys[0] == keys[3] == keys[5] == sync.lock_key_for(1)
    assert keys[2] == f"redislock:{{{__name__}.sync}}:account:1"
    assert keys[4].startswith("redislock:{accounts}:v1-")
    assert len(set(keys)) == 4


def test_options_of_a_call_change_nothing_for_the_next(sync: Any, worker: InProcessWorker) -> None:
    results = [sync.apply_async((1,), **TTL), sync.delay(1)]
    worker.run_all()
    assert [result.get()[1] for result in results] == [100, 30]


def through_json(sig: Any) -> Any:
    return signature(json.loads(json.dumps(sig)))


@pytest.mark.parametrize("travel", [lambda sig: sig, through_json], ids=["as it is", "through JSON"])
def test_options_travel_in_canvases(app: Celery, sync: Any, worker: InProcessWorker, travel: Any) -> None:
    """A member of a chain is sent by the worker that ran the one before it, from its JSON."""
    first, later = sync.s(1).set(lock_on=["account"], **TTL), sync.si(2).set(**TTL)
    in_chain = travel(chain(sync.si(0), first.clone(immutable=True), later)).delay()
    in_group = travel(group(sync.si(n).set(**TTL) for n in range(3))).delay()
    in_replaced = travel(sync.si(5) | group(sync.si(n).set(**TTL) for n in (6, 7))).delay()
    linked = sync.apply_async((3,), link=travel(sync.si(4).set(**TTL)))
    worker.run_all()
    assert in_chain.get()[1] == 100
    assert in_chain.parent.get()[1] == 100
    assert in_chain.parent.parent.get()[1] == 30
    assert [seconds for _, seconds in in_group.get()] == [100] * 3
    assert [seconds for _, seconds in in_replaced.get()] == [100] * 2
    assert linked.get()[1] == 30
    assert linked.children[0].get()[1] == 100


def test_options_of_a_group_count_for_each_member(sync: Any, worker: InProcessWorker) -> None:
    result = group(sync.s(n) for n in range(3)).apply_async(**TTL)
    worker.run_all()
    assert [seconds for _, seconds in result.get()] == [100] * 3


def test_options_of_the_task_give_way_to_those_of_the_call(app: Celery, worker: InProcessWorker) -> None:
    @app.task(base=SingletonTask, bind=True, lock_key="account:{account}")
    def sync(self: Any, account: int) -> str:
        return str(self.lock.key.rpartition("}:")[2])

    results = [sync.delay(1), sync.apply_async((1,), lock_on=[]), sync.apply_async((1,), lock_key="other")]
    worker.run_all()
    assert [result.get()[:3] for result in results] == ["acc", "v1-", "oth"]


WRONG_FOR_A_CALL = [
    *WRONG,
    ({"lock_key": lambda account: "a"}, "lock_key for one call can't be a callable; give a template"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_FOR_A_CALL)
def test_wrong_option_fails_where_the_call_is_sent(
    app: Celery, worker: InProcessWorker, options: dict[str, Any], message: str
) -> None:
    @app.task(base=SingletonTask)
    def sync(account: int) -> None: ...

    for send in (
        lambda: sync.apply_async((1,), **options),
        lambda: sync.s(1).set(**options).delay(),
        lambda: group([sync.s(1).set(**options)]).delay(),
        lambda: sync.apply((1,), **options),
    ):
        with pytest.raises(LockConfigError, match=f"^{__name__}.sync: {message}"):
            send()
    assert worker.waiting() == 0


def test_wrong_option_is_refused_without_any_redis(make_app: Any) -> None:
    """A web process may only send."""
    app = make_app(redislock_url=None)

    @app.task(base=SingletonTask)
    def sync(account: int) -> None: ...

    with pytest.raises(LockConfigError, match="did you mean lock_ttl"):
        sync.apply_async((1,), lock_tll=5)
    assert sync.apply_async((1,), lock_ttl=5).id


def test_options_survive_retries_and_new_ones_are_added(app: Celery, worker: InProcessWorker, redis: Any) -> None:
    seen = []

    @app.task(base=SingletonTask, bind=True, max_retries=5)
    def sync(self: Any, account: int, full: bool = False) -> None:
        seen.append((self.lock.key.rpartition("}:")[2], ttl(redis, self.lock.key)))
        retries = self.request.retries
        if retries == 0:
            raise self.retry(countdown=0)
        if retries == 1:
            raise self.retry(countdown=0, args=(2,))
        if retries == 2:
            raise self.retry(countdown=0, lock_ttl=200)
        if retries == 3:
            raise self.retry(countdown=0, lock_on=[])

    sync.apply_async((1,), lock_key="account:{account}", **TTL)
    worker.run_all()
    *first, (last, last_ttl) = seen
    assert first == [("account:1", 100), ("account:1", 100), ("account:2", 100), ("account:2", 200)]
    assert last.startswith("v1-")
    assert last_ttl == 200


@pytest.mark.parametrize("redelivered", [False, True])
def test_options_survive_waiting(
    app: Celery, sync: Any, worker: InProcessWorker, hold: Hold, redis: Any, redelivered: bool
) -> None:
    sync.lock_on_conflict = "retry"
    result = sync.apply_async((1,), lock_key="account:{account}", **TTL)
    key = f"redislock:{{{__name__}.sync}}:account:1"
    hold(key)
    worker.run(redelivered=redelivered)  # a redelivered copy comes back, another is retried
    redis.delete(key)
    worker.run()
    assert result.get() == [key, 100]


def test_policy_of_a_call_counts(sync: Any, worker: InProcessWorker, hold: Hold) -> None:
    hold(sync.lock_key_for(1))
    results = [
        sync.delay(1),
        sync.apply_async((1,), lock_skip_result={"no": "run"}),
        sync.apply_async((1,), lock_on_conflict="raise"),
        sync.apply_async((1,), lock_enabled=False, lock_on_conflict="raise"),
    ]
    worker.run_all()
    assert [result.get(propagate=False) for result in results[:2]] == ["skipped", {"no": "run"}]
    assert isinstance(results[2].result, LockConflict)
    assert "this run holds no lock" in str(results[3].result)  # it ran


def test_message_carries_options_and_nothing_of_the_lock(sync: Any, worker: InProcessWorker, redis: Any) -> None:
    sync.apply_async((1,), **TTL)
    message = worker.take()
    assert message.headers["redislock"] == {"options": {"ttl": 100.0}}
    worker.run(message)
    sync.delay(1)
    assert "redislock" not in worker.take().headers


def test_no_message_carries_a_token(app: Celery, worker: InProcessWorker, redis: Any, hold: Hold) -> None:
    """A copy that had it would take itself for the holder."""
    tokens = []

    @app.task(base=SingletonTask, bind=True, lock_on_conflict="retry", max_retries=3)
    def sync(self: Any, account: int) -> None:
        tokens.append(self.lock.token)
        if self.request.retries < 2:
            self.s(account + 1).set(**TTL).delay()
            raise self.retry(countdown=0)

    messages = []
    tokens.append(hold(sync.lock_key_for(1)))
    sync.apply_async((1,), **TTL)
    for n in range(8):
        message = worker.take()
        messages.append(json.dumps([message.headers, message.properties]) + str(message.body))
        worker.run(message, redelivered=n == 1)
        if n == 2:
            redis.delete(sync.lock_key_for(1))
    nonces = {token.split("|")[3] for token in tokens}
    assert len(nonces) == len(tokens) > 2
    assert not [nonce for nonce in nonces for message in messages if nonce in message]


def test_members_of_a_chord_may_have_options(app: Celery, sync: Any) -> None:
    with pytest.raises(LockConfigError, match="lock_ttl=0"):
        chord([sync.s(1).set(lock_ttl=0)])(sync.s())
