"""From a call's signature to the key of its lock. PURE.

A key is ``<prefix>:{<lock name>}:<id>``. The braces are a cluster's hash tag: lock, fence counter and done marker of
one name share a slot. The id is one of

- ``v1-`` and 32 hexadecimal digits: the hash of the arguments that count. No argument's value is readable in it;
- the text of the user's ``lock_key``, escaped; ``h1-`` and the hash of that, if it is longer than 200 bytes.

All of this is stable within a major version: old and new workers share locks during a rolling deploy.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import inspect
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from celery_redislock._canonical import (
    SCALARS,
    Unencodable,
    append,
    is_time_limit,
    join_surrogates,
    simplify_fully,
    type_name,
)
from celery_redislock.errors import LockConfigError, LockKeyError

__all__ = ["KeyMaker", "KeyScheme", "canonical", "escape", "text_id"]

MAX_TEXT_ID: Final = 200
"""Longest id made of a user's text, bytes; a longer one is hashed."""

_RESERVED: Final = re.compile(r"[vh][0-9]+-|q:|done:|(?:fence|lock)\Z")
"""What the library itself puts after a name, formats to come included."""

_FIELD: Final = re.compile(r"(?P<name>[^.\[\]]+)(?P<path>(?:\.[^.\[\]]+|\[[^\[\]]+\])*)")
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[([^\[\]]+)\]")
_EITHER_OPTION: Final = "name the arguments that count in lock_on, or make the key with lock_key"


def canonical(value: object) -> bytes:
    """Return bytes that are equal for two values exactly when Celery's JSON serialiser makes them equal.

    Raises:
        LockKeyError: The value, or something in it, has no stable form. The message names types and positions only.
    """
    parts: list[bytes] = []
    try:
        append(parts, value)
    except Unencodable as error:
        raise LockKeyError(error.describe("the value")) from None
    return b"".join(parts)


def escape(text: str, *, colon: bool = False) -> str:
    """Percent-encode the UTF-8 of everything but ASCII letters, digits and ``._~@/=+,-`` (and ``:``, if `colon`).

    Injective, and without any character that means something to a shell, a glob pattern or a cluster's hash tag. A
    lock's name is escaped with its colons, an id without: so only the colons of an id can follow that of the name.
    """
    return quote(text, safe="@/=+,:" if colon else "@/=+,", errors="surrogatepass")


def text_id(text: str) -> str:
    """Return the id for a text that a user chose: escaped, at most 200 bytes, never one that the library makes."""
    escaped = escape(join_surrogates(text), colon=True)
    if _RESERVED.match(escaped):
        escaped = f"%{ord(escaped[0]):02X}{escaped[1:]}"
    return f"h1-{_hash(escaped.encode())}" if len(escaped) > MAX_TEXT_ID else escaped


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]  # 128 bits: no two calls will ever meet by chance


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """The keys of one lock name.

    Attributes:
        prefix: What all keys of the app begin with, as it is; a transport's ``global_keyprefix`` already before it.
        name: The lock's name, by default the task's.

    Raises:
        LockConfigError: The prefix or the name would scatter one name's keys over a cluster.
    """

    prefix: str
    name: str
    _head: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.prefix:
            raise LockConfigError("redislock_prefix is empty: the keys could not be told from anybody else's")
        if "{}" in self.prefix:
            raise LockConfigError(
                f"redislock_prefix (with global_keyprefix before it) is {self.prefix!r}, and must not contain '{{}}': "
                "a Redis Cluster would then hash the whole key, and put the keys of one lock into different slots"
            )
        if not self.name:
            raise LockConfigError(
                "lock_name is empty: a Redis Cluster would put the keys of one lock into different slots"
            )
        object.__setattr__(self, "_head", f"{self.prefix}:{{{escape(self.name)}}}:")

    def lock(self, id: str) -> str:  # noqa: A002
        """Return the key of the lock with this id, which `KeyMaker.id` or `text_id` made."""
        return self._head + id

    @property
    def fence(self) -> str:
        """The key of the fence counter."""
        return self._head + "fence"

    def done(self, attempt: str) -> str:
        """Return the key of the marker that this attempt of a task has finished."""
        return f"{self._head}done:{escape(attempt)}"


class KeyMaker:
    """Makes the ids of one task's calls. Compiled once; immutable, so threads may share it.

    Args:
        task: The task's name, for messages.
        signature: That of the task's function, without ``self``.
        on: Names of the arguments that count, in any order; None: all; empty: none, hence one lock for the task. If the
            function takes ``**kwargs``, a name may also be that of a keyword among them; a call without it counts as
            one that has not got it, which is not the same as None.
        template: Instead of `on`. A text such as ``"order:{order[id]}"`` over the bound arguments, or a callable that
            gets the task's arguments and returns a non-empty text.

    Raises:
        LockConfigError: `on` or `template` is wrong. The message names task, option, culprit and nearest right name.
    """

    def __init__(
        self,
        *,
        task: str,
        signature: inspect.Signature,
        on: Sequence[str] | None,
        template: str | Callable[..., object] | None,
    ) -> None:
        if on is not None and template is not None:
            raise LockConfigError(f"{task}: lock_on and lock_key exclude each other; name the arguments in one of them")
        self._task = task
        self._binder = _Binder(signature)
        self._template = template
        self._pieces: tuple[str | _Field, ...] = ()
        self._counted: tuple[tuple[bytes, str], ...] = ()
        if template is None:
            names = self._binder.names if on is None else _checked_names(task, on)
            for name in names:
                self._check_name("lock_on", name)
            # In the order in which `canonical` puts a dict's keys: the id is the hash of the dict of what counts.
            self._counted = tuple(sorted((canonical(name), name) for name in names))
        elif isinstance(template, str):
            self._pieces = tuple(self._compile(template))
        else:
            _check_function(task, template)

    def id(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the id of the call: at most 200 ASCII characters, the same wherever and however the call is spelt.

        Raises:
            LockKeyError: The call does not fit the signature, or no id can be made from its arguments. The message
                names task and argument, and never holds an argument's value.
        """
        try:
            values = self._binder.bind(args, kwargs)
        except TypeError as error:  # its text has names, no values
            raise LockKeyError(f"{self._task}: the call does not fit the task's signature: {error}") from None
        if self._template is None:
            return f"v1-{_hash(self._encode(values))}"
        if isinstance(self._template, str):
            text = "".join(p if isinstance(p, str) else self._format(p, values) for p in self._pieces)
        else:
            text = self._call(self._template, args, kwargs)
        if not text:
            raise LockKeyError(f"{self._task}: lock_key made an empty text of this call; it must say what is locked")
        return text_id(text)

    def _encode(self, values: Mapping[str, object]) -> bytes:
        counted = [(head, name) for head, name in self._counted if name in values]
        parts = [b"d%d:" % len(counted)]
        for head, name in counted:
            parts.append(head)
            mark = len(parts)
            try:
                append(parts, values[name])
            except Unencodable as error:
                if values[name] is not self._binder.defaults.get(name, parts):
                    raise LockKeyError(
                        f"{self._task}: {error.describe(f'argument {name!r}')}; {_EITHER_OPTION}"
                    ) from None
                # A sentinel, a function, ...: no caller could have sent it, so "left at the default" says it all.
                parts[mark:] = [b"!"]
        return b"".join(parts)

    def _call(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        try:
            text = function(*args, **kwargs)
        except Exception as error:
            if is_time_limit(error):
                raise
            # Not the error's own text, nor the error as the cause: they may quote an argument.
            raise LockKeyError(f"{self._task}: lock_key raised {type(error).__name__}{_origin(error)}") from None
        if not isinstance(text, str):
            raise LockKeyError(f"{self._task}: lock_key returned {type_name(type(text))}, not a str")
        return str.__str__(text)

    def _format(self, part: _Field, values: Mapping[str, object]) -> str:
        where = f"{self._task}: argument {part.name!r}, as lock_key's {part.source},"
        if part.name not in values:
            raise LockKeyError(f"{where} is missing in this call; give it, or make the key with a function")
        try:
            value = simplify_fully(part.get(values[part.name]))
            if type(value) in SCALARS:
                return format(value, part.spec)
        except Unencodable as error:
            raise LockKeyError(
                f"{error.describe(where)}; name an attribute or item of it, as in {{order.id}}"
            ) from None
        except Exception as error:
            if is_time_limit(error):
                raise
            raise LockKeyError(f"{where} raised {type(error).__name__} when it was read or formatted") from None
        raise LockKeyError(
            f"{where} is a {type(value).__name__}, which has no one text; name an item of it, or use lock_on"
        )

    def _compile(self, template: str) -> Iterator[str | _Field]:
        def wrong(why: str) -> LockConfigError:
            return LockConfigError(f"{self._task}: lock_key {template!r} {why}")

        if not template.strip():
            raise wrong('is empty; write what is locked, as in "account:{account_id}"')
        try:
            pieces = list(string.Formatter().parse(template))
        except ValueError as error:
            raise wrong(f"is not a format string: {error}") from None
        for literal, source, spec, conversion in pieces:
            yield literal
            if source is None:
                continue
            match = _FIELD.fullmatch(source)
            if match is None or not match["name"].isidentifier():
                raise wrong(f"has the field {{{source}}}; name an argument, as in {{account_id}} or {{order[id]}}")
            if conversion or "{" in (spec or ""):
                raise wrong(f"has a conversion or nested field in {{{source}}}; make such a key with a function")
            self._check_name("lock_key", match["name"])
            steps = tuple((bool(name), name or key) for name, key in _STEP.findall(match["path"]))
            yield _Field(f"{{{source}}}", match["name"], steps, spec or "")

    def _check_name(self, option: str, name: str) -> None:
        names = self._binder.names
        if name in names:
            return
        # Where anything may come as a keyword, a misspelt name would lock all calls as one, so none may look like one.
        near = difflib.get_close_matches(name, names, cutoff=0.85 if self._binder.takes_any_keyword else 0.6)
        if self._binder.takes_any_keyword and not near:
            return
        hint = f"did you mean {' or '.join(near)}?" if near else f"arguments: {', '.join(names) or 'none'}"
        if self._binder.takes_any_keyword:
            hint += " If it is another keyword, declare it in the function's signature"
        raise LockConfigError(f"{self._task}: {option} names {name!r}, which is not an argument of the task; {hint}")


@dataclass(frozen=True, slots=True)
class _Field:
    """One ``{...}`` of a template."""

    source: str
    name: str
    steps: tuple[tuple[bool, str], ...]
    spec: str

    def get(self, value: Any) -> Any:
        """Follow attributes and items, as ``str.format`` does."""
        for is_attribute, name in self.steps:
            value = getattr(value, name) if is_attribute else value[int(name) if name.isdecimal() else name]
        return value


class _Binder:
    """`inspect.Signature.bind` and ``apply_defaults``, with a short cut for the calls of most tasks."""

    def __init__(self, signature: inspect.Signature) -> None:
        parameters = [p.replace(default=_frozen(p.default)) for p in signature.parameters.values()]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        kinds = {p.kind: p.name for p in parameters}
        self._signature = signature.replace(parameters=parameters)
        self._positional = tuple(p.name for p in parameters if p.kind in by_position)
        self._keywords = frozenset(p.name for p in parameters if p.kind in by_keyword)
        self._any_keyword = kinds.get(inspect.Parameter.VAR_KEYWORD)
        self._simple = self._any_keyword is None and inspect.Parameter.VAR_POSITIONAL not in kinds
        self.names = tuple(p.name for p in parameters)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @property
    def takes_any_keyword(self) -> bool:
        return self._any_keyword is not None

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Return the value of each parameter, and of each keyword among ``**kwargs`` that no parameter's name hides.

        Raises:
            TypeError: The call does not fit.
        """
        if self._simple and len(args) <= len(self._positional) and self._keywords.issuperset(kwargs):
            given = dict(zip(self._positional, args, strict=False))
            if given.keys().isdisjoint(kwargs):
                values = {**self.defaults, **given, **kwargs}
                if len(values) == len(self.names):
                    return values
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        extras = bound.arguments[self._any_keyword] if self._any_keyword is not None else {}
        return {**extras, **bound.arguments}


def _frozen(default: Any) -> Any:
    """Return a default as it is now: a body that appends to its ``x=[]`` must not change the key of the next call."""
    if type(default) not in (list, dict, set, bytearray):
        return default
    try:
        return copy.deepcopy(default)
    except Exception:  # holds something that can't be copied; then it stays shared
        return default


def _checked_names(task: str, on: Sequence[str]) -> Sequence[str]:
    if isinstance(on, str):
        raise LockConfigError(f"{task}: lock_on={on!r} is a bare string; write a list: [{on!r}]")
    if not isinstance(on, list | tuple | set | frozenset) or not all(isinstance(name, str) and name for name in on):
        raise LockConfigError(f"{task}: lock_on is not a list of argument names")
    if len(set(on)) != len(on):
        raise LockConfigError(f"{task}: lock_on names an argument twice")
    return tuple(on)


def _check_function(task: str, function: object) -> None:
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else f"a {type_name(type(function))}"
        raise LockConfigError(
            f"{task}: lock_key is {kind}; write a template such as 'account:{{account_id}}' or a function"
        )


def _origin(error: Exception) -> str:
    """Return where in a user's code an error was raised; nothing if the call itself failed."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # the first is our own
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        " when it was called" if trace is None else f" in line {trace.tb_lineno} of {trace.tb_frame.f_code.co_name}()"
    )
