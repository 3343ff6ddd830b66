"""What a task says about its lock: heard when it is said, refused when it is wrong."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, shared_task, signals
from celery.app.trace import reset_worker_optimizations, setup_worker_optimizations
from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import ImproperlyConfigured

from celery_redislock import LockConfigError, SingletonMixin, SingletonTask
from celery_redislock.runtime import Runtime
from celery_redislock.task import wire_options
from tests.gate.conftest import AppFactory, Hold, InProcessWorker, WorkerMaker, ttl

WRONG = [
    ({"lock_tll": 5}, r"unknown option lock_tll; did you mean lock_ttl\?"),
    ({"lock_timeout": 5}, r"unknown option lock_timeout; did you mean lock_ttl\?"),
    ({"lock_ttl": None}, "lock_ttl=None would never expire"),
    ({"lock_ttl": 0}, "lock_ttl=0 is too short"),
    ({"lock_ttl": "60"}, "lock_ttl='60' is not a duration"),
    ({"lock_on": "account"}, "lock_on='account' is a bare string"),
    ({"lock_on": ["acount"]}, r"lock_on names 'acount', which is not an argument .*; did you mean account\?"),
    ({"lock_on": ["self"]}, "lock_on names 'self', which is not an argument"),
    (
        {"lock_key": "a:{acount}"},
        r"lock_key names 'acount', which is not an argument of the task; did you mean account\?",
    ),
    ({"lock_key": 5}, "lock_key=5 is not a template"),
    ({"lock_on": ["account"], "lock_key": "{account}"}, "lock_on and lock_key exclude each other"),
    ({"lock_on_conflict": "retyr"}, r"lock_on_conflict='retyr' is not one of .*; did you mean 'retry'\?"),
    ({"lock_on_outage": "skip"}, "lock_on_outage='skip' is not one of"),
    ({"lock_enabled": "yes"}, "lock_enabled='yes' is not True or False"),
    ({"lock_name": ""}, "lock_name='' is not a name"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
@pytest.mark.parametrize("bind", [False, True])
def test_wrong_option_of_a_finalized_app_fails_at_its_declaration(
    app: Celery, options: dict[str, Any], message: str, bind: bool
) -> None:
    def plain(account: int) -> None: ...

    def bound(self: Any, account: int) -> None: ...

    app.finalize()
    declare = app.task(base=SingletonTask, bind=bind, name=f"{__name__}.sync", **options)
    with pytest.raises(LockConfigError, match=f"^{__name__}.sync: {message}") as caught:
        declare(bound if bind else plain)
    assert isinstance(caught.value, ImproperlyConfigured)
    assert f"{__name__}.sync" not in app.tasks


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_option_of_a_lazy_task_fails_when_the_app_is_finalized(
    app: Celery, options: dict[str, Any], message: str
) -> None:
    @app.task(base=SingletonTask, **options)
    def sync(account: int) -> None: ...

    with pytest.raises(LockConfigError, match=f"^{__name__}.sync: {message}"):
        app.finalize()


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_option_of_a_class_fails_at_the_class_statement(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LockConfigError, match=f"^accounts.sync: {message}"):

        class Sync(SingletonTask):
            name = "accounts.sync"
            vars().update(options)

            def run(self, account: int) -> None: ...


def test_class_without_a_name_is_named_by_its_qualified_name() -> None:
    with pytest.raises(LockConfigError, match=r"<locals>.Sync: unknown option lock_tll"):

        class Sync(SingletonTask):
            lock_tll = 5


def test_wrong_option_of_a_shared_task_fails_when_an_app_is_finalized(app: Celery) -> None:
    def declare() -> None:
        @shared_task(base=SingletonTask, lock_on=["acount"])
        def sync(account: int) -> None: ...  # at once, if any app of this process is finalized already

        app.finalize()

    with pytest.raises(LockConfigError, match=f"^{__name__}.sync: lock_on names 'acount'"):
        declare()


def test_abstract_base_may_name_arguments_that_only_its_tasks_have(app: Celery, worker: InProcessWorker) -> None:
    class AccountTask(SingletonTask):
        abstract = True
        lock_on = ("account",)

    @app.task(base=AccountTask)
    def sync(account: int, full: bool = False) -> None: ...

    assert sync.lock_key_for(1) == sync.lock_key_for(1, full=True) != sync.lock_key_for(2)
    with pytest.raises(LockConfigError, match="lock_on names 'account', which is not an argument of the task"):

        class Other(AccountTask):
            def run(self, user: int) -> None: ...


def test_annotations_set_options(make_app: AppFactory) -> None:
    name = f"{__name__}.sync"
    app = make_app(task_annotations={name: {"lock_on": ["account"], "lock_ttl": 7}})

    @app.task(base=SingletonTask, lock_ttl=5)
    def sync(account: int, full: bool = False) -> None: ...

    assert sync.lock_key_for(1) == sync.lock_key_for(1, full=True)
    assert sync._plan().options.ttl == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lock_tll": 7}, "unknown option lock_tll"), ({"lock_ttl": 0}, "lock_ttl=0 is too short"), WRONG[6]],
)
def test_wrong_annotation_fails_when_the_app_is_finalized(
    make_app: AppFactory, options: dict[str, Any], message: str
) -> None:
    app = make_app(task_annotations={f"{__name__}.sync": options})

    @app.task(base=SingletonTask)
    def sync(account: int) -> None: ...

    with pytest.raises(LockConfigError, match=f"^{__name__}.sync: {message}"):
        app.finalize()


def test_options_set_on_the_task_later_count_from_the_next_call(
    app: Celery, worker: InProcessWorker, redis: Any
) -> None:
    seen = []

    @app.task(base=SingletonTask, bind=True)
    def sync(self: Any, account: int, full: bool = False) -> None:
        seen.append((self.lock.key, ttl(redis, self.lock.key)))

    sync.delay(1)
    worker.run()
    sync.lock_ttl = timedelta(seconds=300)
    sync.lock_on = ["account"]
    sync.lock_name = "accounts"
    sync.delay(1, full=True)
    worker.run()
    [(first, first_ttl), (second, second_ttl)] = seen
    assert (first_ttl, second_ttl) == (30, 300)
    assert first != second == sync.lock_key_for(1)
    assert second.startswith("redislock:{accounts}:")
    sync.lock_enabled = False
    sync.delay(1)
    worker.run_all()
    assert len(seen) == 2  # it had no lock to look at


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_option_set_later_fails_at_once_and_changes_nothing(
    app: Celery, options: dict[str, Any], message: str
) -> None:
    @app.task(base=SingletonTask)
    def sync(account: int) -> None: ...

    before = sync.lock_key_for(1)
    *harmless, (name, value) = options.items()
    for other, its_value in harmless:
        setattr(sync, other, its_value)
    with pytest.raises(LockConfigError, match=f"^{__name__}.sync: {message}"):
        setattr(sync, name, value)
    assert (sync.lock_key_for(1), sync._plan().options.ttl) == (before, 30)


def test_other_attributes_can_be_set_as_ever(app: Celery) -> None:
    @app.task(base=SingletonTask)
    def sync() -> None: ...

    sync.rate_limit = "10/m"
    sync.locked_by_me = True
    assert sync.rate_limit == "10/m"


def test_coroutine_function_is_refused_at_its_declaration(app: Celery) -> None:
    @app.task(base=SingletonTask)
    async def fetch() -> None: ...

    with pytest.raises(LockConfigError, match=f"^{__name__}.fetch: the body is a coroutine function"):
        app.finalize()


def test_coroutine_that_a_body_returns_is_refused_and_closed(app: Celery, worker: InProcessWorker) -> None:
    made = []

    async def work() -> None: ...

    @app.task(base=SingletonTask)
    def fetch() -> Any:
        made.append(work())
        return made[-1]

    result = fetch.delay()
    worker.run()
    assert result.state == "FAILURE"
    assert "returned a coroutine" in str(result.result)
    with pytest.raises(RuntimeError, match="cannot reuse"):
        made[0].send(None)  # closed: no "never awaited" warning


def test_project_whose_own_call_awaits_the_body_may_use_coroutine_functions(
    app: Celery, worker: InProcessWorker, redis: Any
) -> None:
    class AsyncTask(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return asyncio.run(self.run(*args, **kwargs))

    class AsyncSingleton(SingletonMixin, AsyncTask):
        abstract = True

    @app.task(base=AsyncSingleton, bind=True)
    async def fetch(self: Any) -> bool:
        await asyncio.sleep(0)
        return bool(redis.exists(self.lock.key))

    result = fetch.delay()
    worker.run()
    assert result.get() is True


def test_class_based_task_runs_under_its_lock(app: Celery, worker: InProcessWorker, redis: Any) -> None:
    class Sync(SingletonTask):
        name = "accounts.sync"
        lock_key = "account:{account}"

        def run(self, account: int) -> str:
            assert redis.exists(self.lock.key)
            return self.lock.key

    sync = app.register_task(Sync())
    result = sync.delay(account=5)
    worker.run()
    assert result.get() == "redislock:{accounts.sync}:account:5"
    assert not redis.exists(result.get())


@pytest.mark.parametrize("kind", ["function", "staticmethod"])
def test_lock_key_may_be_a_function_in_a_class(app: Celery, worker: InProcessWorker, kind: str) -> None:
    def key(account: int) -> str:
        return f"a:{account}"

    class Sync(SingletonTask):
        name = "accounts.sync"
        lock_key = staticmethod(key) if kind == "staticmethod" else key

        def run(self, account: int) -> str:
            return self.lock.key

    result = app.register_task(Sync()).delay(5)
    worker.run()
    assert result.get() == "redislock:{accounts.sync}:a:5"


def test_lock_key_that_is_a_method_is_refused() -> None:
    """It would be called with the arguments alone."""
    with pytest.raises(LockConfigError, match=r"^accounts\.sync: lock_key takes self"):

        class Sync(SingletonTask):
            name = "accounts.sync"

            def lock_key(self, account: int) -> str:
                return f"a:{account}"

            def run(self, account: int) -> None: ...


def test_shared_task_locks_in_each_app(make_app: AppFactory, make_worker: WorkerMaker) -> None:
    @shared_task(base=SingletonTask, bind=True)
    def sync(self: Any, account: int) -> str:
        return self.lock.key

    for prefix in ("one", "two"):
        app = make_app(redislock_prefix=prefix)
        app.finalize()
        result = app.tasks[f"{__name__}.sync"].delay(1)
        make_worker(app).run()
        assert result.get().startswith(f"{prefix}:{{{__name__}.sync}}:v1-")


# --- a project's own base classes

app_context: list[str] = []


@contextmanager
def context(name: str) -> Any:
    app_context.append(name)
    try:
        yield
    finally:
        app_context.pop()


class RunsInContext(Task):
    """As in Flask's documentation."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context("flask"):
            return self.run(*args, **kwargs)


class CallsInContext(Task):
    """As in many projects."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context("flask"):
            return super().__call__(*args, **kwargs)


@pytest.fixture(params=["as in a test", "as in a worker"])
def celerys_call(request: pytest.FixtureRequest, app: Celery) -> Any:
    """A worker replaces the ``__call__`` of Celery's Task."""
    if request.param == "as in a test":
        yield
        return
    setup_worker_optimizations(app)
    yield
    reset_worker_optimizations(app)


@pytest.mark.parametrize("base", [RunsInContext, CallsInContext])
@pytest.mark.usefixtures("celerys_call")
def test_context_of_a_projects_base_class_is_entered_under_the_lock(
    app: Celery, worker: InProcessWorker, base: type
) -> None:
    singleton = type("Singleton", (SingletonMixin, base), {"abstract": True})

    @app.task(base=singleton, bind=True)
    def sync(self: Any, account: int) -> Any:
        return [list(app_context), self.lock.key, self.request.id]

    result = sync.delay(1)
    worker.run()
    entered, key, task_id = result.get()
    assert entered == ["flask"]
    assert key == sync.lock_key_for(1)
    assert app_context == []
    assert task_id == result.id


@pytest.mark.parametrize("base", [RunsInContext, CallsInContext])
def test_context_of_a_projects_base_class_is_not_entered_by_a_denied_call(
    app: Celery, worker: InProcessWorker, base: type, hold: Hold
) -> None:
    singleton = type("Singleton", (SingletonMixin, base), {"abstract": True})

    @app.task(base=singleton, lock_skip_result="skipped")
    def sync(account: int) -> str:
        raise AssertionError("it was denied")

    hold(sync.lock_key_for(1))
    result = sync.delay(1)
    worker.run()
    assert result.get() == "skipped"


def test_call_of_a_subclass_runs_before_the_lock_is_taken(app: Celery, worker: InProcessWorker, redis: Any) -> None:
    seen = []

    class Measured(SingletonTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(redis.exists(self.lock_key_for(*args, **kwargs)))
            return super().__call__(*args, **kwargs)

    @app.task(base=Measured, bind=True)
    def sync(self: Any, account: int) -> None:
        seen.append(redis.exists(self.lock.key))

    sync.delay(1)
    worker.run()
    assert seen == [0, 1]


def test_mixin_behind_a_task_class_is_refused() -> None:
    """It would never be asked: Celery's Task would come first."""
    for bases in ((Task, SingletonMixin), (RunsInContext, SingletonTask), (RunsInContext, SingletonMixin)):
        with pytest.raises(LockConfigError, match="comes before SingletonMixin among the base classes"):
            type("Wrong", bases, {"abstract": True})


def test_own_mixin_that_goes_on_with_super_may_come_first(app: Celery, worker: InProcessWorker) -> None:
    class Traced:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with context("span"):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]

    class TracedSingleton(Traced, SingletonTask):
        abstract = True

    @app.task(base=TracedSingleton, bind=True)
    def sync(self: Any) -> Any:
        return [list(app_context), bool(self.lock.key)]

    result = sync.delay()
    worker.run()
    assert result.get() == [["span"], True]


def test_call_that_never_goes_on_to_the_gate_is_shouted_about_once(
    app: Celery, worker: InProcessWorker, log: pytest.LogCaptureFixture
) -> None:
    class Forgetful(SingletonTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    @app.task(base=Forgetful)
    def sync() -> str:
        return "ran"

    @app.task
    def plain() -> str:
        return "ran"

    for task in (sync, sync, plain):
        task.delay()
        worker.run()
    [record] = [record for record in log.records if record.levelno == logging.ERROR]
    assert f"{__name__}.sync" in record.getMessage()
    assert "ran without meeting its lock" in record.getMessage()


def test_handlers_of_a_task_see_what_they_see_without_us(app: Celery, worker: InProcessWorker, hold: Hold) -> None:
    calls = []

    class Handlers(Task):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            calls.append(("before_start", self.request.id == task_id, args))

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            calls.append(("on_success", self.request.id == task_id, retval))

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            calls.append(("on_failure", self.request.id == task_id, type(exc).__name__))

        def after_return(self, status: str, *_: Any) -> None:
            calls.append(("after_return", True, status))

    class Singleton(SingletonMixin, Handlers):
        abstract = True

    @app.task(base=Singleton, lock_skip_result="skipped")
    def sync(account: int) -> str:
        if account == 3:
            raise ValueError
        return "ran"

    hold(sync.lock_key_for(2))
    for account in (1, 2, 3):
        sync.delay(account)
        worker.run()
    assert calls == [
        ("before_start", True, [1]),
        ("on_success", True, "ran"),
        ("after_return", True, "SUCCESS"),
        ("before_start", True, [2]),
        ("on_success", True, "skipped"),
        ("after_return", True, "SUCCESS"),
        ("before_start", True, [3]),
        ("on_failure", True, "ValueError"),
        ("after_return", True, "FAILURE"),
    ]


def test_task_that_before_start_ends_takes_no_lock(app: Celery, worker: InProcessWorker, redis: Any) -> None:
    class Refuses(SingletonTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            raise RuntimeError("not today")

    @app.task(base=Refuses)
    def sync() -> None: ...

    result = sync.delay()
    worker.run()
    assert result.state == "FAILURE"
    assert redis.keys() == []


# --- app.Task


def every_task_a_singleton(make_app: AppFactory, how: str, **conf: Any) -> Celery:
    if how == "app.Task":
        app = make_app(**conf)
        app.Task = SingletonTask
        return app
    return make_app(task_cls="celery_redislock:SingletonTask" if how == "by name" else SingletonTask, **conf)


@pytest.mark.parametrize("how", ["app.Task", "task_cls", "by name"])
def test_as_default_task_class_it_locks_all_but_celerys_own_and_who_opts_out(
    make_app: AppFactory, make_worker: WorkerMaker, redis: Any, how: str
) -> None:
    app = every_task_a_singleton(make_app, how)
    locks = []

    @app.task(bind=True)
    def sync(self: Any) -> None:
        locks.append(self.lock.key)

    @app.task(bind=True, lock_enabled=False)
    def free(self: Any) -> int:
        return len(redis.keys())

    worker = make_worker(app)
    group = app.tasks["celery.group"]
    assert isinstance(app.tasks["celery.accumulate"], SingletonTask)
    accumulated = app.tasks["celery.accumulate"].delay(1, 2)
    counted = free.delay()
    worker.run()
    worker.run()
    assert accumulated.get() == [1, 2]
    assert counted.get() == 0
    assert redis.keys() == []
    sync.delay()
    worker.run()
    assert locks == [sync.lock_key_for()]
    assert group.name not in str(redis.keys())


def test_celerys_own_task_can_be_locked_by_saying_so(
    make_app: AppFactory, make_worker: WorkerMaker, redis: Any
) -> None:
    app = every_task_a_singleton(
        make_app, "app.Task", task_annotations={"celery.accumulate": {"lock_enabled": True, "lock_min_hold": 60}}
    )
    worker = make_worker(app)
    app.tasks["celery.accumulate"].delay(1)
    worker.run()
    assert list(redis.scan_iter("redislock:{celery.accumulate}:v1-*"))


# --- apps


def test_hooks_are_installed_once_however_often_tasks_are_bound(app: Celery) -> None:
    tasks = []
    for n in range(3):

        @app.task(base=SingletonTask, name=f"{__name__}.sync{n}")
        def sync() -> None: ...

        tasks.append(sync.name)
    app.finalize()
    receivers = len(signals.task_postrun.receivers)
    steps = list(app.steps["worker"])
    for name in tasks:
        type(app.tasks[name]).on_bound(app)
        type(app.tasks[name]).on_bound(app)
    assert [step.__name__ for step in app.steps["worker"]].count("RedisLockStep") == 1
    assert list(app.steps["worker"]) == steps
    assert len(signals.task_postrun.receivers) == receivers


def test_two_apps_in_one_process_lock_apart(make_app: AppFactory, make_worker: WorkerMaker, redis: Any) -> None:
    locks = []
    for prefix, seconds in (("one", 100), ("two", 200)):
        app = make_app(redislock_prefix=prefix, redislock_ttl=seconds)

        @app.task(base=SingletonTask, bind=True, name="accounts.sync", shared=False)
        def sync(self: Any) -> None:
            locks.append((self.lock.key.partition(":")[0], ttl(redis, self.lock.key)))
            assert Runtime.of(self.app) is Runtime.of(app)  # noqa: B023

        result = sync.delay()
        make_worker(app).run()
        result.get()
    assert locks == [("one", 100), ("two", 200)]


@pytest.mark.parametrize("namespace", [None, "CELERY"])
def test_settings_give_way_to_annotations_those_to_calls(
    make_app: AppFactory, make_worker: WorkerMaker, redis: Any, namespace: str | None
) -> None:
    app = make_app(
        namespace=namespace,
        redislock_ttl=100,
        redislock_prefix="mine",
        redislock_on_conflict="raise",
        task_annotations={f"{__name__}.annotated": {"lock_ttl": 300}},
    )

    def look(self: Any) -> Any:
        return [self.name.rpartition(".")[2], ttl(redis, self.lock.key)]

    def declare(name: str, **options: Any) -> Any:
        return app.task(base=SingletonTask, bind=True, name=f"{__name__}.{name}", **options)(look)

    plain, declared, annotated = declare("plain"), declare("declared", lock_ttl=200), declare("annotated", lock_ttl=200)
    worker = make_worker(app)
    results = [
        plain.delay(),
        declared.delay(),
        annotated.delay(),
        annotated.apply_async(lock_ttl=400),
        annotated.s().set(lock_ttl=500).delay(),
    ]
    worker.run_all()
    assert [result.get() for result in results] == [
        ["plain", 100],
        ["declared", 200],
        ["annotated", 300],
        ["annotated", 400],
        ["annotated", 500],
    ]
    assert plain.lock_key_for().startswith("mine:{")
    assert {task._plan().options.on_conflict for task in (plain, declared, annotated)} == {"raise"}


def test_wrong_setting_fails_each_call_and_names_itself(make_app: AppFactory, make_worker: WorkerMaker) -> None:
    app = make_app(redislock_ttl=0)

    @app.task(base=SingletonTask)
    def sync() -> None: ...

    result = sync.delay()
    make_worker(app).run()
    assert result.state == "FAILURE"
    assert "redislock_ttl=0 is too short" in str(result.result)


@pytest.mark.parametrize("where", ["setting", "task", "call"])
def test_task_that_takes_no_lock_needs_no_redis(make_app: AppFactory, make_worker: WorkerMaker, where: str) -> None:
    app = make_app(redislock_url=None, **({"redislock_enabled": False} if where == "setting" else {}))

    @app.task(base=SingletonTask, **({"lock_enabled": False} if where == "task" else {}))
    def sync() -> str:
        return "ran"

    result = sync.apply_async(**({"lock_enabled": False} if where == "call" else {}))
    make_worker(app).run()
    assert result.get() == "ran"


def test_setting_that_switches_locks_off_gives_way_to_a_task_that_wants_its_lock(
    make_app: AppFactory, make_worker: WorkerMaker
) -> None:
    app = make_app(redislock_enabled=False)

    @app.task(base=SingletonTask, bind=True, lock_enabled=True)
    def sync(self: Any) -> bool:
        return self.lock.held

    result = sync.delay()
    make_worker(app).run()
    assert result.get() is True


def start_worker(app: Celery) -> None:
    """The part of it that is ours."""
    [step] = [step for step in app.steps["worker"] if step.__name__ == "RedisLockStep"]
    worker = SimpleNamespace(app=app, pool_cls=SoloPool)
    ours = step(worker)
    ours.create(worker)
    ours.start(worker)


@pytest.fixture
def declared(make_app: AppFactory) -> AppFactory:
    """An app with a task."""

    def make(**conf: Any) -> Celery:
        app = make_app(**conf)
        app.task(base=SingletonTask, name="sync")(empty_body)
        app.finalize()
        return app

    return make


def empty_body() -> None: ...


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"redislock_ttl": 0}, "redislock_ttl=0 is too short"),
        ({"redislock_url": None}, "there is no Redis to lock on"),
        ({"redislock_url": "localhost"}, "redislock_url is not a URL"),
        ({"redislock_prefix": "{}"}, "redislock_prefix"),
    ],
)
def test_worker_does_not_start_with_a_wrong_setting(declared: AppFactory, conf: dict[str, Any], message: str) -> None:
    with pytest.raises(LockConfigError, match=message):
        start_worker(declared(**conf))


def test_worker_whose_locks_are_switched_off_starts_without_a_redis(
    declared: AppFactory, log: pytest.LogCaptureFixture
) -> None:
    start_worker(declared(redislock_url=None, redislock_enabled=False))
    assert "there is no Redis to lock on" in log.text


def test_worker_warns_of_protocol_1_and_of_nothing_else(declared: AppFactory, log: pytest.LogCaptureFixture) -> None:
    start_worker(declared())
    assert not [record for record in log.records if record.levelno >= logging.WARNING]
    start_worker(declared(task_protocol=1))
    assert "a task that sends itself again may be skipped" in log.text


# --- the rest of a task's life


def test_task_is_pickled_by_name(app: Celery) -> None:
    @app.task(base=SingletonTask, lock_ttl=5)
    def sync(account: int) -> None: ...

    sync.lock_key_for(1)
    again = pickle.loads(pickle.dumps(app.tasks[sync.name]))
    assert again is app.tasks[sync.name]


def test_task_is_copied_without_harm(app: Celery) -> None:
    @app.task(base=SingletonTask, lock_ttl=5)
    def sync(account: int) -> None: ...

    task = app.tasks[sync.name]
    assert copy.copy(task).lock_key_for(1) == task.lock_key_for(1)


def test_traceback_of_a_failing_body_ends_in_the_body(app: Celery, worker: InProcessWorker) -> None:
    @app.task(base=SingletonTask)
    def sync(account: int) -> None:
        raise ZeroDivisionError("mine")

    result = sync.delay(1)
    worker.run()
    assert result.traceback.rstrip().endswith("ZeroDivisionError: mine")
    with pytest.raises(ZeroDivisionError) as caught:
        sync(1)
    assert caught.traceback[-1].name == "sync"


def test_autoretry_and_signature_see_the_same_arguments(app: Celery, worker: InProcessWorker) -> None:
    @app.task(base=SingletonTask, bind=True, autoretry_for=(ValueError,), lock_on=["account"], default_retry_delay=0)
    def sync(self: Any, account: int, full: bool = False) -> int:
        if self.request.retries < 2:
            raise ValueError
        return int(self.request.retries)

    result = sync.delay(1, full=True)
    worker.run_all()
    assert result.get() == 2
    assert sync.lock_key_for(1) == sync.lock_key_for(account=1, full=True)


def test_wire_options_are_plain_json() -> None:
    wire = wire_options("t", {"lock_ttl": timedelta(minutes=1), "lock_on": {"b", "a"}, "lock_skip_result": {"n": 1}})
    assert wire == {"ttl": 60.0, "on": ["a", "b"], "skip_result": {"n": 1}}
