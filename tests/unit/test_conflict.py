"""celery_redislock.conflict: what a denied call does, row by row, and the rules that no row may break."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redislock.conflict import BASE, LONGEST, Call, Verdict, back_off, decide, is_same_attempt
from celery_redislock.lease import Contended, Holder, Token
from celery_redislock.options import CONFLICT_POLICIES


def held_by(task_id: str, retries: int = 0, *, began: bool | None = None, released: bool = False) -> Contended:
    value = ("-" if released else "") + Token.new(task_id, retries, "celery@w", 7, 1).encode()
    return Contended(Holder.parse(value), 12.0, 1000.0, began)


def held_by_unknown(began: bool | None = None) -> Contended:
    return Contended(Holder.parse("somebody's SET NX"), 12.0, 1000.0, began)


ME = Call("me", retries=1, parent_id="parent")


# --- the table of DESIGN, section 7

EACH_POLICY = [(policy, Verdict(policy)) for policy in CONFLICT_POLICIES]


@pytest.mark.parametrize("policy", CONFLICT_POLICIES)
class TestWhenTheHolderIsMyself:
    def test_a_redelivery_of_what_has_finished_is_dropped(self, policy: str) -> None:
        assert decide(replace(ME, redelivered=True), held_by("me", 1), policy, finished=True) is Verdict.DROP

    def test_a_redelivery_of_what_still_runs_comes_back(self, policy: str) -> None:
        assert decide(replace(ME, redelivered=True), held_by("me", 1), policy) is Verdict.COME_BACK

    def test_a_copy_that_nobody_marked_as_redelivered_comes_back(self, policy: str) -> None:
        assert decide(ME, held_by("me", 1), policy) is Verdict.COME_BACK

    def test_my_retry_that_arrives_before_the_release_comes_back(self, policy: str) -> None:
        assert decide(replace(ME, retries=2), held_by("me", 1), policy) is Verdict.COME_BACK

    def test_an_older_copy_of_mine_comes_back(self, policy: str) -> None:
        assert decide(replace(ME, retries=0), held_by("me", 1), policy) is Verdict.COME_BACK

    def test_another_attempt_of_mine_comes_back_even_if_this_one_has_finished(self, policy: str) -> None:
        assert decide(replace(ME, retries=0), held_by("me", 1), policy, finished=True) is Verdict.COME_BACK


@pytest.mark.parametrize("policy", CONFLICT_POLICIES)
class TestWhenTheHolderIsMyParent:
    def test_a_task_that_sends_itself_again_comes_back(self, policy: str) -> None:
        assert decide(ME, held_by("parent", 5), policy) is Verdict.COME_BACK

    def test_the_parents_last_seconds_of_lock_min_hold_are_waited_for_too(self, policy: str) -> None:
        assert decide(ME, held_by("parent", released=True), policy) is Verdict.COME_BACK


@pytest.mark.parametrize(("policy", "verdict"), EACH_POLICY)
class TestWhenTheHolderIsAnyoneElse:
    def test_a_first_and_certain_denial_gives_the_policy(self, policy: str, verdict: Verdict) -> None:
        assert decide(ME, held_by("other"), policy) is verdict

    def test_a_holder_in_an_unknown_format_is_anyone_else(self, policy: str, verdict: Verdict) -> None:
        assert decide(ME, held_by_unknown(), policy) is verdict

    def test_a_call_without_a_parent_is_not_the_child_of_an_unknown_holder(self, policy: str, verdict: Verdict) -> None:
        assert decide(Call("me"), held_by_unknown(), policy) is verdict

    @pytest.mark.parametrize("holder", [held_by("other"), held_by_unknown()])
    @pytest.mark.parametrize("how", ["redelivered", "came_back", "uncertain"])
    def test_a_copy_that_may_have_begun_comes_back(
        self, how: str, holder: Contended, policy: str, verdict: Verdict
    ) -> None:
        assert decide(replace(ME, **{how: True}), holder, policy) is Verdict.COME_BACK

    @pytest.mark.parametrize("how", ["redelivered", "came_back"])
    def test_a_copy_that_is_known_never_to_have_begun_gives_the_policy(
        self, how: str, policy: str, verdict: Verdict
    ) -> None:
        assert decide(replace(ME, **{how: True}), held_by("other", began=False), policy) is verdict

    @pytest.mark.parametrize("how", ["redelivered", "came_back"])
    def test_a_copy_that_is_known_to_have_begun_comes_back(self, how: str, policy: str, verdict: Verdict) -> None:
        assert decide(replace(ME, **{how: True}), held_by("other", began=True), policy) is Verdict.COME_BACK

    def test_two_whose_acquires_timed_out_may_have_denied_each_other_so_no_marker_helps(
        self, policy: str, verdict: Verdict
    ) -> None:
        assert decide(replace(ME, uncertain=True), held_by("other", began=False), policy) is Verdict.COME_BACK

    def test_that_i_have_finished_says_nothing_about_others(self, policy: str, verdict: Verdict) -> None:
        assert decide(ME, held_by("other", 1), policy, finished=True) is verdict
        assert decide(ME, held_by_unknown(), policy, finished=True) is verdict


# --- the rules, over every case there is

CALLS = [
    Call("me", retries, parent, redelivered, came_back, uncertain)
    for retries, parent, redelivered, came_back, uncertain in product(
        (0, 1), (None, "parent", "me", ""), *[(False, True)] * 3
    )
]
DENIALS = [
    *(
        held_by(task_id, retries, began=began, released=released)
        for task_id, retries, began, released in product(
            ("me", "parent", "other", ""), (0, 1), (None, False, True), (False, True)
        )
    ),
    *(held_by_unknown(began) for began in (None, False, True)),
]
EVERY_CASE = list(product(CALLS, DENIALS, CONFLICT_POLICIES, (False, True)))


def is_family(call: Call, denial: Contended) -> bool:
    return denial.holder.task_id is not None and denial.holder.task_id in (call.task_id, call.parent_id)


def may_have_begun(call: Call, denial: Contended) -> bool:
    return call.uncertain or ((call.redelivered or call.came_back) and denial.began is not False)


def test_a_copy_of_my_own_message_or_my_parents_is_never_given_up() -> None:
    seen = {decide(call, denial, policy) for call, denial, policy, _ in EVERY_CASE if is_family(call, denial)}
    assert seen == {Verdict.COME_BACK}


def test_only_the_very_attempt_that_has_finished_is_dropped() -> None:
    for call, denial, policy, finished in EVERY_CASE:
        dropped = decide(call, denial, policy, finished=finished) is Verdict.DROP
        assert dropped == (finished and is_same_attempt(call, denial.holder)), (call, denial, policy)


def test_what_may_have_begun_is_never_given_up_unless_it_has_finished() -> None:
    for call, denial, policy, finished in EVERY_CASE:
        if may_have_begun(call, denial):
            verdict = decide(call, denial, policy, finished=finished)
            assert verdict in (Verdict.COME_BACK, Verdict.DROP), (call, denial, policy)


def test_a_first_certain_denial_by_somebody_else_gives_exactly_the_policy() -> None:
    for call, denial, policy, finished in EVERY_CASE:
        if not is_family(call, denial) and not may_have_begun(call, denial):
            assert decide(call, denial, policy, finished=finished) is Verdict(policy), (call, denial, policy)


def test_each_policy_is_a_verdict_and_the_other_two_can_not_be_chosen() -> None:
    assert {verdict.value for verdict in Verdict} == {*CONFLICT_POLICIES, "come_back", "drop"}


@pytest.mark.parametrize(
    ("holder", "same"),
    [
        (held_by("me", 1), True),
        (held_by("me", 1, released=True), True),
        (held_by("me", 2), False),
        (held_by("other", 1), False),
        (held_by_unknown(), False),
    ],
)
def test_the_same_attempt_is_the_same_id_and_the_same_number_of_retries(holder: Contended, same: bool) -> None:
    assert is_same_attempt(ME, holder.holder) is same


@given(st.text(st.characters(codec=None), min_size=1))
def test_a_call_knows_itself_again_whatever_its_id(task_id: str) -> None:
    assert decide(Call(task_id), held_by(task_id), "skip") is Verdict.COME_BACK


# --- how long a waiting copy stays away

attempts = st.integers(0, 10_000)
remainings = st.floats(0, 1e9) | st.just(math.inf)
jitters = st.floats(0, 1)
timeouts = st.none() | st.floats(0.001, 1e6)


@given(attempts, remainings, jitters, timeouts)
def test_a_pause_is_finite_never_negative_and_within_every_bound(
    attempt: int, remaining: float, jitter: float, visibility_timeout: float | None
) -> None:
    pause = back_off(attempt, remaining, jitter=jitter, visibility_timeout=visibility_timeout)
    assert 0 <= pause <= min(remaining, LONGEST, BASE * 2 ** min(attempt, 20))
    if visibility_timeout is not None:
        assert pause <= visibility_timeout / 3


@given(attempts, remainings, jitters, timeouts)
def test_jitter_takes_at_most_half_of_it(
    attempt: int, remaining: float, jitter: float, visibility_timeout: float | None
) -> None:
    full = back_off(attempt, remaining, jitter=1.0, visibility_timeout=visibility_timeout)
    pause = back_off(attempt, remaining, jitter=jitter, visibility_timeout=visibility_timeout)
    assert full / 2 <= pause <= full


@given(attempts, remainings, jitters, timeouts)
def test_a_pause_does_not_shrink_with_the_attempts(
    attempt: int, remaining: float, jitter: float, visibility_timeout: float | None
) -> None:
    def pause(n: int) -> float:
        return back_off(n, remaining, jitter=jitter, visibility_timeout=visibility_timeout)

    assert pause(attempt + 1) >= pause(attempt)


def test_it_doubles_from_a_quarter_of_a_second_to_a_minute() -> None:
    pauses = [back_off(n, math.inf, jitter=1.0) for n in range(12)]
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


@pytest.mark.parametrize(
    ("attempt", "remaining", "jitter", "visibility_timeout", "pause"),
    [
        (9, 12.0, 1.0, None, 12.0),
        (9, 12.0, 0.0, None, 6.0),
        (9, 12.0, 0.5, None, 9.0),
        (9, 12.0, 1.0, 30.0, 10.0),
        (9, 12.0, 1.0, 3600.0, 12.0),
        (9, 0.0, 1.0, None, 0.0),
        (0, -1.0, 1.0, None, 0.0),
        (10**9, math.inf, 1.0, None, 60.0),
    ],
)
def test_the_shortest_bound_counts(
    attempt: int, remaining: float, jitter: float, visibility_timeout: float | None, pause: float
) -> None:
    assert back_off(attempt, remaining, jitter=jitter, visibility_timeout=visibility_timeout) == pytest.approx(pause)


def test_copies_that_were_denied_together_do_not_come_back_together() -> None:
    assert len({back_off(3, 30.0, jitter=n / 100) for n in range(100)}) == 100
