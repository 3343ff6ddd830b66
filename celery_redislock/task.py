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
from celery_redislock.gate import Borrowed, Gate, Plan, compile_options, override
from celery_redislock.held import HeldLock, lock_on_stack
from celery_redislock.keys import KeyMaker
from celery_redislock.options import OPTION_NAMES, LockOptions, check_option, unknown_option
from celery_redislock.run import MARK
from celery_redislock.runtime import Runtime
from celery_redislock.worker import install

__all__ = ["SingletonMixin", "SingletonTask"]

_OUR_NAMES: Final = frozenset({"lock_key_for"})
_ABSENT: Final = object()


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
        value = inspect.getattr_static(owner, f"lock_{name}", _ABSENT)
        if value is not _ABSENT:
            found[name] = value.__func__ if isinstance(value, staticmethod) else value
    if str(getattr(owner, "name", None)).startswith("celery."):
        found.setdefault("enabled", False)  # Celery's own tasks, where app.Task is ours
    return found


def _check_attributes(cls: type) -> None:
    """Validate what a class says about its lock, as early as it is said."""
    task = str(getattr(cls, "name", None) or cls.__qualname__)
    for attribute in dir(cls):
        option = attribute.removeprefix("lock_")
        if attribute.startswith("lock_") and option not in OPTION_NAMES and attribute not in _OUR_NAMES:
            raise unknown_option(task, attribute, [f"lock_{name}" for name in OPTION_NAMES])
    _check_order(task, cls)
    options = LockOptions.resolve(task, attributes=_attributes(cls))
    if inspect.isfunction(options.key) and next(iter(inspect.signature(options.key).parameters), "") == "self":
        raise LockConfigError(f"{task}: lock_key takes self; write a function of the task's arguments, a staticmethod")
    run = inspect.getattr_static(cls, "run", None)
    if run is None or run is inspect.getattr_static(Task, "run"):
        return
    body = run.__func__ if isinstance(run, staticmethod) else run
    if inspect.iscoroutinefunction(body) and not _has_own_call(cls):  # a __call__ of its own may well wait for it
        raise LockConfigError(f"{task}: the body is a coroutine function, which Celery does not run; write a plain one")
    KeyMaker(task=task, signature=_signature(run), on=options.on, template=options.key)


def _check_order(task: str, cls: type) -> None:
    """Refuse a task base class that stands before the gate: its ``__call__`` would run the body without a lock."""
    before = cls.__mro__[: cls.__mro__.index(SingletonMixin)]
    for base in before:
        if "__call__" in base.__dict__ and issubclass(base, Task) and not issubclass(base, SingletonMixin):
            raise LockConfigError(
                f"{task}: {base.__name__} comes before SingletonMixin among the base classes, so that calls would not "
                f"meet the lock; write the mixin first, as in class {cls.__name__}(SingletonMixin, ...)"
            )


def _signature(run: Any) -> inspect.Signature:
    """Return the signature that callers see: without ``self``."""
    if isinstance(run, staticmethod):
        return inspect.signature(run.__func__)
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _why_no_lock(request: Any) -> str:
    if request.called_directly:
        return "it was called directly (also by map, starmap and chunks)"
    if request.is_eager:
        return "eager calls take one only with redislock_eager = True"
    return 'lock_enabled is False, or lock_on_outage="run" has let it run while the store was away'


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
        if not name.startswith("lock_"):
            super().__setattr__(name, value)
            return
        option = name.removeprefix("lock_")
        compile_options(self, {**_attributes(self), option: value})
        super().__setattr__(name, value)
        for cached in ("_lock_plan", "_lock_on"):
            self.__dict__.pop(cached, None)

    # --- the public side

    @property
    def lock(self) -> HeldLock:
        """The lock that this run holds.

        Raises:
            LockUnavailable: It holds none: called directly, eager, ``lock_enabled=False``, or ``lock_on_outage="run"``.
        """
        request = self.request
        run = request.__dict__.get(MARK)
        if run is None or run.lock is None:
            raise LockUnavailable(
                f"{self.name}: this run holds no lock: {_why_no_lock(request)}; "
                "code that runs with and without one uses current_lock(), which may be None"
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
        return super().apply_async(args, kwargs, *rest, **self._with_header(options))  # type: ignore[misc]

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run the call here and now, as in eager mode. ``lock_<option>=...`` as for `apply_async`.

        Raises:
            LockConfigError: A lock option is wrong.
        """
        return super().apply(args, kwargs, *rest, **self._with_header(options))  # type: ignore[misc]

    def _with_header(self, options: dict[str, Any]) -> dict[str, Any]:
        """Move lock options into our message header; those that a retried message has already had stay."""
        call = {name: options.pop(name) for name in list(options) if name.startswith("lock_")}
        if call:
            wire = wire_options(str(self.name), call)
            headers = dict(options.get("headers") or {})
            ours = headers.get(HEADER) or {}
            wire = override(ours.get("options") or {}, wire)
            compile_options(self, _attributes(self), wire)
            options["headers"] = {**headers, HEADER: {**ours, "options": wire}}
        return options

    # --- the gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the gate, then run the body (the worker calls this)."""
        request = self.request
        if request.called_directly or MARK in request.__dict__:  # the latter: self(...) in the body
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        request.__dict__[MARK] = None
        call = header(request).get("options")
        call = call if isinstance(call, Mapping) else None  # not ours, then
        if not self._takes_lock(request, call):
            return self._body(args, kwargs)
        plan = self._plan(call)
        key = plan.scheme.lock(plan.maker.id(args, kwargs))
        if request.is_eager and (lock := lock_on_stack(key)) is not None:  # the caller holds it, and waits for us
            request.__dict__[MARK] = Borrowed(lock)
            return self._body(args, kwargs)
        return Gate(self, request, Runtime.of(self.app), plan, key).pass_through(lambda: self._body(args, kwargs))

    def _takes_lock(self, request: Any, call: Mapping[str, Any] | None) -> bool:
        """Tell whether this call takes a lock. Where none is taken no Redis is needed, not even a URL of one."""
        if request.is_eager and not self.app.conf.get("redislock_eager", False):
            return False
        if call and "enabled" in call:
            return call["enabled"] is not False
        enabled: bool | None = self.__dict__.get("_lock_on")
        if enabled is None:
            # anything else that is not True is refused when the options are resolved
            own = _attributes(self).get("enabled", self.app.conf.get("redislock_enabled", True))
            enabled = self.__dict__["_lock_on"] = own is not False
        return enabled

    def _body(self, args: Any, kwargs: Any) -> Any:
        """Run what comes next: a base class's own ``__call__``, or the body itself.

        Not Celery's ``__call__``: outside of a worker it would put a copy of the request before the real one.
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
