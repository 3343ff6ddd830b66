"""One Python value as bytes, such that equal bytes mean equal values. PURE.

Two values get the same bytes exactly when Celery's JSON serialiser makes them equal, so that the caller, who sees the
arguments as they were written, and the worker, who sees them as they arrived, get the same lock key: a tuple is a list,
an ``str`` Enum is its text, ``{1: ...}`` is ``{"1": ...}``. What JSON keeps apart stays apart: 1, 1.0, "1" and True.
Values that only pickle, yaml or msgpack carry (sets, plain Enums, dicts with other keys) have bytes of their own.

The grammar is prefix-free, hence injective, and stable within a major version::

    value = "N" | "T" | "F"                        None, True, False
          | "i" hexadecimal ";"                    int: lower case, "-" before a negative one
          | tag length ":" payload                 payload is `length` bytes:
                "r" float     8 bytes, IEEE 754 big-endian; one NaN for all
                "s" str       UTF-8; a lone surrogate as the three bytes that it would have
                "b" bytes, bytearray, memoryview
                "D" Decimal   its text; "E" for the exponent
                "m" datetime, "c" date, "k" time   ISO 8601, with the offset if there is one
                "u" UUID      16 bytes, big-endian
          | "l" count ":" value*                   list, tuple
          | "d" count ":" (value value)*           dict: sorted by the bytes of the keys
          | "S" count ":" value*                   set, frozenset: sorted bytes
          | "e" value value                        plain Enum: class path, then name (of a Flag: its int)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum, Flag
from math import isnan
from types import NoneType
from typing import Any, Final
from uuid import UUID

__all__ = ["SCALARS", "Unencodable", "append", "is_time_limit", "join_surrogates", "simplify_fully", "type_name"]

MAX_DEPTH: Final = 200
"""Levels of nesting. Each costs two or three frames of Python's default 1000, and the worker needs some as well."""

_Encoder = Callable[[Any, list[bytes], int], None]
_NAN: Final = b"\x7f\xf8\x00\x00\x00\x00\x00\x00"


class Unencodable(Exception):
    """A value that has no bytes: what is wrong with it, and where inside the argument it is. Holds no values."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.places: list[str] = []  # innermost first

    def describe(self, subject: str) -> str:
        """Return for instance ``item 3 of a list in argument 'order' is of type Order``."""
        places = self.places if len(self.places) <= 6 else [*self.places[:3], "...", *self.places[-2:]]
        return f"{' in '.join([*places, subject])} {self.problem}"


@dataclass(frozen=True, slots=True)
class _Member:
    """A plain Enum's member, which only pickle carries."""

    path: str
    name: str | int


def append(out: list[bytes], value: object) -> None:
    """Append the bytes of a value to `out`, in pieces: a large argument is copied once, when they are joined.

    Raises:
        Unencodable: The value has no bytes. `out` may then end in pieces of it.
    """
    try:
        _encode(value, out, 0)
    except Unencodable:
        raise
    except RecursionError:  # our caller was deep in already
        raise _too_deep() from None
    except Exception as error:  # of code that the value brings along: __json__, items, utcoffset, ...
        if is_time_limit(error):
            raise
        raise Unencodable(f"raised {type(error).__name__} while it was read") from None


def is_time_limit(error: Exception) -> bool:
    """Tell whether the task's soft time limit struck here, no fault of a value. By name: we know no Celery."""
    return any(kind.__name__ == "SoftTimeLimitExceeded" for kind in type(error).__mro__)


def type_name(kind: type) -> str:
    """Return the name of a type as a reader would import it."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def join_surrogates(text: str) -> str:
    """Return the text as JSON's escapes bring it back: two surrogates that make a pair become one character."""
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return str.encode(text, "utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return text


def simplify(value: Any) -> Any:
    """Return what JSON makes of a value of a type that it does not know by name, in the order in which it asks.

    Raises:
        Unencodable: Neither JSON nor this module knows the type.
    """
    kind = type(value)  # not isinstance, which a proxy answers for the object behind it
    for base, convert in _NATIVE:
        if issubclass(kind, base):
            return convert(value)
    reduce = getattr(value, "__json__", None)
    if reduce is not None:
        return reduce()
    if any(base.__name__ == "Promise" and base.__module__ == "django.utils.functional" for base in kind.__mro__):
        return str(value)  # Django's lazy text
    for base, convert in _REGISTERED:
        if issubclass(kind, base):
            return convert(value)
    raise Unencodable(f"is of type {type_name(kind)}, which has no stable form")


def simplify_fully(value: Any) -> Any:
    """Return the value as one of the exact types that have bytes; what is inside a container stays as it is.

    Raises:
        Unencodable: There is none.
    """
    for _ in range(MAX_DEPTH):
        if type(value) in _ENCODERS:
            return value
        value = simplify(value)
    raise _too_deep()


def _too_deep() -> Unencodable:
    return Unencodable(f"is nested more than {MAX_DEPTH} levels deep, or contains itself")


def _unknown(value: Any, out: list[bytes], depth: int) -> None:
    if depth >= MAX_DEPTH:  # what __json__ returns may have a __json__
        raise _too_deep()
    _encode(simplify(value), out, depth + 1)


def _encode(value: Any, out: list[bytes], depth: int) -> None:
    _ENCODERS.get(type(value), _unknown)(value, out, depth)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return join_surrogates(text).encode("utf-8", "surrogatepass")


def _str(value: str, out: list[bytes], _depth: int) -> None:
    data = _utf8(value)
    out.append(b"s%d:%b" % (len(data), data))


def _int(value: int, out: list[bytes], _depth: int) -> None:
    out.append(b"i%x;" % value)  # decimal digits stop at 4300, and cost their square


def _atom(tag: bytes, payload: Callable[[Any], bytes]) -> _Encoder:
    def encode(value: Any, out: list[bytes], _depth: int) -> None:
        data = payload(value)
        out.append(b"%b%d:" % (tag, len(data)))
        out.append(data)

    return encode


def _sequence(value: list[Any] | tuple[Any, ...], out: list[bytes], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise _too_deep()
    encoder_of, depth = _ENCODERS.get, depth + 1
    out.append(b"l%d:" % len(value))
    for item in value:
        try:  # the next line is _encode, written out: this loop is what a large argument costs
            encoder_of(type(item), _unknown)(item, out, depth)
        except Unencodable as error:
            error.places.append(f"item {_position(value, item)} of a {type(value).__name__}")
            raise


def _mapping(value: dict[Any, Any], out: list[bytes], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise _too_deep()
    encoder_of, depth = _ENCODERS.get, depth + 1
    try:
        # 1 and "1" are one key to JSON, and of two values its reader keeps the last.
        keys = {_key(key, depth): key for key in value}
    except Unencodable as error:
        error.places.append("a key of a dict")
        raise
    out.append(b"d%d:" % len(keys))
    for data in sorted(keys):
        out.append(data)
        item = value[keys[data]]
        try:
            encoder_of(type(item), _unknown)(item, out, depth)
        except Unencodable as error:
            error.places.append(f"value {_position(value.values(), item)} of a dict")
            raise


def _position(items: Iterable[Any], wanted: Any) -> int:
    """Return the index of the item that failed: had it stood further ahead as well, it would have failed there."""
    return next(index for index, item in enumerate(items) if item is wanted)


def _key(key: Any, depth: int) -> bytes:
    kind = type(key)
    if kind is not str and issubclass(kind, (float, int, NoneType)):
        key = json.dumps(key)  # this text is what becomes of it
    parts: list[bytes] = []
    _encode(key, parts, depth)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _set(value: Iterable[Any], out: list[bytes], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise _too_deep()
    try:
        elements = {_joined(element, depth) for element in value}
    except Unencodable as error:
        error.places.append("an element of a set")
        raise
    out.append(b"S%d:" % len(elements))
    out.extend(sorted(elements))


def _joined(value: Any, depth: int) -> bytes:
    parts: list[bytes] = []
    _encode(value, parts, depth + 1)
    return b"".join(parts)


def _member(value: _Member, out: list[bytes], depth: int) -> None:
    out.append(b"e")
    _encode(value.path, out, depth)
    _encode(value.name, out, depth)


def _enum_member(value: Enum) -> _Member:
    # The name of a combination of flags depends on the version of Python; its number does not.
    return _Member(type_name(type(value)), value._value_ if isinstance(value, Flag) else value._name_)


_ENCODERS: Final[dict[type, _Encoder]] = {
    NoneType: lambda _value, out, _depth: out.append(b"N"),
    bool: lambda value, out, _depth: out.append(b"T" if value else b"F"),
    int: _int,
    float: _atom(b"r", lambda value: struct.pack(">d", value) if not isnan(value) else _NAN),
    str: _str,
    bytes: _atom(b"b", bytes),
    Decimal: _atom(b"D", lambda value: str(value).upper().encode()),  # a context can ask for "e"
    datetime: _atom(b"m", lambda value: value.isoformat().encode()),
    date: _atom(b"c", lambda value: value.isoformat().encode()),
    time: _atom(b"k", lambda value: value.isoformat().encode()),
    UUID: _atom(b"u", lambda value: value.bytes),
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
    set: _set,
    frozenset: _set,
    _Member: _member,
}
SCALARS: Final = frozenset({NoneType, bool, int, float, str, Decimal, datetime, date, time, UUID})
"""Exact types of which a text may be made for a template."""

# A subclass as its base, through the base's own methods: JSON's encoder, too, asks no method that a subclass overrides.
_NATIVE: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (str, str.__str__),
    (int, int.__index__),
    (float, float.__float__),
    (list, list.copy),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (dict, lambda value: dict(value.items())),
)
_REGISTERED: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (datetime, lambda value: datetime.fromisoformat(datetime.isoformat(value))),
    (date, lambda value: date(value.year, value.month, value.day)),
    (time, lambda value: time.fromisoformat(time.isoformat(value))),
    (Decimal, Decimal),
    (UUID, lambda value: UUID(int=value.int)),
    (bytes, lambda value: memoryview(value).tobytes()),
    (bytearray, bytes),  # msgpack carries these two, and both arrive as bytes
    (memoryview, bytes),
    (set, lambda value: frozenset(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (Enum, _enum_member),
)
