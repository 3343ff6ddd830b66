"""One per app: settings, store, keeper and events, wired together."""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from celery import current_task
from celery.exceptions import SoftTimeLimitExceeded

from celery_redislock import signals
from celery_redislock.errors import LockUnavailable
from celery_redislock.held import HeldLock
from celery_redislock.keeper.channel import ChildKeeper, Gateway, Remote
from celery_redislock.keeper.keeper import Keeper
from celery_redislock.keeper.plan import Change, Hold
from celery_redislock.keys import KeyScheme
from celery_redislock.lease import Renewal
from celery_redislock.observe.events import (
    Event,
    LockOrphaned,
    LockOutage,
    LockRecovered,
    LockWentLost,
    RenewalLate,
)
from celery_redislock.observe.log import LogListener
from celery_redislock.options import LockOptions
from celery_redislock.run import Identity, LockRun
from celery_redislock.settings import Settings, warn_of_unknown
from celery_redislock.stores.base import LockStore, Release
from celery_redislock.stores.connect import make_store, ssl_keywords

__all__ = ["Runtime"]

logger = logging.getLogger(__name__)

_runtimes: weakref.WeakKeyDictionary[Any, Runtime] = weakref.WeakKeyDictionary()
_making = threading.Lock()


class Runtime:
    """What the parts of one app share. Made when it is first used; `of` returns it.

    Attributes:
        settings: The app's settings.
        store: Where the leases live.
        keeper: Renews this process's leases.
    """

    def __init__(self, settings: Settings, store: LockStore) -> None:
        self.settings = settings
        self.store = store
        self._orphans = store.sibling()  # used in the keeper's thread
        self.keeper: Keeper | ChildKeeper = self._new_keeper()
        self._log = LogListener()
        self._gateway: Gateway | None = None
        self._main: tuple[socket.socket, int] | None = None

    @classmethod
    def of(cls, app: Any) -> Runtime:
        """Return the app's runtime; its settings are read on the first call.

        Args:
            app: A Celery app.

        Raises:
            LockConfigError: A setting is wrong.
        """
        app = getattr(app, "_get_current_object", lambda: app)()  # celery.current_app is a proxy
        runtime = _runtimes.get(app)
        if runtime is None:
            with _making:
                runtime = _runtimes.get(app)
                if runtime is None:
                    runtime = _runtimes[app] = cls._make(app)
        return runtime

    @classmethod
    def _make(cls, app: Any) -> Runtime:
        warn_of_unknown(app.conf, getattr(app.conf, "prefix", None))  # first: a misspelt name may be why reading fails
        settings = Settings.read(app.conf)
        LockOptions.resolve("the app's settings", settings=settings.defaults)
        KeyScheme(settings.prefix, "-")
        options = {**ssl_keywords(settings.use_ssl), **settings.client_options}
        return cls(settings, make_store(settings.url, options, settings.timeout, setting=settings.url_setting))

    @staticmethod
    def peek(app: Any) -> Runtime | None:
        """Return the app's runtime if there is one already."""
        return _runtimes.get(app)

    @staticmethod
    def forget(app: Any) -> None:
        """Drop the app's runtime, so that the next use reads the settings again (tests)."""
        runtime = _runtimes.pop(app, None)
        if runtime is not None:
            runtime.store.close()

    # --- keepers

    def _new_keeper(self) -> Keeper:
        return Keeper(
            self.store.sibling(),
            self.settings.timeout,
            self._lease_changed,
            self._renewal_late,
            on_answer=self._answered,
        )

    def open_gateway(self) -> None:
        """Before a prefork pool is forked: from now on its processes have their leases kept alive by this one."""
        if self._gateway is None and isinstance(self.keeper, Keeper):
            keeper = self.keeper
            self._gateway = Gateway(keeper.hold, keeper.drop, self._orphaned, keeper.release_later)

    def attend_gateway(self) -> None:
        """Start to listen; after the pool was forked, so that most of it is forked while there is one thread."""
        if self._gateway is not None and isinstance(self.keeper, Keeper):
            self.keeper.attend(self._gateway)

    def _after_fork_in_child(self) -> None:
        if self._gateway is not None:
            self._main = self._gateway.entrance, self._gateway.pid
            self._gateway.close_in_child()
            self._gateway = None
        if self._main is not None:
            self.keeper = ChildKeeper(*self._main, self._lease_changed, self._new_keeper)

    def _orphaned(self, hold: Hold) -> None:
        owner: Remote = hold.owner
        release = Release(hold.lease)
        try:
            owned = self._orphans.release(release).owned
        except LockUnavailable as error:
            owned = True
            self.emit(LockOutage(**owner.about, operation="release", policy="warn", reason=str(error)))
            self.keeper.release_later(release, hold.deadline)
        if owned:
            self.emit(LockOrphaned(**owner.about, fence=owner.fence, pid=owner.child.pid))

    def check_store(self) -> None:
        """Ask the store something harmless, and warn if it can't be used."""
        try:
            self.store.inspect(KeyScheme(self.settings.prefix, "-").lock("check"))
        except LockUnavailable as error:
            logger.warning("%s (%s): calls will meet lock_on_outage", error, self.settings.url_setting)

    # --- a lock outside of the gate

    @contextmanager
    def lock(self, name: str, *, ttl: float | timedelta = 30.0, wait: float | timedelta = 0.0) -> Iterator[HeldLock]:
        """Hold a plain lock on the same store for a critical section.

        Args:
            name: What is locked; the same name is the same lock in every process of this store and prefix.
            ttl: Length of the lease, s or timedelta; it is renewed while the section runs.
            wait: How long to wait for the lock, s or timedelta.

        Raises:
            LockConflict: Held by another, still, after ``wait``.
            LockUnavailable: The store could not be asked.
            LockConfigError: ``name``, ``ttl`` or ``wait`` is wrong.
        """
        options = LockOptions.resolve(f"lock({name!r})", call={"name": name, "ttl": ttl, "wait": wait})
        scheme = KeyScheme(self.settings.prefix, name)
        task = current_task
        task_id = str(task.request.id) if task and task.request.id else "-"
        run = LockRun(self, "-", options, scheme, scheme.lock("lock"), Identity(task_id, 0, socket.gethostname()))
        try:
            try:
                yield run.take_within(options.wait)
            finally:
                run.leave(finished=False)
        except BaseException:
            run.leave(finished=False)
            raise

    # --- events

    def emit(self, event: Event) -> None:
        """Tell everybody who listens. Nobody who listens can hurt the caller, or keep the others from hearing."""
        for tell in (self._log, _signal):
            try:
                tell(event)
            except SoftTimeLimitExceeded:
                raise
            except Exception:
                logger.exception("a listener of %s failed", event.name)

    def heard(self, name: str) -> bool:
        """Tell whether anybody listens to events of this name: hot paths make no event that nobody sees."""
        return signals.heard(name) or self._log.wants(name)

    def _lease_changed(self, hold: Hold, change: Change) -> None:
        owner: LockRun | Remote = hold.owner
        if isinstance(owner, Remote):
            owner.changed(hold, change)
        elif change.loss is None:
            self.emit(LockRecovered(**owner.about, fence=owner.fence))
        else:
            self.emit(LockWentLost(**owner.about, fence=owner.fence, reason=change.loss.value))

    def _renewal_late(self, hold: Hold, late: float) -> None:
        self.emit(RenewalLate(**hold.owner.about, late=late))

    def _answered(self, hold: Hold, answer: Renewal | None) -> None:
        if isinstance(hold.owner, Remote):
            hold.owner.answered(hold, answer)


def _signal(event: Event) -> None:
    signals.send(event.name, event.task, event.fields)


def _after_fork_in_child() -> None:
    for runtime in list(_runtimes.values()):
        runtime._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
