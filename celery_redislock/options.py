"""What a task may say about its lock, and whether it says it well. PURE.

Precedence: app setting ``redislock_<option>`` < task attribute ``lock_<option>`` (also set by ``task_annotations``) <
per call ``sig.set(lock_<option>=...)``. Everything is validated where it is declared; an error names task, option,
value and fix.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final

from celery_redislock.errors import LockConfigError

__all__ = ["CONFLICT_POLICIES", "OPTION_NAMES", "OUTAGE_POLICIES", "LockOptions", "check_option", "unknown_option"]

CONFLICT_POLICIES: Final = ("skip", "ignore", "raise", "retry", "wait")
OUTAGE_POLICIES: Final = ("retry", "run", "raise")
LOST_POLICIES: Final = ("warn",)
MIN_TTL: Final = 0.1
"""Shortest lease, s. Renewals are due each ttl/3, and 33 ms is about what a busy process can be trusted to keep."""
MAX_DURATION: Final = 366 * 86400.0
"""Longest of any duration, s. Whoever asks for more has most likely taken seconds for milliseconds."""

_SYNONYMS: Final = {  # what other libraries, and people, call them
    "timeout": "ttl",
    "expiry": "ttl",
    "expire": "ttl",
    "expires": "ttl",
    "lease": "ttl",
    "at_most_for": "ttl",
    "auto_renewal": "renew",
    "args": "on",
    "keys": "on",
    "unique_on": "on",
    "blocking": "on_conflict",
    "conflict": "on_conflict",
    "graceful": "on_conflict",
    "raise_on_duplicate": "on_conflict",
    "blocking_timeout": "wait",
    "acquire_timeout": "wait",
    "result": "skip_result",
    "at_least_for": "min_hold",
    "fail_open": "on_outage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOptions:
    """The effective options of one task or call. Durations are in seconds.

    Attributes:
        enabled: Take a lock at all.
        on: Names of the arguments that count; None: all of them; empty: one lock per task.
        key: A template over bound arguments such as ``"account:{account_id}"``, or a callable with the task's
            signature that returns a string; None: made from the signature.
        name: Share one lock among several tasks; None: the task's name.
        ttl: Length of the lease. Renewed each ttl/3; a dead holder blocks for at most this long.
        renew: Renew the lease while the task runs.
        max_hold: Stop renewing after this long (hung tasks); None: never.
        min_hold: Keep the key at least this long after acquire, even if the run is shorter.
        on_conflict: What a duplicate does: skip, ignore, raise, retry or wait.
        skip_result: What a skipped call returns.
        retry_for: How long ``retry`` goes on before `LockConflict`; None: for ever.
        wait: How long ``wait`` blocks the worker slot before `LockConflict`.
        on_outage: What happens if the store can't be asked: retry, run (fail open) or raise.
        on_lost: What happens if the lease is lost: warn.
        done_ttl: Remember a finished attempt this long, so that a late redelivered copy is dropped; 0: not at all.
    """

    enabled: bool = True
    on: tuple[str, ...] | None = None
    key: str | Callable[..., object] | None = None
    name: str | None = None
    ttl: float = 30.0
    renew: bool = True
    max_hold: float | None = None
    min_hold: float = 0.0
    on_conflict: str = "skip"
    skip_result: Any = None
    retry_for: float | None = None
    wait: float = 10.0
    on_outage: str = "retry"
    on_lost: str = "warn"
    done_ttl: float = 0.0

    @classmethod
    def resolve(
        cls,
        task: str,
        *,
        settings: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
        call: Mapping[str, Any] | None = None,
    ) -> LockOptions:
        """Merge and validate the three levels; each maps bare option names ("ttl") to raw values.

        Raises:
            LockConfigError: A value is wrong, a name unknown, or two options contradict each other.
        """
        values: dict[str, Any] = {}
        for where, level in (("redislock_", settings), ("lock_", attributes), ("lock_", call)):
            for option, raw in (level or {}).items():
                values[option] = check_option(task, option, raw, prefix=where)
        options = cls(**values)
        if options.on is not None and options.key is not None:
            raise LockConfigError(f"{task}: lock_on and lock_key exclude each other; name the arguments in one of them")
        return options


OPTION_NAMES: Final = tuple(field.name for field in fields(LockOptions))
PER_TASK: Final = frozenset({"on", "key", "name"})
"""Options that make no sense for a whole app."""


def unknown_option(task: str, name: str, known: Iterable[str]) -> LockConfigError:
    """Return the error for an option or setting that does not exist, with the nearest right name.

    Args:
        task: Name for the error message.
        name: The name in full, such as ``"lock_tll"`` or ``"redislock_tll"``.
        known: The right names in full.
    """
    names = sorted(known)
    prefix = "redislock_" if name.startswith("redislock_") else "lock_"
    option = name.removeprefix(prefix).lower()
    if prefix == "redislock_" and option in PER_TASK:
        return LockConfigError(f"{task}: {name} can't be said for a whole app; say lock_{option} on the task")
    near = _SYNONYMS.get(option)
    if near is None or prefix + near not in names:  # compared without the prefix, which would make all names alike
        near = next(iter(difflib.get_close_matches(option, [n.removeprefix(prefix) for n in names], 1, 0.5)), None)
    hint = f"did you mean {prefix}{near}?" if near else f"known: {', '.join(names)}"
    return LockConfigError(f"{task}: unknown option {_short(name)}; {hint}")


def check_option(task: str, option: str, raw: Any, *, prefix: str = "lock_") -> Any:
    """Validate one raw value and return it in its normal form.

    Args:
        task: Name for the error message (a task, or "the app's settings").
        option: Bare name such as "ttl".
        raw: What was declared.
        prefix: How the option is spelt where it was declared: ``lock_`` or ``redislock_``.

    Raises:
        LockConfigError: Unknown name or bad value.
    """
    check = _CHECKS.get(option)
    if check is None or (prefix == "redislock_" and option in PER_TASK):
        raise unknown_option(task, prefix + option, [prefix + n for n in OPTION_NAMES])
    try:
        return check(raw)
    except _Bad as bad:
        raise LockConfigError(f"{task}: {prefix}{option}={show(raw)} {bad}") from None


class _Bad(Exception):
    """Why a value is wrong and what to write instead."""


def show(raw: object) -> str:
    """Return a value as an error message shows it: one that is long, or can't be shown, must not spoil the message."""
    try:
        text = repr(raw)
    except Exception:  # a broken __repr__, a recursion, an int with more digits than Python prints
        text = f"<{type(raw).__name__}>"
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _flag(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise _Bad("is not True or False")
    return raw


def _seconds(raw: Any) -> float:
    if isinstance(raw, timedelta):
        raw = raw.total_seconds()
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise _Bad("is not a duration: give seconds as a number, or a timedelta")
    if isinstance(raw, float) and not math.isfinite(raw):
        raise _Bad("is not a finite number of seconds")
    if raw < 0:
        raise _Bad("is negative; give seconds, 0 or more")
    if raw > MAX_DURATION:
        raise _Bad(f"is more than {MAX_DURATION:.0f} s (366 days); durations are in seconds, not milliseconds")
    return float(raw)


def _ttl(raw: Any) -> float:
    if raw is None:
        raise _Bad("would never expire, and a dead holder would block for ever; give seconds, at least 0.1")
    seconds = _seconds(raw)
    if seconds < MIN_TTL:
        raise _Bad("is too short; a lease takes at least 0.1 s")
    return seconds


def _maybe_zero(raw: Any) -> float:
    if raw is None:
        raise _Bad("is not a duration; write 0 for none")
    return _seconds(raw)


def _positive_or_none(raw: Any) -> float | None:
    if raw is None:
        return None
    seconds = _seconds(raw)
    if seconds == 0:
        raise _Bad("is no time at all; give seconds, or None for no limit")
    return seconds


def _one_of(choices: Sequence[str]) -> Callable[[Any], str]:
    def check(raw: Any) -> str:
        if isinstance(raw, str):
            if raw in choices:
                return raw
            if near := difflib.get_close_matches(raw.lower(), choices, n=1):
                raise _Bad(f"is not one of {', '.join(choices)}; did you mean {near[0]!r}?")
        raise _Bad(f"is not one of {', '.join(choices)}")

    return check


def _names(raw: Any) -> tuple[str, ...] | None:
    if raw is None:
        return None
    if isinstance(raw, str):
        raise _Bad("is a bare string; put it into a list: [...]")
    if not isinstance(raw, list | tuple | set | frozenset) or not all(isinstance(n, str) for n in raw):
        raise _Bad("is not a list of argument names")
    if len(set(raw)) != len(raw):
        raise _Bad("names an argument twice")
    return tuple(sorted(raw)) if isinstance(raw, set | frozenset) else tuple(raw)


def _key(raw: Any) -> Any:
    if raw is None or callable(raw) or (isinstance(raw, str) and raw.strip()):
        return raw
    raise _Bad('is not a template such as "account:{account_id}", nor a callable')


def _lock_name(raw: Any) -> str | None:
    if raw is None or (isinstance(raw, str) and raw.strip()):
        return raw
    raise _Bad("is not a name; give a non-empty string, or None for the task's own name")


def _anything(raw: Any) -> Any:
    return raw


_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    "enabled": _flag,
    "on": _names,
    "key": _key,
    "name": _lock_name,
    "ttl": _ttl,
    "renew": _flag,
    "max_hold": _positive_or_none,
    "min_hold": _maybe_zero,
    "on_conflict": _one_of(CONFLICT_POLICIES),
    "skip_result": _anything,
    "retry_for": _positive_or_none,
    "wait": _maybe_zero,
    "on_outage": _one_of(OUTAGE_POLICIES),
    "on_lost": _one_of(LOST_POLICIES),
    "done_ttl": _maybe_zero,
}
