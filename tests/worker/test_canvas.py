"""Canvases with members that are denied, on two real workers: which go on, which fail, and which wait and go on.

A foreign token under the key is the holder that denies: nothing here depends on how long a body takes. The workers are
those of all tests of this module; keys are each test's own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, _state, chain, chord, group

from celery_redislock import LockConflict
from celery_redislock.lease import Token
from celery_redislock.testing import EmbeddedServer
from tests.local_nodes.app import make_app
from tests.local_nodes.fixtures import WorkerFactory, close_app, started_server
from tests.local_nodes.recorder import Recorder
from tests.local_nodes.tasks import ping
from tests.local_nodes.waiting import TIMEOUT, wait_until
from tests.worker import canvas_tasks
from tests.worker.canvas_tasks import (
    SKIPPED,
    add,
    add_silently,
    again,
    conflicts,
    customised,
    failed,
    flaky,
    gather,
    replaced,
    replaced_by_group,
)

BOUND = 20.0
"""Within this a canvas has to have failed, s."""


@pytest.fixture(scope="module")
def canvas_server(no_process_is_left_over: str) -> Iterator[EmbeddedServer]:
    server = started_server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def canvas_conf(canvas_server: EmbeddedServer) -> dict[str, Any]:
    return {
        "broker_url": canvas_server.url,
        "result_backend": canvas_server.url,
        "include": [canvas_tasks.__name__],
        "broker_connection_retry_on_startup": True,
        "worker_proc_alive_timeout": 60.0,
    }


@pytest.fixture(scope="module", params=["prefork", "threads"])
def two_workers(
    request: pytest.FixtureRequest,
    canvas_server: EmbeddedServer,
    canvas_conf: dict[str, Any],
    recorder_server: EmbeddedServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[WorkerFactory]:
    canvas_server.flush()
    factory = WorkerFactory(canvas_conf, recorder_server.url, tmp_path_factory.mktemp("canvas"))
    for _ in range(2):
        factory(request.param, 4, wait=False)
    factory.wait()
    yield factory
    factory.close()
    if request.session.testsfailed:
        for worker in factory.started:
            print(worker.tail(200))


@pytest.fixture
def app(canvas_conf: dict[str, Any]) -> Iterator[Celery]:
    """The app in the test process."""
    previous = _state._tls.current_app
    app = make_app(canvas_conf)
    app.loader.import_task_module(canvas_tasks.__name__)
    app.finalize()
    yield app
    app.backend.result_consumer.stop()
    app.backend.result_consumer._pubsub = None  # or a result that is collected later would look for a dead server
    close_app(app, previous)


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


Deny = Callable[..., Callable[[], None]]


@pytest.fixture
def deny(app: Celery) -> Deny:
    """``deny(key, task=add)``: somebody else holds that key; call what it returns to make them give it up."""

    def take(key: str, task: Any = add, **arguments: Any) -> Callable[[], None]:
        lock_key = task.lock_key_for(key=key, **arguments)
        client = app.backend.client
        assert client.set(lock_key, Token.new("someone-else", 0, "w@elsewhere", 1, 1).encode(), px=60_000, nx=True)
        return lambda: client.delete(lock_key)

    return take


pytestmark = pytest.mark.usefixtures("two_workers", "app")


def with_policy(policy: str, *numbers: Any, key: str) -> Any:
    return add.s(*numbers, key=key).set(lock_on_conflict=policy)


# --- skip: all goes on, with the skip result in the place of the member's


def canvases(denied: Any, key: str) -> dict[str, Any]:
    """Canvases of three members of 1 each, whose second one is ``denied``; the last is a plain task under ``key``."""
    first, last = add.s(1, key=f"{key}-first"), gather.s(1, key=key)
    nested = chord([add.s(1, key=f"{key}-inner"), denied], gather.s(key=f"{key}-sum"))
    return {
        "chain": first | denied | last,
        "chord": chord([first, denied], last),
        "group in a chain": first | group(denied, add.s(key=f"{key}-other")) | last,
        "chain of groups": group(first, add.s(key=f"{key}-other")) | group(denied, add.s(key=f"{key}-third")) | last,
        "nested chord": chord([nested, add.s(key=f"{key}-other")], last),
        "chain in a chord": chord([first | denied, add.s(key=f"{key}-other")], last),
    }


NAMES = sorted(canvases(add.s(key=""), ""))
SUMS = {
    "chain": 3,
    "chord": 3,
    "group in a chain": 2 + 1 + 1,
    "chain of groups": 2 + 1 + 1,
    "nested chord": 3,
    "chain in a chord": 3,
}


@pytest.mark.parametrize("name", NAMES)
def test_canvas_with_a_skipped_member_goes_on_to_its_end(key: str, deny: Deny, recorder: Recorder, name: str) -> None:
    deny(key=f"{key}-denied")
    canvas = canvases(with_policy("skip", 1, key=f"{key}-denied"), key)[name]
    assert canvas.delay().get(timeout=TIMEOUT) >= SKIPPED
    assert not recorder.runs(f"{key}-denied")


def test_group_has_the_skip_result_in_the_place_of_its_skipped_member(key: str, deny: Deny) -> None:
    deny(key=f"{key}-1")
    members = [add.s(n, key=f"{key}-{n}") for n in range(3)]
    assert group(members).delay().get(timeout=TIMEOUT) == [0, SKIPPED, 2]


def test_link_of_a_skipped_call_gets_the_skip_result(key: str, deny: Deny, recorder: Recorder) -> None:
    deny(key=f"{key}-denied")
    add.apply_async((1,), {"key": f"{key}-denied"}, link=gather.s(key=key), link_error=failed.s(key=f"{key}-failed"))
    [run] = recorder.wait_for_runs(key, 1, left=True)
    assert run.notes[0]["total"] == str(SKIPPED)
    assert not recorder.runs(f"{key}-failed")


# --- raise: all that follows fails, soon and with the reason


@pytest.mark.filterwarnings("ignore:task_allow_error_cb_on_chord_header")
@pytest.mark.parametrize("name", NAMES)
def test_canvas_with_a_member_that_raises_fails_soon_and_tells_why(
    key: str, deny: Deny, recorder: Recorder, name: str
) -> None:
    deny(key=f"{key}-denied")
    canvas = canvases(with_policy("raise", 1, key=f"{key}-denied"), key)[name]
    canvas.on_error(failed.s(key=f"{key}-failed"))
    start = time.monotonic()
    result = canvas.delay()
    runs = recorder.wait_for_runs(f"{key}-failed", 1, left=True, timeout=BOUND)
    assert "LockConflict" in runs[0].notes[0]["type"] + runs[0].notes[0]["text"]
    assert time.monotonic() - start < BOUND
    if name in {"chord", "nested chord", "chain in a chord"}:
        with pytest.raises(Exception, match=r"LockConflict|is held by"):
            result.get(timeout=BOUND)
    assert not recorder.runs(key)
    assert not recorder.runs(f"{key}-denied")


def test_group_with_a_member_that_raises_raises_the_conflict(key: str, deny: Deny) -> None:
    deny(key=f"{key}-1")
    result = group(with_policy("raise", n, key=f"{key}-{n}") for n in range(3)).delay()
    with pytest.raises(LockConflict, match="is held by task someone-else") as caught:
        result.get(timeout=TIMEOUT)
    assert caught.value.key == add.lock_key_for(key=f"{key}-1")
    assert [member.state for member in result.results] == ["SUCCESS", "FAILURE", "SUCCESS"]


def test_error_link_of_a_call_that_raises_gets_the_conflict(key: str, deny: Deny, recorder: Recorder) -> None:
    deny(key=f"{key}-denied")
    sig = with_policy("raise", 1, key=f"{key}-denied")
    sig.apply_async(link=gather.s(key=key), link_error=failed.s(key=f"{key}-failed"))
    [run] = recorder.wait_for_runs(f"{key}-failed", 1, left=True)
    assert run.notes[0]["type"] == "LockConflict"
    assert not recorder.runs(key)


# --- retry, wait: all waits, and goes on once the lock is free


@pytest.mark.parametrize("policy", ["retry", "wait"])
@pytest.mark.parametrize("name", NAMES)
def test_canvas_with_a_waiting_member_goes_on_once_the_lock_is_free(
    key: str, deny: Deny, recorder: Recorder, two_workers: WorkerFactory, name: str, policy: str
) -> None:
    give_up = deny(key=f"{key}-denied")
    result = canvases(with_policy(policy, 1, key=f"{key}-denied"), key)[name].delay()
    recorder.wait_for_runs(f"{key}-{'inner' if name == 'nested chord' else 'first'}", 1, left=True)
    ping.delay().get(timeout=TIMEOUT)
    assert not result.ready()
    give_up()
    assert result.get(timeout=TIMEOUT) == SUMS[name]
    assert len(recorder.runs(f"{key}-denied")) == 1
    assert len(recorder.runs(key)) == 1


@pytest.mark.parametrize("policy", ["retry", "wait"])
def test_link_of_a_waiting_call_runs_after_it(key: str, deny: Deny, recorder: Recorder, policy: str) -> None:
    give_up = deny(key=f"{key}-denied")
    result = with_policy(policy, 1, key=f"{key}-denied").apply_async(link=gather.s(1, key=key))
    if policy == "retry":
        wait_until(lambda: result.state == "RETRY", "it to wait")
        assert isinstance(result.result, LockConflict)
    assert not recorder.runs(key)
    give_up()
    assert result.get(timeout=TIMEOUT) == 1
    [run] = recorder.wait_for_runs(key, 1, left=True)
    assert run.notes[0]["total"] == "2"


# --- ignore: as documented, what follows never comes


@pytest.mark.parametrize("name", NAMES)
def test_canvas_with_an_ignored_member_stops_there(
    key: str, deny: Deny, recorder: Recorder, two_workers: WorkerFactory, name: str
) -> None:
    deny(key=f"{key}-denied")
    result = canvases(with_policy("ignore", 1, key=f"{key}-denied"), key)[name].delay()
    said = f"denied {add.lock_key_for(key=f'{key}-denied')}"
    wait_until(lambda: any(said in worker.log for worker in two_workers.started), "the denial")
    group(ping.s() for _ in range(20)).delay().get(timeout=TIMEOUT)  # more than anything that follows would take
    assert not recorder.runs(key)
    assert not recorder.runs(f"{key}-denied")
    assert result.state == "PENDING"


# --- tasks that go on as another message


@pytest.mark.parametrize(
    ("by", "times", "result", "runs"), [("another", 1, 3, 2), ("itself", 5, 1, 6), ("a chain", 1, 3, 1)]
)
def test_task_replaces_itself(key: str, recorder: Recorder, by: str, times: int, result: int, runs: int) -> None:
    """The replacement has its id, and may arrive before its end."""
    assert replaced.delay(key, by, times).get(timeout=TIMEOUT) == result
    assert recorder.max_overlap(key) == 1 or by == "another"
    assert len(recorder.runs(key)) == runs


def test_task_replaces_itself_by_a_group(key: str, recorder: Recorder) -> None:
    assert replaced_by_group.delay(key).get(timeout=TIMEOUT) == [0, 1, 2]


def test_replaced_member_of_a_chord_counts_once(key: str, recorder: Recorder) -> None:
    header = [replaced.s(f"{key}-a", "itself", 2), replaced.s(f"{key}-b", "another"), add.s(5, key=f"{key}-c")]
    assert chord(header, gather.s(key=key)).delay().get(timeout=TIMEOUT) == 1 + 3 + 5
    assert len(recorder.runs(key)) == 1


@pytest.mark.parametrize(("how", "result"), [("autoretry", [2, 0]), ("retry", [2, 0]), ("retry with args", [2, 2])])
def test_retries_run_to_their_end(key: str, recorder: Recorder, how: str, result: list[int]) -> None:
    results = [flaky.delay(f"{key}-{n}", how) for n in range(10)]
    assert [r.get(timeout=TIMEOUT) for r in results] == [result] * 10
    for n in range(10):
        assert len(recorder.runs(f"{key}-{n}")) == 3
        assert recorder.max_overlap(f"{key}-{n}") == 1


def test_task_that_sends_itself_twenty_times_is_never_refused(key: str, recorder: Recorder) -> None:
    again.delay(key, 20)
    recorder.wait_for_runs(key, 20, left=True)
    assert recorder.max_overlap(key) == 1


def test_link_that_is_the_same_call_never_meets_the_lock_of_its_parent(key: str, recorder: Recorder) -> None:
    results = [add.apply_async((1,), {"key": f"{key}-{n}"}, link=add.s(key=f"{key}-{n}")) for n in range(20)]
    for n, result in enumerate(results):
        assert result.get(timeout=TIMEOUT) == 1
        assert result.children[0].get(timeout=TIMEOUT) == 1
        assert conflicts(recorder, add.lock_key_for(key=f"{key}-{n}")) == []


def test_chain_of_equal_calls_never_meets_its_own_locks(key: str, recorder: Recorder) -> None:
    results = [chain(add.s(1, key=f"{key}-{n}") for _ in range(5)).delay() for n in range(10)]
    assert [result.get(timeout=TIMEOUT) for result in results] == [5] * 10
    assert [conflicts(recorder, add.lock_key_for(key=f"{key}-{n}")) for n in range(10)] == [[]] * 10


def test_of_thirty_equal_calls_that_wait_each_runs_one_after_the_other(key: str, recorder: Recorder) -> None:
    sig = add.s(1, key=key, seconds=0.05).set(lock_on_conflict="retry")
    assert group([sig] * 30).delay().get(timeout=60) == [1] * 30
    assert len(recorder.runs(key)) == 30
    assert recorder.max_overlap(key) == 1
    fences = [run.fence for run in recorder.runs(key)]
    assert fences == sorted(fences)


# --- what a project may have made its own


def test_request_and_strategy_of_a_projects_own_are_used(app: Celery, key: str, deny: Deny, recorder: Recorder) -> None:
    give_up = deny(key=key, task=customised)
    result = customised.delay(1, 2, key=key)
    wait_until(lambda: result.state == "RETRY", "it to wait")
    give_up()
    assert result.get(timeout=TIMEOUT) == 3
    client = app.backend.client
    assert int(client.get(f"accepted:{key}")) >= 2
    assert int(client.get(f"received:{customised.name}")) >= 2


@pytest.mark.parametrize("how", ["the task's", "the call's"])
def test_call_whose_result_is_ignored_waits_and_runs(
    key: str, deny: Deny, recorder: Recorder, app: Celery, how: str
) -> None:
    task = add_silently if how == "the task's" else add
    give_up = deny(key=key, task=task)
    options = {} if how == "the task's" else {"ignore_result": True}
    skipped = task.apply_async((1,), {"key": key}, **options)
    waiting = task.apply_async((1,), {"key": key}, lock_on_conflict="retry", link=gather.s(key=f"{key}-end"), **options)
    for _ in range(20):  # both have been denied when each process of the pool has gone round
        ping.delay().get(timeout=TIMEOUT)
    give_up()
    recorder.wait_for_runs(f"{key}-end", 1, left=True)
    assert [run.task_id for run in recorder.runs(key)] == [waiting.id]
    assert not app.backend.client.exists(f"celery-task-meta-{skipped.id}")
    if how == "the task's":  # of the call's own wish Celery's retries know since 5.6 only
        assert not app.backend.client.exists(f"celery-task-meta-{waiting.id}")
