"""When the lock is given up: after the body, before anything that could follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, signals
from celery.exceptions import Ignore, Reject

from celery_redislock import SingletonTask
from tests.gate.conftest import AppFactory, InProcessWorker, WorkerMaker


@pytest.fixture
def steps() -> list[tuple[str, bool]]:
    """What happened, and whether the lock was held then."""
    return []


@pytest.fixture
def sync(app: Celery, redis: Any, steps: list[tuple[str, bool]]) -> Iterator[Any]:
    """A task that notes its steps, and each message that is sent."""

    def note(step: str) -> None:
        steps.append((step, bool(redis.exists(sync.lock_key_for()))))

    class Noted(SingletonTask):
        abstract = True

        def on_success(self, *_: Any) -> None:
            note("on_success")

        def on_failure(self, *_: Any) -> None:
            note("on_failure")

        def after_return(self, *_: Any) -> None:
            note("after_return")

    @app.task(base=Noted, bind=True, lock_on=[], max_retries=1)
    def sync(self: Any, result: Any = None, how: str = "") -> str:
        note("body")
        if how == "raise":
            raise ValueError
        if how == "ignore":
            raise Ignore
        if how == "reject":
            raise Reject
        if how == "exit":
            raise SystemExit
        return "ran"

    def sent(sender: str, **_: Any) -> None:
        note(f"{sender} is sent")

    signals.before_task_publish.connect(sent, weak=False)
    app.task(name="next")(following)
    app.finalize()
    yield sync
    signals.before_task_publish.disconnect(sent)


def following(result: Any) -> None: ...


def after(steps: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """What came after the first body began."""
    names = [step for step, _ in steps]
    return steps[names.index("body") :]


def canvases(app: Celery, sync: Any) -> dict[str, Any]:
    follow = app.tasks["next"].s()
    return {
        "link": sync.s().set(link=follow),
        "link to the same call": sync.s().set(link=sync.s()),
        "chain": chain(sync.s(), follow),
        "chain of equal calls": chain(sync.s(), sync.s(), sync.s()),
        "error link": sync.s(how="raise").set(link_error=follow),
    }


@pytest.mark.parametrize("name", ["link", "link to the same call", "chain", "chain of equal calls", "error link"])
def test_lock_is_free_before_anything_that_follows_is_sent_or_told(
    app: Celery, worker: InProcessWorker, sync: Any, steps: list[tuple[str, bool]], name: str
) -> None:
    canvases(app, sync)[name].apply_async()
    worker.run_all()
    assert {held for step, held in after(steps) if step == "body"} == {True}
    following = [(step, held) for step, held in after(steps) if step != "body"]
    assert any("is sent" in step for step, _ in following)
    assert {held for _, held in following} == {False}


def test_lock_is_free_before_the_body_of_a_chord_is_sent(
    make_app: AppFactory, make_worker: WorkerMaker, server: Any, redis: Any
) -> None:
    app, held = make_app(result_backend=server.url), []

    @app.task(base=SingletonTask, lock_on=[])
    def sync(*results: Any) -> int:
        return 1

    def sent(sender: str, **_: Any) -> None:
        held.append(redis.exists(sync.lock_key_for()))

    worker = make_worker(app)
    result = chord([sync.s(), sync.s()], sync.s()).delay()
    signals.before_task_publish.connect(sent, weak=False)
    try:
        worker.run_all()
    finally:
        signals.before_task_publish.disconnect(sent)
    assert result.get() == 1
    assert held == [0]


@pytest.mark.parametrize("how", ["", "raise", "ignore", "reject", "exit"])
def test_lock_is_free_after_each_ending(
    worker: InProcessWorker, sync: Any, redis: Any, steps: list[tuple[str, bool]], how: str
) -> None:
    sync.apply_async((), {"how": how})
    if how == "exit":
        with pytest.raises(SystemExit):
            worker.run()
    else:
        worker.run()
    assert after(steps)[0] == ("body", True)
    assert {held for _, held in after(steps)[1:]} <= {False}
    assert not redis.exists(sync.lock_key_for())
