"""Keys as they were first released. Within a major version no line of this file may change; lines may be added.

A change here means that old and new workers do not see each other's locks during a rolling deploy: each call could run
twice at once. It also tells that another version of Python, Celery or kombu gives the same keys as this one.
"""

# ruff: noqa: DTZ001  (naive datetimes are arguments, too)

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, StrEnum
from typing import Any
from uuid import UUID

import pytest

from celery_redislock.keys import KeyMaker, KeyScheme, canonical, text_id


class Color(Enum):
    __module__ = "proj.models"

    RED = 1


class Perm(Flag):
    __module__ = "proj.models"

    R = 4
    W = 2


class Level(StrEnum):
    LOW = "low"


VALUES: list[tuple[Any, bytes]] = [
    (None, b"N"),
    (True, b"T"),
    (False, b"F"),
    (0, b"i0;"),
    (1, b"i1;"),
    (-255, b"i-ff;"),
    (2**70, b"i400000000000000000;"),
    (0.0, b"r8:\x00\x00\x00\x00\x00\x00\x00\x00"),
    (-0.0, b"r8:\x80\x00\x00\x00\x00\x00\x00\x00"),
    (1.0, b"r8:\x3f\xf0\x00\x00\x00\x00\x00\x00"),
    (0.1, b"r8:\x3f\xb9\x99\x99\x99\x99\x99\x9a"),
    (float("inf"), b"r8:\x7f\xf0\x00\x00\x00\x00\x00\x00"),
    (float("nan"), b"r8:\x7f\xf8\x00\x00\x00\x00\x00\x00"),
    ("", b"s0:"),
    ("1", b"s1:1"),
    ("é😀", b"s6:\xc3\xa9\xf0\x9f\x98\x80"),
    ("\ud800", b"s3:\xed\xa0\x80"),
    ("\ud83d\ude00", b"s4:\xf0\x9f\x98\x80"),
    (b"", b"b0:"),
    (b"\x00\xff", b"b2:\x00\xff"),
    (bytearray(b"ab"), b"b2:ab"),
    (Decimal(1), b"D1:1"),
    (Decimal("1.0"), b"D3:1.0"),
    (Decimal("-1E+30"), b"D6:-1E+30"),
    (Decimal("NaN"), b"D3:NAN"),
    (date(2020, 1, 31), b"c10:2020-01-31"),
    (datetime(2020, 1, 31, 23, 59, 59, 5), b"m26:2020-01-31T23:59:59.000005"),
    (datetime(2020, 1, 31, tzinfo=UTC), b"m25:2020-01-31T00:00:00+00:00"),
    (datetime(2020, 1, 31, tzinfo=timezone(timedelta(hours=-2, minutes=-30))), b"m25:2020-01-31T00:00:00-02:30"),
    (time(1, 2, 3), b"k8:01:02:03"),
    (UUID("12345678-1234-5678-1234-567812345678"), b"u16:\x124Vx\x124Vx\x124Vx\x124Vx"),
    ([], b"l0:"),
    ((1, "a", [None]), b"l3:i1;s1:al1:N"),
    ({}, b"d0:"),
    ({"b": 1, "a": 2, "aa": 3}, b"d3:s1:ai2;s1:bi1;s2:aai3;"),
    ({1: "x", False: "y", None: "z", 1.5: "w"}, b"d4:s1:1s1:xs3:1.5s1:ws4:nulls1:zs5:falses1:y"),
    ({(1, 2): 3}, b"d1:l2:i1;i2;i3;"),
    (set(), b"S0:"),
    (frozenset({"b", "a", 1}), b"S3:i1;s1:as1:b"),
    (Color.RED, b"es17:proj.models.Colors3:RED"),
    (Perm.R | Perm.W, b"es16:proj.models.Permi6;"),
    (Level.LOW, b"s3:low"),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=[str(n) for n in range(len(VALUES))])
def test_bytes_of_a_value(value: Any, expected: bytes) -> None:
    assert canonical(value) == expected


def sync_account(account_id: Any, full: bool = False) -> None: ...


def anything(*args: Any, **kwargs: Any) -> None: ...


MISSING = object()


def optional(a: Any, b: Any = MISSING) -> None: ...


IDS: list[tuple[Callable[..., None], dict[str, Any], tuple[Any, ...], dict[str, Any], str]] = [
    (sync_account, {}, (1,), {}, "v1-500c234800751b8923d37bdd76846e4e"),
    (sync_account, {}, (1,), {"full": True}, "v1-2ccee5922a125f4e66107713c43c9726"),
    (sync_account, {}, ("1",), {}, "v1-73ae4cd0139495e28b85724c8d06df3a"),
    (sync_account, {}, (UUID("12345678-1234-5678-1234-567812345678"),), {}, "v1-6c08ee430e63abc672d1433c43d800c6"),
    (sync_account, {}, ({"a": [1, 2, 3]},), {}, "v1-895d5426e18cbd92c4f869dc3d06cad1"),
    (sync_account, {"on": ["account_id"]}, (1,), {}, "v1-84aada9aa5d60256a681c6eb6fdffa45"),
    (sync_account, {"on": []}, (1,), {}, "v1-ee7d0fbed34482574a32d87dc754abd0"),
    (anything, {}, (), {}, "v1-e742126851d689dfb0cca6c93bdc6f12"),
    (anything, {}, (1, 2), {"x": 3}, "v1-a8c86db5608e91023462fae47fece898"),
    (anything, {"on": ["x"]}, (1, 2), {"x": 3}, "v1-c5d1401429463cee5891246a5b6b897f"),
    (anything, {"on": ["x"]}, (), {}, "v1-ee7d0fbed34482574a32d87dc754abd0"),
    (optional, {}, (1,), {}, "v1-acb305896f3900f187b7f41bb78f4e3c"),
    (sync_account, {"template": "account:{account_id}"}, (1,), {}, "account:1"),
    (sync_account, {"template": "{account_id}"}, ("a b/é*",), {}, "a%20b/%C3%A9%2A"),
    (sync_account, {"template": "{account_id}"}, ("v1-0",), {}, "%761-0"),
    (sync_account, {"template": "{account_id}"}, ("fence",), {}, "%66ence"),
    (sync_account, {"template": lambda account_id: f"q:{account_id}"}, (1,), {}, "%71:1"),
    (sync_account, {"template": "{account_id}"}, ("x" * 201,), {}, "h1-84a0678c90937f5dcf9994d5866668da"),
]


@pytest.mark.parametrize(
    ("function", "options", "args", "kwargs", "expected"), IDS, ids=[str(n) for n in range(len(IDS))]
)
def test_id_of_a_call(
    function: Callable[..., None], options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], expected: str
) -> None:
    options = {"on": None, "template": None, **options}
    assert KeyMaker(task="t", signature=inspect.signature(function), **options).id(args, kwargs) == expected


def test_the_hash_behind_an_id() -> None:
    digest = hashlib.sha256(b"d2:s10:account_idi1;s4:fullF").hexdigest()
    assert IDS[0][-1] == f"v1-{digest[:32]}"


def test_keys_of_a_name() -> None:
    scheme = KeyScheme("redislock", "proj.tasks.sync_account")
    assert scheme.lock("account:1") == "redislock:{proj.tasks.sync_account}:account:1"
    assert scheme.fence == "redislock:{proj.tasks.sync_account}:fence"
    assert scheme.done("c0ffee:0") == "redislock:{proj.tasks.sync_account}:done:c0ffee%3A0"
    odd = KeyScheme("app:redislock", "a:b {c}*é")
    assert odd.lock(text_id("a:b {c}*é")) == "app:redislock:{a%3Ab%20%7Bc%7D%2A%C3%A9}:a:b%20%7Bc%7D%2A%C3%A9"
