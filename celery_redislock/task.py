"""`SingletonTask`: the gate that a call passes before its body runs.

Why in ``__call__``: a ``task_prerun`` receiver cannot veto (its exception is swallowed and the body runs),
``before_start`` cannot finish a skipped call so that links and chains go on, and a ``finally`` in here runs for every
ending that leaves the process alive, before callbacks, chain and result are published: a follow-up never meets the lock
of the run that sent it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, Final

from celery import Task

from celery_redislock.denied import HEADER, header
from celery_redislock.errors import LockConfigError, LockUnavailable
from celery_redislock.gate import Gate, Plan
from celery_redislock.held import HeldLock, stack_holds
from celery_redislock.keys import KeyMaker
from celery_redislock.options import OPTION_NAMES, LockOptions, check_option, unknown_option
from celery_redislock.runtime import MARK, Runtime
from celery_redislock.worker import install

__all__ = ["SingletonMixin", "SingletonTask"]

_OUR_NAMES: Final = frozenset({"lock_key_for"})


def wire_options(task: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Validate per-call options and return them as they travel: bare names, values that JSON carries.

    Raises:
        LockConfigError: A wrong option, or a callable, which no message can carry.
    """
    wire = {}
    for name, raw in call.items():
        option = name.removeprefix("lock_")
        value = check_option(task, option, raw)
        if callable(value):
            raise LockConfigError(f"{task}: {name} for one call can't be a callable; give a template")
        wire[option] = list(value) if isinstance(value, tuple) else value
    return wire


def _attributes(owner: Any) -> dict[str, Any]:
    """Return the lock options that a task or class has set, by bare name."""
    found = {}
    for name in OPTION_NAMES:
        value = inspect.getattr_static(owner, f"lock_{name}", _attributes)
        if value is not _attributes:
            found[name] = value.__func__ if isinstance(value, staticmethod) else value
    return found


def _check_attributes(cls: type) -> None:
    """Validate what a class says about its lock, as early as it is said."""
    task = str(getattr(cls, "name", None) or cls.__qualname__)
    for attribute in dir(cls):
        option = attribute.removeprefix("lock_")
        if attribute.startswith("lock_") and option not in OPTION_NAMES and attribute not in _OUR_NAMES:
            raise unknown_option(task, attribute, [f"lock_{name}" for name in OPTION_NAMES])
    options = LockOptions.resolve(task, attributes=_attributes(cls))
    run = inspect.getattr_static(cls, "run", None)
    if run is None or run is inspect.getattr_static(Task, "run"):
        return
    if inspect.iscoroutinefunction(run.__func__ if isinstance(run, staticmethod) else run):
        raise LockConfigError(f"{task}: the body is a coroutine function, which Celery does not run; make it a plain one")
    KeyMaker(task=task, signature=_signature(run), on=options.on, template=options.key)


def _signature(run: Any) -> inspect.Signature:
    """Return the signature that callers see: without ``self``."""
    if isinstance(run, staticmethod):
        return inspect.signature(run.__func__)
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _has_own_call(cls: type) -> bool:
    """Tell whether a class between us and Celery's Task has a ``__call__`` of its own, such as Flask's app context."""
    mro = cls.__mro__
    behind = mro[mro.index(SingletonMixin) + 1 :]
    return next(c for c in behind if "__call__" in c.__dict__) is not Task


class SingletonMixin:
    """Makes at most one call with the same signature run at a time. Put it before a task base class of your own.

    Options are class attributes, see `celery_redislock.options.LockOptions`; durations are in seconds.

    Example:
        >>> class AppTask(SingletonMixin, MyBaseTask):
        ...     abstract = True
        ...     lock_ttl = 60
    """

    lock_enabled: ClassVar[bool]
    lock_on: ClassVar[list[str] | None]
    lock_key: ClassVar[str | Callable[..., object] | None]
    lock_name: ClassVar[str | None]
    lock_ttl: ClassVar[float | timedelta]
    lock_renew: ClassVar[bool]
    lock_max_hold: ClassVar[float | timedelta | None]
    lock_min_hold: ClassVar[float | timedelta]
    lock_on_conflict: ClassVar[str]
    lock_skip_result: ClassVar[Any]
    lock_retry_for: ClassVar[float | timedelta | None]
    lock_wait: ClassVar[float | timedelta]
    lock_on_outage: ClassVar[str]
    lock_on_lost: ClassVar[str]
    lock_done_ttl: ClassVar[float | timedelta]

    # what Celery's Task has, for the type checker
    name: Any
    app: Any
    request: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_attributes(cls)

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Hook the library into the app; Celery calls this when the task is bound, more than once."""
        super().on_bound(app)  # type: ignore[misc]
        _check_attributes(cls)
        install(app)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("lock_"):
            check_option(str(self.name), name.removeprefix("lock_"), value)
            self.__dict__.pop("_lock_plan", None)
        super().__setattr__(name, value)

    # --- the public side

    @property
    def lock(self) -> HeldLock:
        """The lock that this run holds.

        Raises:
            LockUnavailable: It holds none: called directly, ``lock_enabled=False``, or ``lock_on_outage="run"``.
        """
        run = self.request.__dict__.get(MARK)
        if run is None or run.lock is None:
            raise LockUnavailable(
                f"{self.name}: this run holds no lock (called directly, lock_enabled=False, "
                'or lock_on_outage="run" while the store was away); in helpers use current_lock(), which may be None'
            )
        lock: HeldLock = run.lock
        return lock

    def lock_key_for(self, *args: Any, **kwargs: Any) -> str:
        """Return the lock key of a call with these arguments. Asks no server.

        Raises:
            LockKeyError: The arguments do not fit the signature, or no key can be made from one of them.
        """
        plan = self._plan()
        return plan.scheme.lock(plan.maker.id(args, kwargs))

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Send the call. ``lock_<option>=...`` sets a lock option for this call only.

        Raises:
            LockConfigError: A lock option is wrong.
        """
        call = {name: options.pop(name) for name in list(options) if name.startswith("lock_")}
        if call:
            wire = wire_options(str(self.name), call)
            headers = dict(options.get("headers") or {})
            headers[HEADER] = {**headers.get(HEADER, {}), "options": wire}
            options["headers"] = headers
        return super().apply_async(args, kwargs, *rest, **options)  # type: ignore[misc]

    # --- the gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the gate, then run the body (the worker calls this)."""
        request = self.request
        if request.called_directly or MARK in request.__dict__:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        request.__dict__[MARK] = None
        runtime = Runtime.of(self.app)
        plan = self._plan(header(request).get("options"))
        if not plan.options.enabled or (request.is_eager and not runtime.settings.eager):
            return self._body(args, kwargs)
        key = plan.scheme.lock(plan.maker.id(args, kwargs))
        if request.is_eager and stack_holds(key):  # the caller further up holds it and waits for us
            return self._body(args, kwargs)
        return Gate(self, request, runtime, plan, key).pass_through(lambda: self._body(args, kwargs))

    def _body(self, args: Any, kwargs: Any) -> Any:
        """Run what comes next: a base class's own ``__call__``, or the body itself.

        Not Celery's ``__call__``: outside of a worker it would put an empty request before the real one.
        """
        if _has_own_call(type(self)):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self.run(*args, **kwargs)  # type: ignore[attr-defined]

    def _plan(self, call: Mapping[str, Any] | None = None) -> Plan:
        """Return the effective options and what was compiled from them; those without per-call options are kept."""
        if call:
            return Plan.make(self, _attributes(self), call)
        plan: Plan | None = self.__dict__.get("_lock_plan")
        if plan is None:
            plan = self.__dict__["_lock_plan"] = Plan.make(self, _attributes(self), None)
        return plan


class SingletonTask(SingletonMixin, Task):  # type: ignore[misc]
    """Celery's ``Task`` with `SingletonMixin`: ``@app.task(base=SingletonTask)``."""

    abstract = True
