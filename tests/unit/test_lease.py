"""celery_redislock.lease: tokens on the wire, and what can be read from a stored value."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from celery_redislock import lease as module
from celery_redislock.held import HeldLock
from celery_redislock.keeper.plan import Hold
from celery_redislock.lease import TOMBSTONE, Acquired, AlreadyDone, Contended, Holder, Lease, Released, Renewal, Token
from celery_redislock.stores.base import Ask, Release
from celery_redislock.stores.memory import MemoryStore

NONCE = "0123456789abcdef01234567"
GOLDEN = "1|8c1f-4d|2|0123456789abcdef01234567|celery@web1|4711|123456"

hostile = st.text(st.characters(codec=None)) | st.sampled_from(  # codec=None: lone surrogates, too
    [
        "",
        "-",
        "|",
        "%",
        "%7C",
        "%25",
        "a|b",
        "-1|a|",
        "1|a|0|n|w|1|1",
        "line\nbreak\r\n",
        "\x00",
        "zürich \U0001f512",
        "\ud800",
        "\udfff\ud800",
        "\ud83d\udd12",
        " ",
        "+",
        "x" * 5000,
    ]
)
numbers = st.integers(min_value=0, max_value=2**63)
tokens = st.builds(Token, hostile, numbers, st.just(NONCE), hostile, numbers, numbers)


# --- the wire


def test_the_token_is_written_as_documented() -> None:
    assert Token("8c1f-4d", 2, NONCE, "celery@web1", 4711, 123456).encode() == GOLDEN


def test_what_would_be_taken_for_a_separator_is_escaped() -> None:
    token = Token('a|b%c "d"\n<é>\ud800', 0, NONCE, "w|1", 1, 0)
    assert token.encode() == f"1|a%7Cb%25c%20%22d%22%0A%3C%C3%A9%3E%ED%A0%80|0|{NONCE}|w%7C1|1|0"


def test_common_signs_stay_readable() -> None:
    text = "!#$&'()*+,/:;=?@[]^_`{}~.-aZ9"
    assert Token(text, 0, NONCE, "-", 1, 0).encode().split("|")[1] == text


def test_the_tombstone_of_a_token_is_written_as_documented() -> None:
    token = Token("8c1f-4d", 2, NONCE, "celery@web1", 4711, 123456)
    assert TOMBSTONE + token.encode() == f"-{GOLDEN}"
    assert token.tombstone_prefix == "-1|8c1f-4d|"


@given(tokens)
def test_a_token_is_seven_fields_of_printable_ascii(token: Token) -> None:
    encoded = token.encode()
    assert re.fullmatch(r"[!-~]*", encoded)
    assert encoded.count("|") == 6
    assert not encoded.startswith(TOMBSTONE)


@given(tokens)
def test_the_holder_is_read_back_exactly_whatever_the_names(token: Token) -> None:
    encoded = token.encode()
    for value, released in ((encoded, False), (TOMBSTONE + encoded, True)):
        assert Holder.parse(value) == Holder(
            value, token.task_id, token.retries, token.worker, token.pid, token.start, released
        )


@given(tokens, tokens)
def test_different_tokens_are_written_differently(one: Token, other: Token) -> None:
    assert (one.encode() == other.encode()) == (one == other)


def test_a_new_token_has_a_nonce_of_96_fresh_bits() -> None:
    made = [Token.new("id", 1, "w", 2, 3) for _ in range(1000)]
    assert len({token.nonce for token in made}) == 1000
    assert all(re.fullmatch("[0-9a-f]{24}", token.nonce) for token in made)
    bits = [bit for token in made for bit in f"{int(token.nonce, 16):096b}"]
    assert abs(bits.count("1") / len(bits) - 0.5) < 0.02  # 12 standard deviations
    assert {(t.task_id, t.retries, t.worker, t.pid, t.start) for t in made} == {("id", 1, "w", 2, 3)}


# --- tombstones


@given(hostile, hostile, numbers, numbers)
@example("a", "a|", 0, 0)
@example("a", "ab", 0, 0)
@example("a|0", "a", 0, 0)
@example("", "|", 0, 0)
@example("%7C", "|", 0, 0)
def test_tombstones_are_recognised_by_the_id_that_left_them_and_by_no_other(
    mine: str, other: str, retries: int, later: int
) -> None:
    prefix = Token(mine, retries, NONCE, "w1", 1, 1).tombstone_prefix
    assert (TOMBSTONE + Token.new(mine, later, "w2", 2, 2).encode()).startswith(prefix)
    assume(other != mine)
    assert not (TOMBSTONE + Token.new(other, later, "w2", 2, 2).encode()).startswith(prefix)


@given(tokens, hostile)
def test_a_living_token_is_never_taken_for_a_tombstone(token: Token, other: str) -> None:
    assert not token.encode().startswith(Token(other, 0, NONCE, "", 0, 0).tombstone_prefix)


# --- reading what is stored


@pytest.mark.parametrize(
    "value",
    [
        "",
        "-",
        "|",
        "||||||",
        "locked",
        "True",
        "1",
        "1|id|0|n|w|1",
        "1|id|0|n|w|1|1|more",
        "2|id|0|n|w|1|1",
        "01|id|0|n|w|1|1",
        "--1|id|0|n|w|1|1",
        "1|id|x|n|w|1|1",
        "1|id||n|w|1|1",
        "1|id|0|n|w||1",
        "1|id|0|n|w|1|1.5",
        "1|%FF|0|n|w|1|1",
        "1|id|0|n|%C3|1|1",
        pytest.param(f"1|id|{'9' * 5000}|n|w|1|1", id="more digits than Python reads"),
        "b0b3b8e2-5a63-4d1b-9a53-9df05b7f7a3e",
    ],
)
def test_an_unknown_format_is_a_holder_of_whom_nothing_is_known(value: str) -> None:
    holder = Holder.parse(value)
    assert holder == Holder(value)
    assert (holder.task_id, holder.retries, holder.worker, holder.pid, holder.start) == (None,) * 5
    assert holder.released is False
    assert str(holder) == "an unknown client"


fragments = st.sampled_from(["1", "-", "|", "%", "%FF", "%ED%A0%80", "0", "id", " ", "\n", "9" * 5000, "\udcff"])


@given(st.text(st.characters(codec=None)) | st.lists(fragments).map("".join) | st.lists(fragments).map("|".join))
@example("1|%ED%A0|0|n|w|1|1")
def test_reading_raises_for_no_text_at_all(value: str) -> None:
    holder = Holder.parse(value)
    assert holder.value == value
    known = (holder.task_id, holder.retries, holder.worker, holder.pid, holder.start)
    assert all(part is None for part in known) or all(part is not None for part in known)
    assert str(holder)


# --- what is shown


def test_a_holder_is_described_by_task_worker_and_process() -> None:
    assert str(Holder.parse(GOLDEN)) == "task 8c1f-4d on celery@web1 pid 4711"
    assert str(Holder.parse("-" + GOLDEN)) == (
        "task 8c1f-4d on celery@web1 pid 4711 (ended; the key stays for lock_min_hold)"
    )


@given(tokens)
def test_the_description_is_one_line_that_any_log_can_write(token: Token) -> None:
    text = str(Holder.parse(token.encode()))
    assert text.isprintable()
    text.encode()


def test_an_id_in_another_script_is_shown_as_it_is() -> None:
    assert "task zürich-\u4e2d on" in str(Holder.parse(Token("zürich-\u4e2d", 0, NONCE, "w", 1, 1).encode()))


def holding(token: str) -> list[Any]:
    """One of everything that carries a token or a value."""
    lease = Lease("k", token, 30.0)
    holder = Holder.parse(token)
    return [
        lease,
        holder,
        Holder.parse(TOMBSTONE + token),
        Holder(token),
        Contended(holder, 1.0, 2.0),
        Renewal(False, holder),
        Released(False, holder),
        Ask(lease, "f", TOMBSTONE + token),
        Release(lease, 1.0, TOMBSTONE + token),
        HeldLock("t", Hold(lease, None, sent=0.0), 1, MemoryStore()),
    ]


@given(hostile, hostile)
def test_the_nonce_is_never_shown(task_id: str, worker: str) -> None:
    nonce = "f00dfeedf00dfeedf00dfeed"
    token = Token(task_id, 0, nonce, worker, 1, 1)
    for value in (token, *holding(token.encode())):
        for text in (repr(value), str(value), f"{value}"):
            assert nonce not in text


def test_fields_that_are_no_secret_are_shown() -> None:
    assert repr(Token("id", 1, NONCE, "w", 2, 3)) == "Token(task_id='id', retries=1, worker='w', pid=2, start=3)"
    assert repr(Lease("k", "secret", 1.0)) == "Lease(key='k', ttl=1.0)"


# --- values


@pytest.mark.parametrize(
    "value",
    [Token("i", 0, NONCE, "w", 1, 1), Holder("v"), Acquired(1, 2.0), AlreadyDone(), Renewal(True), Lease("k", "t", 1)],
)
def test_all_of_them_are_values(value: Any) -> None:
    assert value == type(value)(*(getattr(value, name) for name in value.__dataclass_fields__))
    assert hash(value) == hash(value)
    with pytest.raises((AttributeError, TypeError)):
        value.key = "changed"


def test_an_answer_says_no_more_than_the_store_knew() -> None:
    assert Contended(Holder("v"), 1.0, 2.0).began is None
    assert Renewal(held=True).holder is None
    assert Released(owned=True).holder is None


def test_the_public_names_exist() -> None:
    assert all(hasattr(module, name) for name in module.__all__)
    assert unquote("%7C") == "|"
