"""celery_redislock.keys: one call, one key; two calls, two keys; nobody's arguments in either key or message."""

# ruff: noqa: DTZ001  (naive datetimes are arguments, too)

from __future__ import annotations

import binascii
import hashlib
import inspect
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import time as clock
import uuid
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, getcontext, localcontext
from enum import Enum, Flag, IntEnum, IntFlag, StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from zoneinfo import ZoneInfo

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import signature as celery_signature
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from kombu import serialization
from kombu.exceptions import DecodeError, EncodeError
from kombu.utils import json as kombu_json

from celery_redislock import keys
from celery_redislock.errors import LockConfigError, LockKeyError
from celery_redislock.keys import KeyMaker, KeyScheme, canonical, escape, text_id

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SECRET = "s3cr3t-value"


class Color(Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796  (an alias)
    BLUE = 2


class Shape(Enum):
    RED = 1


class Size(IntEnum):
    SMALL = 1


class Level(StrEnum):
    LOW = "low"


class Mood(str, Enum):  # noqa: UP042  (not the same)
    GOOD = "good"


class Weight(float, Enum):
    HALF = 0.5


class Perm(Flag):
    R = 4
    W = 2


class Mode(IntFlag):
    R = 4
    W = 2


class Day(date, Enum):
    FIRST = 2020, 1, 1


class Text(str):
    def __str__(self) -> str:
        return "not what it is"


class Number(int):
    def __index__(self) -> int:
        return 99

    def __repr__(self) -> str:
        return "ninety-nine"


class Real(float):
    def __float__(self) -> float:
        return 9.9


class Blob(bytes):
    def __bytes__(self) -> bytes:
        return b"not what it is"


class Moment(datetime):
    def isoformat(self, *_: Any, **__: Any) -> str:
        return "some time"

    def __str__(self) -> str:
        return "some time"


class Jsonable:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __json__(self) -> Any:
        return self.value


class Endless:
    def __json__(self) -> Any:
        return self


@dataclass
class Order:
    id: int = 7
    note: str = SECRET


Point = namedtuple("Point", "x y")


def make(
    function: Callable[..., Any],
    on: Any = None,
    template: Any = None,
) -> KeyMaker:
    return KeyMaker(task="proj.sync", signature=inspect.signature(function), on=on, template=template)


def one(value: Any) -> Any: ...


def key_id(value: Any) -> str:
    return make(one).id((value,), {})


# --- a model: what JSON, resp. a decoder of our own grammar, makes of a value


def typed(value: Any) -> Any:
    """The value with its type spelt out, so that == tells 1, 1.0 and True apart; containers by JSON's rules."""
    match value:
        case bool() | None:
            return (str(value),)
        case str():
            return ("str", json.loads(json.dumps(value)))
        case int():
            return ("int", int.__index__(value))
        case float():
            return ("float", "nan" if value != value else float.hex(value))
        case list() | tuple():
            return ("list", *map(typed, value))
        case dict():
            return ("dict", frozenset((typed(k), typed(v)) for k, v in value.items()))
        case set() | frozenset():
            return ("set", frozenset(map(typed, value)))
        case datetime():
            return ("datetime", datetime.isoformat(value))
        case date():
            return ("date", date.isoformat(value))
        case Enum():
            member = value.value if isinstance(value, Flag) else value.name
            return ("enum", f"{type(value).__module__}.{type(value).__qualname__}", member)
        case time() | Decimal():
            return (type(value).__name__, str(value))
        case _:
            return (type(value).__name__, value)


def decoded(data: bytes) -> Any:
    """Read `canonical`'s bytes back. That it can be done for every value is the proof that no two share their bytes."""
    value, rest = _decode(data)
    assert rest == b""
    return value


_ATOMS: dict[bytes, Callable[[bytes], Any]] = {
    b"s": lambda d: ("str", d.decode("utf-8", "surrogatepass")),
    b"b": lambda d: ("bytes", d),
    b"D": lambda d: ("Decimal", d.decode().replace("NAN", "NaN").replace("INFINITY", "Infinity").replace("SN", "sN")),
    b"m": lambda d: ("datetime", d.decode()),
    b"c": lambda d: ("date", d.decode()),
    b"k": lambda d: ("time", d.decode()),
    b"u": lambda d: ("UUID", uuid.UUID(bytes=d)),
    b"r": lambda d: typed(struct.unpack(">d", d)[0]),
}


def _decode(data: bytes) -> tuple[Any, bytes]:
    tag, data = data[:1], data[1:]
    if tag in b"NTF":
        return {b"N": ("None",), b"T": ("True",), b"F": ("False",)}[tag], data
    if tag == b"i":
        digits, data = data.split(b";", 1)
        return ("int", int(digits, 16)), data
    if tag == b"e":
        path, data = _decode(data)
        member, data = _decode(data)
        return ("enum", path[1], member[1]), data
    size, data = data.split(b":", 1)
    length = int(size)
    if tag in _ATOMS:
        return _ATOMS[tag](data[:length]), data[length:]
    items = []
    for _ in range(2 * length if tag == b"d" else length):
        item, data = _decode(data)
        items.append(item)
    if tag == b"l":
        return ("list", *items), data
    if tag == b"S":
        return ("set", frozenset(items)), data
    assert tag == b"d"
    return ("dict", frozenset(zip(items[::2], items[1::2], strict=True))), data


# --- values

any_text = st.text(st.characters(exclude_categories=()), max_size=8)
plain_text = st.text(max_size=8)
# Whole seconds: of an offset shorter than one, which no zone has, Python's own reader makes UTC.
offsets = st.integers(-86399, 86399).map(lambda seconds: timedelta(seconds=seconds))
zones = st.none() | st.just(UTC) | st.sampled_from([ZoneInfo("Europe/Berlin")]) | offsets.map(timezone)
# Few values of many types, so that two that differ in one thing only meet often.
lookalikes = st.sampled_from(
    [
        *(0, 1, -1, 0.0, -0.0, 1.0, True, False, None, "", "0", "1", "1.0", "true", "null", "None", b"", b"1"),
        *(Decimal(1), Decimal("1.0"), "2020-01-01", date(2020, 1, 1), datetime(2020, 1, 1), time(0), "00:00:00"),
        *(datetime(2020, 1, 1, tzinfo=UTC), float("nan"), float("inf"), "NaN", "i1;", "l0:", "\ud83d\ude00", "😀"),
        *("\ud83d", 2**70, -(2**70), uuid.UUID(int=1), uuid.UUID(int=1).hex, uuid.UUID(int=1).bytes),
        *([], {}, [[]], [None], {"": None}),
    ]
)
json_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | any_text
    | st.binary(max_size=8)
    | st.decimals()
    | st.dates()
    | st.datetimes(timezones=zones)
    | st.times()
    | st.uuids()
    | st.sampled_from([Size.SMALL, Level.LOW, Mood.GOOD, Weight.HALF, Mode.R | Mode.W, Day.FIRST, Text("x"), Number(3)])
    | lookalikes
)
json_keys = any_text | st.integers(-3, 3) | st.none() | st.booleans() | st.sampled_from([1.0, 1.5, float("nan"), 1e22])


def nested(scalars: st.SearchStrategy[Any], names: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=3).map(tuple)
            | st.builds(Point, inner, inner)
            | st.dictionaries(names, inner, max_size=4)
            | st.dictionaries(names, inner, max_size=2).map(OrderedDict)
        ),
        max_leaves=12,
    )


def is_envelope(value: Any) -> bool:
    """Tell whether kombu would take a dict for one of its own marks, such as {"__type__": "uuid", ...}."""
    return isinstance(value, dict) and value.keys() == {"__type__", "__value__"}


json_values = nested(json_scalars, json_keys)
other_hashables = st.binary(max_size=3) | st.sampled_from([Color.RED, Color.BLUE, Shape.RED, Perm.R | Perm.W, (1, 2)])
other_hashables |= st.dates() | st.uuids() | st.frozensets(st.integers(0, 3), max_size=3)
pickled_values = st.recursive(
    json_scalars | other_hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(any_text | other_hashables, inner, max_size=3)
        | st.sets(any_text | st.integers() | other_hashables, max_size=4)
    ),
    max_leaves=12,
)


def json_round_trip(value: Any) -> Any:
    return kombu_json.loads(kombu_json.dumps(value))


# --- equal and distinct


@relaxed
@given(json_values)
@example({1: "a", "1": "b"})
@example({"1": "a", 1: "b"})
@example("\ud83d\ude00")
def test_the_bytes_hold_what_json_keeps_and_nothing_else(value: Any) -> None:
    """With a decoder for every output, equal bytes <=> equal after JSON."""
    assert decoded(canonical(value)) == typed(json_round_trip(value))


@relaxed
@given(pickled_values)
def test_the_bytes_can_be_read_back_for_what_only_pickle_carries(value: Any) -> None:
    assert decoded(canonical(value)) == typed(value)
    assert canonical(pickle.loads(pickle.dumps(value))) == canonical(value)


@relaxed
@given(lookalikes | json_values, lookalikes | json_values)
def test_two_values_share_their_bytes_exactly_if_json_makes_them_equal(one: Any, other: Any) -> None:
    same = typed(json_round_trip(one)) == typed(json_round_trip(other))
    assert (canonical(one) == canonical(other)) is same
    assert (key_id(one) == key_id(other)) is same


@relaxed
@given(pickled_values, pickled_values)
def test_two_pickled_values_share_their_bytes_exactly_if_they_read_alike(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) is (typed(one) == typed(other))


yaml_scalars = st.none() | st.booleans() | st.integers() | st.floats() | plain_text | st.binary(max_size=8) | st.dates()
yaml_scalars |= st.datetimes(timezones=st.none() | st.just(UTC) | st.just(timezone(timedelta(hours=-2, minutes=-30))))
yaml_values = st.recursive(
    yaml_scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            plain_text | st.integers() | st.none() | st.dates() | st.binary(max_size=3), inner, max_size=3
        )
        | st.sets(plain_text | st.integers() | st.dates(), max_size=3)
    ),
    max_leaves=10,
)
msgpack_scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | plain_text
msgpack_scalars |= st.binary(max_size=8) | st.binary(max_size=8).map(bytearray) | st.binary(max_size=8).map(memoryview)
msgpack_scalars |= st.sampled_from([Size.SMALL, Level.LOW, Mood.GOOD, Weight.HALF, Text("x")])
msgpack_values = nested(msgpack_scalars, plain_text | st.binary(max_size=3))
CARRIED = {
    "json": json_values.filter(lambda value: not is_envelope(value)),
    "pickle": pickled_values,
    "yaml": yaml_values,
    "msgpack": msgpack_values,
}


@pytest.mark.parametrize("serializer", CARRIED)
@relaxed
@given(data=st.data())
def test_caller_and_worker_make_the_same_id(serializer: str, data: st.DataObject) -> None:
    if serializer in ("msgpack", "yaml"):
        pytest.importorskip(serializer)
    maker = make(lambda value, *rest, flag=False, **more: None)
    args, kwargs = (
        (data.draw(CARRIED[serializer]), data.draw(CARRIED[serializer])),
        {"x": data.draw(CARRIED[serializer])},
    )
    try:
        content_type, encoding, body = serialization.dumps([args, kwargs], serializer=serializer)
        arrived_args, arrived_kwargs = serialization.loads(body, content_type, encoding, force=True)
    except (EncodeError, DecodeError):
        assume(False)
    assert maker.id(arrived_args, arrived_kwargs) == maker.id(args, kwargs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param((1, 2), [1, 2], id="tuple, list"),
        pytest.param(Point(1, 2), [1, 2], id="namedtuple, list"),
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="order of a dict"),
        pytest.param({1: "x"}, {"1": "x"}, id="int key"),
        pytest.param({True: "x"}, {"true": "x"}, id="bool key"),
        pytest.param({None: "x"}, {"null": "x"}, id="None key"),
        pytest.param({1.5: "x"}, {"1.5": "x"}, id="float key"),
        pytest.param({float("nan"): "x"}, {"NaN": "x"}, id="NaN key"),
        pytest.param({Size.SMALL: "x"}, {"1": "x"}, id="IntEnum key"),
        pytest.param({Level.LOW: "x"}, {"low": "x"}, id="StrEnum key"),
        pytest.param({1: "a", "1": "b"}, {"1": "b"}, id="two keys that JSON makes one"),
        pytest.param(OrderedDict(a=1), {"a": 1}, id="OrderedDict"),
        pytest.param(defaultdict(list, a=1), {"a": 1}, id="defaultdict"),
        pytest.param(type("L", (list,), {})([1]), [1], id="list subclass"),
        pytest.param(Size.SMALL, 1, id="IntEnum"),
        pytest.param(Mode.R | Mode.W, 6, id="IntFlag"),
        pytest.param(Level.LOW, "low", id="StrEnum"),
        pytest.param(Mood.GOOD, "good", id="str Enum"),
        pytest.param(Weight.HALF, 0.5, id="float Enum"),
        pytest.param(Day.FIRST, date(2020, 1, 1), id="date Enum"),
        pytest.param(Text("x"), "x", id="str subclass"),
        pytest.param(Number(5), 5, id="int subclass"),
        pytest.param(Real(0.5), 0.5, id="float subclass"),
        pytest.param(Blob(b"x"), b"x", id="bytes subclass"),
        pytest.param(Moment(2020, 1, 2), datetime(2020, 1, 2), id="datetime subclass"),
        pytest.param(type("T", (time,), {})(1), time(1), id="time subclass"),
        pytest.param(type("D", (Decimal,), {})("1.0"), Decimal("1.0"), id="Decimal subclass"),
        pytest.param(type("U", (uuid.UUID,), {})(int=5), uuid.UUID(int=5), id="UUID subclass"),
        pytest.param(type("S", (set,), {})({1}), {1}, id="set subclass"),
        pytest.param(type("S", (frozenset,), {})({1}), {1}, id="frozenset subclass"),
        pytest.param(Jsonable([1, (2,)]), [1, [2]], id="__json__"),
        pytest.param(Jsonable(Jsonable("x")), "x", id="__json__ twice"),
        pytest.param([Jsonable(None)], [None], id="__json__ inside"),
        pytest.param(celery_signature("t", (1,)), json.loads(json.dumps(celery_signature("t", (1,)))), id="Signature"),
        pytest.param(bytearray(b"x"), b"x", id="bytearray, as msgpack carries it"),
        pytest.param(memoryview(b"x"), b"x", id="memoryview, as msgpack carries it"),
        pytest.param(memoryview(b"abcd")[::2], b"ac", id="memoryview with strides"),
        pytest.param({1, 2}, frozenset({2, 1}), id="set, frozenset"),
        pytest.param({(1, 2): 3}, {Point(1, 2): 3}, id="tuple key"),
        pytest.param({(1, 2), Point(1, 2)}, {(1, 2)}, id="set of a tuple"),
        pytest.param(float("nan"), -float("nan"), id="every NaN"),
        pytest.param("\ud83d\ude00", "😀", id="surrogates that make a pair"),
        pytest.param(Color.RED, Color.CRIMSON, id="alias in an Enum"),
        pytest.param(
            datetime(2020, 7, 1, tzinfo=ZoneInfo("Europe/Berlin")),
            datetime(2020, 7, 1, tzinfo=timezone(timedelta(hours=2))),
            id="zone, offset",
        ),
        pytest.param(datetime(2020, 1, 1, fold=1), datetime(2020, 1, 1), id="fold, which JSON drops"),
        pytest.param(datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC")), datetime(2020, 1, 1, tzinfo=UTC), id="two UTCs"),
    ],
)
def test_what_the_serialiser_makes_equal_has_one_id(one: Any, other: Any) -> None:
    assert canonical(one) == canonical(other)
    assert key_id(one) == key_id(other)


DISTINCT: list[Any] = [
    *(1, 1.0, "1", True, None, b"1", 0, 0.0, -0.0, False, "", "0", "None", "True", "null", "nan", "RED", "1.0", b""),
    *(Decimal(1), Decimal("1.0"), Decimal("1E+2"), Decimal(100), Decimal(0), Decimal("-0"), Decimal("Infinity")),
    *(Decimal("NaN"), Decimal("sNaN"), Decimal("NaN12"), float("nan"), float("inf"), float("-inf"), 5e-324, 1e308),
    *(0.1, 0.1 + 2**-56, float(2**63), 2**63, 2**64, 2**70, -(2**70), 10**5000, 10**5000 + 1, -(10**5000)),
    *(date(2020, 1, 1), datetime(2020, 1, 1), datetime(2020, 1, 1, tzinfo=UTC), "2020-01-01", "2020-01-01T00:00:00"),
    *(datetime(2020, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), datetime(2020, 1, 1, microsecond=1)),
    *(time(0), time(0, tzinfo=UTC), time(0, 0, 0, 1), "00:00:00", date(1, 1, 1), date(9999, 12, 31)),
    *(uuid.UUID(int=0), uuid.UUID(int=0).hex, str(uuid.UUID(int=0)), uuid.UUID(int=0).bytes, uuid.UUID(int=1)),
    *([], (0,), {}, set(), [[]], [[], []], [[[]]], [None], {"": None}, {None: None}, [1, 2], [12], [2, 1], ["1", "2"]),
    *({1}, {"1"}, {1, 2}, [{1}], frozenset({frozenset({1})}), {"1": 2}, {"1": "2"}, {"2": "1"}, ["1", 2], [["1", 2]]),
    *({"a": {"b": 1}}, {"a": {}, "b": 1}, {b"1": 2}, {(1, 2): 2}, {(1,): 2, (2,): 2}, {uuid.UUID(int=1): 2}),
    *(["ab", "c"], ["a", "bc"], ["abc"], "abc", "ab,c", [b"ab", "c"], "é", "e\u0301", "\ud800", "\udc00", "�", "😀"),
    *(Color.RED, Color.BLUE, Shape.RED, Perm.R, Perm.R | Perm.W, Perm(0), 6, ["enum", "RED"]),
    *("N", "i1;", "s1:a", "l0:", "!", "\x00", ["a", "bs:c"], ["as:b", "c"], ["a", "bs1:c"], ["as1:b", "c"]),
]


def test_what_the_serialiser_keeps_apart_has_many_ids() -> None:
    assert len({canonical(value) for value in DISTINCT}) == len(DISTINCT)
    assert len({key_id(value) for value in DISTINCT}) == len(DISTINCT)


def test_a_decimals_bytes_do_not_depend_on_the_context() -> None:
    expected = canonical(Decimal("1E+30"))
    with localcontext() as context:
        context.capitals, context.prec = 0, 3
        assert getcontext().capitals == 0
        assert canonical(Decimal("1E+30")) == expected
        assert canonical(Decimal("1.23456")) == canonical(Decimal("1.23456"))


def test_djangos_lazy_text_is_its_text() -> None:
    promise = type("Promise", (), {"__module__": "django.utils.functional"})
    lazy = type("__proxy__", (promise,), {"__str__": lambda self: "hello"})
    assert canonical(lazy()) == canonical("hello")


def test_djangos_own_lazy_text_is_its_text() -> None:
    functional = pytest.importorskip("django.utils.functional")
    assert canonical([functional.lazystr("hello")]) == canonical(["hello"])


# --- one call, many spellings


def task(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1,), {}), ((1, 2), {}), ((1,), {"b": 2}), ((), {"a": 1, "b": 2}), ((), {"b": 2, "c": 3, "a": 1}), ([1, 2], {})],
)
def test_a_call_has_one_id_however_it_is_spelt(args: Any, kwargs: Any) -> None:
    for function in (task, lambda a, b=2, *, c=3: None, lambda a, b=2, c=3: None):
        assert make(function).id(args, kwargs) == make(function).id((1,), {})


class Service:
    def bound(self, a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> None: ...


def test_a_method_and_a_function_with_the_same_arguments_agree() -> None:
    assert make(Service().bound).id((1,), {}) == make(task).id((1,), {})


@relaxed
@given(st.lists(json_values, min_size=3, max_size=3), st.integers(0, 3), st.integers(0, 3))
def test_position_keyword_and_default_make_no_difference(
    values: list[Any], by_position: int, given_at_all: int
) -> None:
    """Of three parameters the first few are given, the rest are left at a default of the same value."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in "abc"]
    defaulted = [p.replace(default=value) for p, value in zip(parameters, values, strict=True)]
    strict = KeyMaker(task="t", signature=inspect.Signature(parameters), on=None, template=None)
    lenient = KeyMaker(task="t", signature=inspect.Signature(defaulted), on=None, template=None)
    by_keyword = dict(list(zip("abc", values, strict=True))[by_position:given_at_all])
    assert lenient.id(values[:by_position], by_keyword) == strict.id(values, {})
    assert lenient.id((), dict(zip("cba", reversed(values), strict=True))) == strict.id(values, {})


SIGNATURES: list[Callable[..., Any]] = [
    lambda: None,
    lambda a: None,
    lambda a, b=2: None,
    lambda a, /, b=2: None,
    lambda a=1, *, b, c=3: None,
    lambda *a: None,
    lambda **a: None,
    lambda a, *b, **c: None,
    lambda a, /, b, *, c=1, **d: None,
]


@relaxed
@given(
    st.sampled_from(SIGNATURES),
    st.lists(st.integers(0, 2), max_size=3),
    st.dictionaries(st.sampled_from("abcdx"), st.integers(0, 2), max_size=3),
)
def test_the_id_is_the_hash_of_the_bound_arguments(function: Any, args: list[int], kwargs: dict[str, int]) -> None:
    maker = make(function)
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(LockKeyError, match=r"^proj\.sync: the call does not fit the task's signature: "):
            maker.id(args, kwargs)
        return
    bound.apply_defaults()
    expected = hashlib.sha256(canonical(bound.arguments)).hexdigest()[:32]
    assert maker.id(args, kwargs) == f"v1-{expected}"
    assert args == list(args)


def test_keywords_that_are_no_text_do_not_fit() -> None:
    with pytest.raises(LockKeyError, match="does not fit"):
        make(task).id((), {1: 2})  # type: ignore[dict-item]


def test_extra_arguments_count_in_their_place() -> None:
    maker = make(task)
    assert maker.id((1, 2, 3), {}) != maker.id((1, 2), {})
    assert maker.id((1,), {"x": 1, "y": 2}) == maker.id((1,), {"y": 2, "x": 1}) != maker.id((1,), {"x": 1})


def test_a_default_that_the_body_changes_stays_what_it_was() -> None:
    for default in ([], {}, set(), bytearray()):

        def body(a: Any = default) -> None: ...

        maker = make(body)
        before = maker.id((), {})
        default.append(1) if hasattr(default, "append") else default.update({1: 1})  # type: ignore[attr-defined]
        assert maker.id((), {}) == before


def test_a_default_that_cannot_be_copied_is_shared() -> None:
    default = [memoryview(b"x")]
    assert make(lambda a=default: None).id((), {}) == make(lambda a: None).id(([b"x"],), {})


def test_a_sentinel_as_the_default_counts_as_not_given() -> None:
    sentinel = object()
    maker = make(lambda a, b=sentinel, c=3: None)
    assert maker.id((1,), {}) == maker.id((1,), {"c": 3}) == maker.id((1, sentinel), {})
    assert len({maker.id((1,), {}), maker.id((2,), {}), maker.id((1, None), {}), maker.id((1, "!"), {})}) == 4
    with pytest.raises(LockKeyError, match="'b' is of type object"):
        maker.id((1, object()), {})


def test_a_default_that_ends_in_a_sentinel_leaves_nothing_behind() -> None:
    default = [1, 2, make]
    assert make(lambda a=default: None).id((), {}) == make(lambda a=make: None).id((), {})


# --- lock_on


def test_only_the_named_arguments_count_in_any_order() -> None:
    maker = make(task, on=["a", "c"])
    assert (
        maker.id((1,), {}) == make(task, on=["c", "a"]).id((1, 99), {"x": 5}) == make(task, on={"a", "c"}).id((1,), {})
    )
    assert maker.id((1,), {}) != maker.id((2,), {})
    assert maker.id((1,), {}) != maker.id((1,), {"c": 4})
    assert maker.id((1,), {"b": Order()})


def test_no_name_is_one_lock_for_the_task() -> None:
    maker = make(task, on=[])
    assert maker.id((1,), {}) == maker.id((2, Order()), {"x": 5}) == make(lambda: None).id((), {})


def test_an_extra_keyword_may_count_and_its_absence_is_not_none() -> None:
    maker = make(task, on=["region"])
    assert maker.id((1,), {"region": "eu"}) == maker.id((2,), {"region": "eu", "x": 1})
    assert len({maker.id((1,), kw)[:] for kw in ({}, {"region": None}, {"region": "eu"}, {"region": "us"})}) == 4
    assert make(task, on=["rest", "more"]).id((1, 2, 3), {"x": 4}) != make(task, on=["rest", "more"]).id((1, 2, 3), {})


def test_a_parameter_hides_an_extra_keyword_of_its_name() -> None:
    maker = make(lambda a, /, **kw: None, on=["a"])
    assert maker.id((1,), {"a": 2}) == maker.id((1,), {"a": 3}) != maker.id((2,), {"a": 2})


def sync(account_id: int, full: bool = False) -> None: ...


def loose(account_id: int, **extra: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (sync, {"on": ["acount_id"]}, "lock_on names 'acount_id', which is not an argument.*did you mean account_id?"),
        (sync, {"on": ["zzz"]}, r"lock_on names 'zzz'.*arguments: account_id, full$"),
        (lambda: None, {"on": ["zzz"]}, r"lock_on names 'zzz'.*arguments: none$"),
        (loose, {"on": ["acount_id"]}, r"did you mean account_id\? If it is another keyword, declare it"),
        (loose, {"template": "{acount_id}"}, r"lock_key names 'acount_id'.*did you mean account_id\?"),
        (sync, {"on": "account_id"}, r"lock_on='account_id' is a bare string; write a list: \['account_id'\]"),
        (sync, {"on": 5}, "lock_on is not a list of argument names"),
        (sync, {"on": ["account_id", 5]}, "lock_on is not a list of argument names"),
        (loose, {"on": [""]}, "lock_on is not a list of argument names"),
        (sync, {"on": ["full", "full"]}, "lock_on names an argument twice"),
        (sync, {"on": [], "template": "x"}, "lock_on and lock_key exclude each other"),
        (sync, {"template": 5}, "lock_key is a int; write a template"),
        (sync, {"template": b"x"}, "lock_key is a bytes; write a template"),
        (sync, {"template": ""}, "lock_key '' is empty; write what is locked"),
        (sync, {"template": " \n"}, "is empty"),
        (sync, {"template": "a:{"}, "lock_key 'a:{' is not a format string"),
        (sync, {"template": "a:}"}, "is not a format string"),
        (sync, {"template": "{account_id!"}, "is not a format string"),
        (sync, {"template": "{}"}, r"has the field \{\}; name an argument"),
        (sync, {"template": "{0}"}, r"has the field \{0\}; name an argument"),
        (sync, {"template": "{account_id.}"}, "has the field"),
        (sync, {"template": "{account_id[]}"}, "has the field"),
        (sync, {"template": "{account_id[x}"}, "is not a format string|has the field"),
        (sync, {"template": "{account id}"}, "has the field"),
        (sync, {"template": "{account_id!r}"}, "has a conversion or nested field"),
        (sync, {"template": "{account_id:{full}}"}, "has a conversion or nested field"),
        (sync, {"template": "{ful}"}, "lock_key names 'ful'.*did you mean full?"),
    ],
)
def test_a_wrong_option_fails_at_declaration(function: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LockConfigError, match=message) as caught:
        make(function, **options)
    assert str(caught.value).startswith("proj.sync: ")


def test_a_coroutine_function_is_no_lock_key() -> None:
    async def key(account_id: int) -> str:
        return "x"

    with pytest.raises(LockConfigError, match="lock_key is a coroutine function"):
        make(sync, template=key)


# --- lock_key


def order_task(order: Any, when: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("template", "value", "expected"),
    [
        ("order:{order}", 7, "order:7"),
        ("global", 7, "global"),
        ("{order}", "a b*{c}\n%", "a%20b%2A%7Bc%7D%0A%25"),
        ("{order[id]}", {"id": 7}, "7"),
        ("{order[1]}", [5, 6], "6"),
        ("{order.id}", Order(), "7"),
        ("{order.id:04d}/{when}", Order(), "0007/None"),
        ("{order[lines][0].id}", {"lines": [Order(9)]}, "9"),
        ("{{{order}}}", 7, "%7B7%7D"),
        ("{order}", Level.LOW, "low"),
        ("{order}", Mood.GOOD, "good"),
        ("{order}", Size.SMALL, "1"),
        ("{order}", Text("x"), "x"),
        ("{order}", Number(4), "4"),
        ("{order}", Jsonable("x"), "x"),
        ("{order}", True, "True"),
        ("{order}", 1.5, "1.5"),
        ("{order}", Decimal("1.50"), "1.50"),
        ("{order}", uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ("{order}", date(2020, 1, 2), "2020-01-02"),
        ("{order:%H:%M}", time(1, 2), "01:02"),
        ("{order}", Moment(2020, 1, 2), "2020-01-02%2000:00:00"),
        ("{order}", "\ud83d\ude00", "%F0%9F%98%80"),
        ("{order}", "\ud800", "%ED%A0%80"),
        ("{order.name}", Color.RED, "RED"),
    ],
)
def test_a_template_is_formatted_over_the_bound_arguments(template: str, value: Any, expected: str) -> None:
    assert make(order_task, template=template).id((value,), {}) == expected
    assert make(order_task, template=template).id((), {"order": value}) == expected


def test_a_template_sees_defaults_and_extra_keywords() -> None:
    assert make(task, template="{a}:{b}:{c}:{region}:{more[region]}").id((1,), {"region": "eu"}) == "1:2:3:eu:eu"
    with pytest.raises(LockKeyError, match=r"^proj\.sync: argument 'region', as lock_key's \{region\}, is missing"):
        make(task, template="{region}").id((1,), {})


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        ("{order}", [SECRET], "is a list, which has no one text; name an item of it, or use lock_on"),
        ("{order}", (SECRET,), "is a tuple, which has no one text"),
        ("{order}", {SECRET: SECRET}, "is a dict, which has no one text"),
        ("{order}", {SECRET}, "is a set, which has no one text"),
        ("{order}", SECRET.encode(), "is a bytes, which has no one text"),
        ("{order}", Color.RED, "has no one text"),
        ("{order}", Order(), r"is of type tests\.unit\.test_keys\.Order.*name an attribute or item of it"),
        ("{order}", Endless(), "is nested more than"),
        ("{order[id]}", {SECRET: 1}, r"as lock_key's \{order\[id\]\}, raised KeyError when it was read or formatted"),
        ("{order.id}", SECRET, "raised AttributeError"),
        ("{order[5]}", [SECRET], "raised IndexError"),
        ("{order:d}", SECRET, "raised ValueError"),
        ("{order:>5}", None, "raised TypeError"),
        pytest.param("{order}", 10**5000, "raised ValueError", id="more digits than Python prints"),
        ("{order}", "", "lock_key made an empty text"),
    ],
)
def test_a_template_that_makes_no_text_says_why_and_no_value(template: str, value: Any, message: str) -> None:
    with pytest.raises(LockKeyError, match=message) as caught:
        make(order_task, template=template).id((value,), {})
    assert_discreet(caught.value)


def test_a_function_gets_the_arguments_as_they_were_given() -> None:
    seen = []

    def key(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return Text("order:7")

    assert make(order_task, template=key).id((7,), {"when": 8}) == "order:7"
    assert seen == [((7,), {"when": 8})]


def fails(order: Any, when: Any = None) -> str:
    raise ValueError(f"no key for {order}")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, r"lock_key raised ValueError in line \d+ of fails\(\)$"),
        (lambda order, when=None: json.loads(order), r"lock_key raised JSONDecodeError in line \d+ of raw_decode\(\)$"),
        (lambda: "x", r"lock_key raised TypeError when it was called$"),
        (lambda order: "", "lock_key made an empty text of this call"),
        (lambda order: None, "lock_key returned NoneType, not a str"),
        (lambda order: Order(), r"lock_key returned tests\.unit\.test_keys\.Order, not a str"),
        (lambda order: b"x", "lock_key returned bytes, not a str"),
    ],
)
def test_a_function_that_makes_no_text_says_why_and_no_value(function: Any, message: str) -> None:
    with pytest.raises(LockKeyError, match=message) as caught:
        make(order_task, template=function).id((SECRET,), {})
    assert_discreet(caught.value)


def test_a_function_is_not_asked_about_a_call_that_does_not_fit() -> None:
    with pytest.raises(LockKeyError, match="missing a required argument: 'order'"):
        make(order_task, template=lambda *a, **k: "x").id((), {})


# --- what has no key


def unsupported() -> list[Any]:
    return [
        pytest.param(Order(), r"argument 'value' is of type tests\.unit\.test_keys\.Order, which", id="dataclass"),
        pytest.param(object(), "is of type object, which", id="object"),
        pytest.param(fails, "is of type function", id="function"),
        pytest.param(Order, "is of type type", id="class"),
        pytest.param(1j, "is of type complex", id="complex"),
        pytest.param(iter([SECRET]), "is of type list_iterator", id="iterator"),
        pytest.param(range(3), "is of type range", id="range"),
        pytest.param({SECRET: 1}.keys(), "is of type dict_keys", id="dict_keys"),
        pytest.param([1, 2, (3, Order())], r"item 1 of a tuple in item 2 of a list in argument 'value' is", id="path"),
        pytest.param({SECRET: [Order()]}, r"item 0 of a list in value 0 of a dict in argument 'value'", id="in a dict"),
        pytest.param({"b": 1, "a": Order()}, r"value 1 of a dict in argument 'value'", id="position in a dict"),
        pytest.param({object(): SECRET}, r"a key of a dict in argument 'value' is of type object", id="key"),
        pytest.param({(SECRET, object()): 1}, r"item 1 of a tuple in a key of a dict in argument", id="in a key"),
        pytest.param({object(), SECRET}, r"an element of a set in argument 'value' is of type object", id="in a set"),
        pytest.param([frozenset({object()})], r"an element of a set in item 0 of a list", id="in a frozenset"),
        pytest.param([Jsonable(Order())], r"item 0 of a list in argument 'value' is of type tests", id="in __json__"),
        pytest.param({10**5000: SECRET}, r"raised ValueError while it was read", id="key that JSON refuses"),
        pytest.param(Endless(), "is nested more than 200 levels deep, or contains itself", id="endless __json__"),
        pytest.param(Jsonable, r"raised TypeError while it was read", id="class with __json__"),
        pytest.param(Broken(), r"raised RuntimeError while it was read", id="broken __json__"),
        pytest.param(BrokenAttribute(), r"raised RuntimeError while it was read", id="broken attribute"),
        pytest.param(datetime(2020, 1, 1, tzinfo=BrokenZone()), r"raised RuntimeError", id="broken zone"),
    ]


class Broken:
    def __json__(self) -> Any:
        raise RuntimeError(SECRET)


class BrokenAttribute:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(SECRET)


class BrokenZone(tzinfo):
    def utcoffset(self, when: Any) -> Any:
        raise RuntimeError(SECRET)


def assert_discreet(error: LockKeyError) -> None:
    assert SECRET not in str(error)
    assert str(error).startswith("proj.sync: ")
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(("value", "message"), unsupported())
def test_an_argument_without_a_key_is_named_with_its_type_and_the_way_out(value: Any, message: str) -> None:
    with pytest.raises(LockKeyError, match=message) as caught:
        key_id(value)
    assert_discreet(caught.value)
    assert str(caught.value).endswith("name the arguments that count in lock_on, or make the key with lock_key")
    with pytest.raises(LockKeyError, match=r"^(.* in )?the value "):
        canonical(value)
    assert make(lambda value, a: None, on=["a"]).id((value, 1), {})


def cycles() -> list[Any]:
    a_list: list[Any] = []
    a_list.append(a_list)
    a_dict: dict[str, Any] = {}
    a_dict["x"] = a_dict
    through = Jsonable(None)
    through.value = [through]
    return [a_list, a_dict, through]


def deep(levels: int, wrap: Callable[[Any], Any], value: Any) -> Any:
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        *cycles(),
        deep(201, lambda v: [v], 1),
        deep(201, lambda v: (v,), 1),
        deep(201, lambda v: {"x": v}, 1),
        {deep(201, lambda v: (v,), 1): 1},
        deep(201, lambda v: frozenset({v}), 1),
        deep(100_000, lambda v: [v], 1),
    ],
    ids=range(9),
)
def test_nesting_ends_in_an_error_of_ours(value: Any) -> None:
    with pytest.raises(LockKeyError, match="nested more than 200 levels deep, or contains itself") as caught:
        key_id(value)
    assert len(str(caught.value)) < 400
    while isinstance(value, list) and value and value[0] is not value:  # else the garbage collector would recurse
        value = value[0]


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"x": v}, Jsonable])
def test_two_hundred_levels_are_fine(wrap: Any) -> None:
    assert canonical(deep(200, wrap, 1))


def test_a_frozenset_can_hold_itself_no_deeper_than_that() -> None:
    assert canonical(deep(100, lambda v: frozenset({v}), 1))


def test_a_call_from_deep_down_the_stack_still_ends_in_an_error_of_ours() -> None:
    value = deep(150, lambda v: [v], 1)

    def down() -> str:
        try:
            return down()
        except RecursionError:
            return key_id(value)

    with pytest.raises(LockKeyError, match="nested more than"):
        down()


@pytest.mark.parametrize("where", ["value", "template", "function"])
def test_a_soft_time_limit_is_nobodys_bad_argument(where: str) -> None:
    def strikes(*_: Any) -> Any:
        raise SoftTimeLimitExceeded

    bomb = type("Bomb", (), {"__json__": strikes})()
    options = {"value": {}, "template": {"template": "{value}"}, "function": {"template": strikes}}[where]
    with pytest.raises(SoftTimeLimitExceeded):
        make(one, **options).id((bomb,), {})


# --- nothing of the arguments


@relaxed
@given(st.text(st.sampled_from("ghijklmnopqrstuxyz"), min_size=6), json_values)
def test_no_argument_is_readable_in_a_key(text: str, other: Any) -> None:
    made = make(task).id((text, other), {"x": [text]})
    assert re.fullmatch(r"v1-[0-9a-f]{32}", made)


# --- stable


STABLE = """
import inspect, sys, uuid
from enum import Enum
from celery_redislock.keys import KeyMaker
def f(a, b=frozenset({"x", "y", "z"}), *rest, c={"k": 1, "l": 2}, **more): ...
maker = KeyMaker(task="t", signature=inspect.signature(f), on=None, template=None)
words = [f"w{i}" for i in range(50)]
print(maker.id((set(words),), {}), maker.id((dict.fromkeys(set(words), {1.5, None}),), {w: 1 for w in set(words)}))
print(KeyMaker(task="t", signature=inspect.signature(f), on={"a", "b", "c"}, template=None).id(("x",), {}))
"""


@pytest.fixture(scope="module")
def run_stable() -> Callable[[str], str]:
    root = str(Path(keys.__file__).parents[1])

    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        command = [sys.executable, "-c", STABLE]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    return run


def test_every_process_makes_the_same_id(run_stable: Callable[[str], str]) -> None:
    outputs = {run_stable(seed) for seed in ("0", "1", "4242")}
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 3


def test_five_megabytes_cost_no_more_than_reading_them_a_few_times() -> None:
    values = [
        "x" * 5_000_000,
        "é" * 2_500_000,
        b"x" * 5_000_000,
        [12345] * 200_000,
        dict.fromkeys(map(str, range(100_000))),
    ]
    values += [
        1 << 40_000_000,
        {"rows": [{"id": i, "name": "n"} for i in range(20_000)]},
        set(map(str, range(100_000))),
    ]
    for value in values:
        started = clock.perf_counter()
        key_id(value)
        assert clock.perf_counter() - started < 10  # s; it is tens to hundreds of ms, and minutes if quadratic


# --- the text of a key


SAFE = re.compile(r"[A-Za-z0-9._~@/=+,%-]*")
NASTY = [
    "a:b",
    "a*b",
    "a?b",
    "a[b]",
    "a{b}",
    "{}",
    "{",
    "}",
    "a b",
    "a\nb",
    "a\\b",
    "é",
    "日本",
    "😀",
    "\ud800",
    "%",
    "%41",
    "\x00",
]


@relaxed
@given(any_text)
@example("\ud83d\ude00")
def test_escaping_is_safe_and_can_be_undone(text: str) -> None:
    for colon in (False, True):
        escaped = escape(text, colon=colon)
        assert SAFE.fullmatch(escaped.replace(":", "") if colon else escaped)
        assert unquote(escaped, errors="surrogatepass") == text  # hence injective
    assert escape(escape(text)) != escape(text) or SAFE.fullmatch(text)


def test_what_needs_no_escape_is_left_alone() -> None:
    assert escape("proj.tasks.sync_account-v2~@/=+,") == "proj.tasks.sync_account-v2~@/=+,"
    assert (escape("a:b"), escape("a:b", colon=True)) == ("a%3Ab", "a:b")


@relaxed
@given(any_text.filter(bool))
@example("\ud83d\ude00")
@example("v1-" + "0" * 32)
@example("q:x")
def test_a_text_id_can_be_undone_and_is_never_one_of_ours(text: str) -> None:
    made = text_id(text)
    assert unquote(made, errors="surrogatepass") == json.loads(json.dumps(text))
    assert not re.match(r"v1-|h1-|q:|done:|(?:fence|lock)$", made)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v1-x", "%761-x"),
        ("v22-x", "%7622-x"),
        ("h1-x", "%681-x"),
        ("q:x", "%71:x"),
        ("done:x", "%64one:x"),
        ("fence", "%66ence"),
        ("lock", "%6Cock"),
        ("fences", "fences"),
        ("fence\n", "fence%0A"),
        ("v1", "v1"),
        ("q", "q"),
        ("done", "done"),
        ("V1-x", "V1-x"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "h1-" + hashlib.sha256(b"x" * 201).hexdigest()[:32]),
        ("é" * 34, "h1-" + hashlib.sha256(b"%C3%A9" * 34).hexdigest()[:32]),
        ("q:" + "x" * 196, "%71:" + "x" * 196),
        ("q:" + "x" * 197, "h1-" + hashlib.sha256(b"%71:" + b"x" * 197).hexdigest()[:32]),
    ],
)
def test_a_text_that_looks_like_ours_or_is_long_becomes_another(text: str, expected: str) -> None:
    assert text_id(text) == expected
    assert make(one, template="{value}").id((text,), {}) == expected


def slot(key: str) -> int:
    """Return the slot in which a Redis Cluster puts a key (its specification's own words, in Python)."""
    start = key.find("{")
    end = key.find("}", start + 1)
    if start >= 0 and end > start + 1:
        key = key[start + 1 : end]
    return binascii.crc_hqx(key.encode("utf-8", "surrogatepass"), 0) % 16384


@pytest.mark.parametrize(
    "prefix", ["redislock", "app:redislock", "a{b}", "a{", "a}", "}{", "a{b", "*?[x]", "é 😀", "a b\n"]
)
@pytest.mark.parametrize("name", ["proj.sync", *NASTY])
def test_the_keys_of_one_name_share_a_slot_whatever_prefix_and_name(prefix: str, name: str) -> None:
    scheme = KeyScheme(prefix, name)
    made = make(one).id((1,), {})
    all_keys = [
        scheme.lock(made),
        scheme.lock(f"q:{made}"),
        scheme.lock(text_id("{x}")),
        scheme.fence,
        scheme.done("{1}"),
    ]
    assert len({slot(key) for key in all_keys}) == 1
    assert all(key.startswith(f"{prefix}:{{") for key in all_keys)
    assert all(SAFE.fullmatch(re.sub(r"[:{}]", "", key.removeprefix(prefix))) for key in all_keys)


def test_the_keys_have_the_documented_form() -> None:
    scheme = KeyScheme("app:redislock", "proj.sync")
    assert scheme.lock("v1-00") == "app:redislock:{proj.sync}:v1-00"
    assert scheme.fence == "app:redislock:{proj.sync}:fence"
    assert scheme.done("a1:0 *") == "app:redislock:{proj.sync}:done:a1%3A0%20%2A"
    assert scheme == KeyScheme("app:redislock", "proj.sync")
    assert hash(scheme) == hash(KeyScheme("app:redislock", "proj.sync"))
    assert repr(scheme) == "KeyScheme(prefix='app:redislock', name='proj.sync')"


@relaxed
@given(st.lists(st.tuples(any_text.filter(bool), any_text.filter(bool)), min_size=2, max_size=2, unique=True))
def test_different_names_ids_and_kinds_never_meet(pairs: list[tuple[str, str]]) -> None:
    made = [
        key
        for name, text in pairs
        for key in (
            KeyScheme("p", name).lock(text_id(text)),
            KeyScheme("p", name).done(text),
            KeyScheme("p", name).fence,
        )
    ]
    names = {name for name, _ in pairs}
    joined = {(name, json.loads(json.dumps(text))) for name, text in pairs}
    assert len(set(made)) == len(joined) + len(set(pairs)) + len(names)


@pytest.mark.parametrize(
    ("prefix", "name", "message"),
    [
        ("a{}", "x", r"redislock_prefix .* is 'a\{\}', and must not contain '\{\}': a Redis Cluster"),
        ("{}", "x", "must not contain"),
        ("", "x", "redislock_prefix is empty"),
        ("p", "", "lock_name is empty"),
    ],
)
def test_a_scheme_that_would_scatter_its_keys_is_refused(prefix: str, name: str, message: str) -> None:
    with pytest.raises(LockConfigError, match=message):
        KeyScheme(prefix, name)
    if "{}" in prefix:
        assert slot(f"{prefix}:{{x}}:fence") != slot(f"{prefix}:{{x}}:done:1")  # why
