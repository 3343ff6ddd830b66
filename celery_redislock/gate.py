"""One call at the gate: the token first, then take, hold, run, and whatever happens give up.

The order is the one that did not leak in any of the trials where a soft time limit hit the acquire or the release.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from types import CoroutineType
from typing import Any, Final, NamedTuple

from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.states import READY_STATES

from celery_redislock.conflict import Call, Verdict, decide
from celery_redislock.denied import Denied, Trail
from celery_redislock.errors import LockConfigError, LockUnavailable
from celery_redislock.held import HeldLock
from celery_redislock.keys import KeyMaker, KeyScheme
from celery_redislock.lease import Acquired, AlreadyDone, Contended
from celery_redislock.options import LockOptions
from celery_redislock.run import MARK, Identity, LockRun, Pauses
from celery_redislock.runtime import Runtime

__all__ = ["Gate", "Plan"]

IN_PLACE: Final = 0.5
"""How long a call waits in place for its own other copy, s, before it gives up the slot and comes back."""


class Plan:
    """A task's lock options and what is compiled from them once."""

    __slots__ = ("maker", "options", "scheme")

    def __init__(self, options: LockOptions, scheme: KeyScheme, maker: KeyMaker) -> None:
        self.options = options
        self.scheme = scheme
        self.maker = maker

    @classmethod
    def make(cls, task: Any, attributes: Mapping[str, Any], call: Mapping[str, Any] | None) -> Plan:
        """Resolve and compile.

        Args:
            task: The bound task.
            attributes: Its own options by bare name.
            call: Those of one call, as they came in the message, or None.

        Raises:
            LockConfigError: An option is wrong.
        """
        settings = Runtime.of(task.app).settings
        options, maker = compile_options(task, attributes, call, settings.defaults)
        return cls(options, KeyScheme(settings.prefix, options.name or str(task.name)), maker)


def compile_options(
    task: Any,
    attributes: Mapping[str, Any],
    call: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[LockOptions, KeyMaker]:
    """Resolve a task's options, those of one call and the app's defaults, and compile how keys are made.

    Raises:
        LockConfigError: An option is wrong.
    """
    name = str(task.name)
    if call:
        attributes = override(attributes, {option: call[option] for option in ("on", "key") if option in call})
    options = LockOptions.resolve(name, settings=defaults, attributes=attributes, call=call)
    return options, KeyMaker(task=name, signature=inspect.signature(task.run), on=options.on, template=options.key)


def override(options: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, the others winning; where they name one of ``on`` and ``key``, it replaces the other one, too."""
    rivals = {"on": "key", "key": "on"}
    gone = {rivals[option] for option in others if option in rivals} - set(others)
    return {**{option: value for option, value in options.items() if option not in gone}, **others}


class Borrowed(NamedTuple):
    """Stands for a `LockRun` in an eager call under a lock that its caller holds."""

    lock: HeldLock
    pending: bool = False


class Gate:
    """One call at the gate."""

    __slots__ = ("_options", "_request", "_run", "_runtime", "_task", "_trail")

    def __init__(self, task: Any, request: Any, runtime: Runtime, plan: Plan, key: str) -> None:
        options = plan.options
        attempt = f"{request.id}.{request.retries or 0}.{request.get('replaced_task_nesting') or 0}"
        self._task = task
        self._request = request
        self._runtime = runtime
        self._options = options
        self._trail = Trail.of(request)
        self._run = LockRun(
            runtime,
            str(task.name),
            options,
            plan.scheme,
            key,
            Identity(str(request.id), request.retries or 0, request.hostname),
            done_key=plan.scheme.done(attempt) if options.done_ttl > 0 else None,
        )

    def pass_through(self, body: Callable[[], Any]) -> Any:
        """Take the lock, run the body, give the lock up; or do what a denied call does."""
        run, finished = self._run, False
        try:
            try:
                self._request.__dict__[MARK] = run
                denied = self._enter()
                if denied is None:
                    result = _no_coroutine(self._task, body())
                    finished = True
                    return result
            except Exception as error:
                finished = not (isinstance(error, Reject) and error.requeue)
                raise
            finally:
                run.leave(finished=finished)
        except BaseException:
            run.leave(finished=finished)  # once more: what came may have come in the middle of it
            raise
        return denied.conclude()

    # --- getting in

    def _enter(self) -> Denied | None:
        """Return None once the body may run, or what the call does instead."""
        if self._has_finished_elsewhere():
            return self._denied(Verdict.DROP, None)
        pauses: Pauses | None = None
        while True:
            try:
                grant = self._run.take()
            except LockUnavailable as error:
                return self._outage(error)
            if isinstance(grant, Acquired):
                return None
            if isinstance(grant, AlreadyDone):
                return self._denied(Verdict.DROP, None)
            verdict = decide(self._call(), grant, self._options.on_conflict)
            pauses = pauses or self._pauses(verdict)
            if not pauses.sleep(grant.remaining):
                return self._denied(verdict, grant)

    def _call(self) -> Call:
        request = self._request
        return Call(
            task_id=str(request.id),
            retries=request.retries or 0,
            parent_id=request.parent_id,
            redelivered=_redelivered(request),
            came_back=self._trail.back > 0,
            uncertain=self._run.uncertain,
        )

    def _pauses(self, verdict: Verdict) -> Pauses:
        """How long this call may wait in place."""
        patience = 0.0
        if verdict is Verdict.WAIT or (self._request.is_eager and verdict in (Verdict.COME_BACK, Verdict.RETRY)):
            patience = self._options.wait
        elif verdict is Verdict.COME_BACK:
            patience = IN_PLACE
        return Pauses(time.monotonic() + patience)

    def _outage(self, error: LockUnavailable) -> Denied | None:
        policy = self._options.on_outage
        if policy == "run":
            self._run.outage("acquire", "run", error)
            return None
        if policy == "raise" or self._request.is_eager:
            self._run.outage("acquire", "raise", error)
            raise LockUnavailable(f"{self._task.name}: {self._run.key}: {error}") from error
        self._run.outage("acquire", "come_back", error)
        return self._denied(Verdict.COME_BACK, None)

    def _denied(self, verdict: Verdict, denial: Contended | None) -> Denied:
        if self._request.is_eager and verdict in (Verdict.COME_BACK, Verdict.RETRY):
            verdict = Verdict.WAIT  # nobody would deliver a copy
        return Denied(self._task, self._request, self._run, self._options, self._trail, verdict, denial)

    def _has_finished_elsewhere(self) -> bool:
        """Tell whether the result backend knows that another copy of this very message has run to its end.

        Asked only for copies that may be second ones: it costs a round trip, and an id that a user has chosen and uses
        again must not be taken for its former self.
        """
        request, task = self._request, self._task
        if request.is_eager or not (_redelivered(request) or self._trail.own):
            return False
        if vars(request).get("ignore_result", task.ignore_result):
            return False
        try:
            return task.backend.get_state(request.id) in READY_STATES
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            return False  # no backend, or none that answers: not known to be done


def _redelivered(request: Any) -> bool:
    # not request.headers: there kombu's Redis transport leaves the mark on later retries, too
    return bool((request.delivery_info or {}).get("redelivered"))


def _no_coroutine(task: Any, result: Any) -> Any:
    if isinstance(result, CoroutineType):
        result.close()
        raise LockConfigError(
            f"{task.name}: the body returned a coroutine, which Celery does not run; write a plain one"
        )
    return result
