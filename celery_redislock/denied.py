"""What a denied call does: one method for each verdict of `celery_redislock.conflict`.

A copy that waits is published by us, with the same id and the same ``retries``, and never through ``self.retry``:
waiting for a lock must not use up ``max_retries``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError
from kombu.serialization import registry

from celery_redislock.conflict import LONGEST, Verdict, back_off
from celery_redislock.errors import LockConflict, LockUnavailable
from celery_redislock.lease import Contended
from celery_redislock.options import LockOptions
from celery_redislock.run import LockRun

__all__ = ["HEADER", "Denied", "Trail"]

HEADER: Final = "redislock"
"""The one message header of ours: per-call options, and what a copy remembers of its waiting."""
REJECT_PAUSE: Final = 1.0
"""Pause before a message is requeued, s: without it one task makes 200 deliveries a second."""
PUBLISH_PATIENCE: Final = 60.0
"""How long a copy whose message is acked already tries to be published, s, before it fails loudly."""
_VISIBILITY: Final = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "redis+socket": 3600.0, "sqs": 1800.0}
"""Default visibility timeouts of kombu's transports, s (kombu 5.5: transport/redis.py, transport/SQS.py)."""


@dataclass(frozen=True, slots=True)
class Trail:
    """What a waiting copy remembers; it travels in the message.

    Attributes:
        retries: The attempt this belongs to: what is found on a later attempt is old.
        back: How often it came back.
        own: It came back from another copy of its own message.
        conflicts: How often it was denied under the policy ``retry``.
        since: The store's time of the first such denial, s.
    """

    retries: int = 0
    back: int = 0
    own: bool = False
    conflicts: int = 0
    since: float | None = None

    @classmethod
    def of(cls, request: Any) -> Trail:
        """Read it from a request; a message that has not waited, or has a broken header, has an empty one."""
        retries = request.retries or 0
        found = header(request).get("trail")
        if not isinstance(found, Mapping) or found.get("retries") != retries:
            return cls(retries)
        known = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        counts = (known.get("back", 0), known.get("conflicts", 0), known.get("since") or 0)
        return cls(**known) if all(isinstance(count, int | float) for count in counts) else cls(retries)


def header(request: Any) -> Mapping[str, Any]:
    """Return our header of a request, empty if there is none."""
    found = (request.headers or {}).get(HEADER)
    return found if isinstance(found, Mapping) else {}


@dataclass(slots=True)
class Denied:
    """A call that did not get the lock, and is not holding anything any more.

    Attributes:
        task: The task object.
        request: Its request.
        run: Its way through the lock.
        options: Its lock options.
        trail: What the message remembers.
        verdict: What is to be done.
        denial: Who holds the lock; None where the store could not be asked, or the attempt is known to be done.
    """

    task: Any
    request: Any
    run: LockRun
    options: LockOptions
    trail: Trail
    verdict: Verdict
    denial: Contended | None = None

    def conclude(self) -> Any:
        """Do it: return the task's result, or raise what makes Celery do the right thing."""
        return getattr(self, f"_{self.verdict.value}")()

    # --- one for each verdict

    def _skip(self) -> Any:
        self._tell("skip")
        return self.options.skip_result

    def _ignore(self) -> Any:
        self._tell("ignore")
        raise Ignore

    def _raise(self) -> Any:
        self._tell("raise")
        raise self._conflict()

    def _wait(self) -> Any:
        self._tell("wait")
        raise self._conflict(f" after waiting {self.options.wait:g} s (lock_wait)")

    def _drop(self) -> Any:
        self.run.dropped()
        raise Ignore

    def _retry(self) -> Any:
        denial = self.denial
        assert denial is not None
        since = denial.now if self.trail.since is None else self.trail.since
        patience = self.options.retry_for
        left = LONGEST if patience is None else patience - (denial.now - since)
        if left <= 0:
            self._tell("raise")
            raise self._conflict(f" after retrying for {patience:g} s (lock_retry_for)")
        countdown = min(self._pause(self.trail.conflicts, denial.remaining), left)
        self._tell("retry", countdown)
        trail = replace(self.trail, conflicts=self.trail.conflicts + 1, since=since)
        self._publish(countdown, trail)
        raise Retry(exc=self._conflict(), when=countdown)

    def _come_back(self) -> Any:
        remaining = LONGEST if self.denial is None else self.denial.remaining
        countdown = self._pause(self.trail.back, remaining)
        own = self.denial is not None and self.denial.holder.task_id == self.request.id
        if self.denial is not None:
            self._tell("come_back", countdown)
        self._publish(countdown, replace(self.trail, back=self.trail.back + 1, own=self.trail.own or own))
        raise Ignore

    # --- how

    def _tell(self, policy: str, countdown: float | None = None) -> None:
        if self.denial is not None:
            self.run.conflict(self.denial, policy, countdown)

    def _conflict(self, why: str = "") -> LockConflict:
        holder = str(self.denial.holder) if self.denial is not None else "an unknown client"
        return LockConflict(f"{self.task.name}: {self.run.key} is held by {holder}{why}", self.run.key, holder)

    def _pause(self, attempt: int, remaining: float) -> float:
        return back_off(
            attempt, remaining, jitter=random.random(), visibility_timeout=visibility_timeout(self.task.app.conf)
        )

    def _publish(self, countdown: float, trail: Trail) -> None:
        """Publish a copy of the message, or see to it that the broker keeps the original; never lose it silently."""
        end = time.monotonic() + PUBLISH_PATIENCE
        pause = REJECT_PAUSE
        while True:
            try:
                self._send(self._copy(countdown, trail))
                return
            except SoftTimeLimitExceeded:
                raise
            except EncodeError as error:
                self.run.outage("publish", "raise", error)
                raise LockUnavailable(
                    f"{self.task.name}: it has to wait for {self.run.key}, and no serializer that this worker accepts "
                    "can send its arguments again; declare the task with serializer=..."
                ) from error
            except Exception as error:
                if self.task.acks_late:
                    self.run.outage("publish", "reject", error)
                    time.sleep(REJECT_PAUSE)
                    raise Reject(error, requeue=True) from error
                if time.monotonic() + pause > end:
                    self.run.outage("publish", "raise", error)
                    raise LockUnavailable(
                        f"{self.task.name}: it has to wait for {self.run.key}, its message is acked already, and no "
                        f"copy could be published for {PUBLISH_PATIENCE:g} s: {type(error).__name__}"
                    ) from error
                self.run.outage("publish", "retry", error)
            time.sleep(pause)
            pause = min(2 * pause, PUBLISH_PATIENCE / 6)

    def _send(self, copy: Any) -> None:
        """Publish it as the task's messages are, or, if that can't be, in another way that this worker accepts.

        Celery does not tell a task how its message was serialised; the sender may have chosen.
        """
        try:
            copy.apply_async(add_to_parent=False)
        except EncodeError:
            for accepted in self.task.app.conf.accept_content or ():
                try:
                    copy.apply_async(add_to_parent=False, serializer=registry.type_to_name.get(accepted, accepted))
                    return
                except EncodeError:
                    continue
            raise

    def _copy(self, countdown: float, trail: Trail) -> Any:
        request = self.request
        headers = {
            **(request.headers or {}),
            HEADER: {**header(request), "trail": asdict(trail)},
            # send_task would put the running task's id, which is its own, where there is no parent
            "parent_id": request.parent_id,
        }
        for name in ("argsrepr", "kwargsrepr"):  # they may hide what the sender does not want to be seen
            if (shown := request.get(name)) is not None:
                headers[name] = shown
        ignore_result = vars(request).get("ignore_result", self.task.ignore_result)
        return self.task.signature_from_request(
            request, countdown=countdown, retries=request.retries, headers=headers, ignore_result=ignore_result
        )


def visibility_timeout(conf: Any) -> float | None:
    """Return the broker's visibility timeout, s, or None where it has none."""
    url = conf.broker_read_url or conf.broker_url or ""
    first = url[0] if isinstance(url, list | tuple) and url else url
    default = _VISIBILITY.get(str(first).partition("://")[0].lower())
    if default is None:
        return None
    return float((conf.broker_transport_options or {}).get("visibility_timeout", default))
