"""Which renewals are due, and what an answer means: `celery_redislock.keeper.plan`, with time handed in."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redislock.keeper.plan import Change, Hold, Loss, due, next_time
from celery_redislock.lease import Holder, Lease, Renewal

HELD, MISSING, TAKEN, UNREACHABLE = (
    Renewal(held=True),
    Renewal(held=False),
    Renewal(held=False, holder=Holder("somebody")),
    None,
)


def hold(ttl: float = 30.0, sent: float = 100.0, **options: Any) -> Hold:
    return Hold(Lease("key", "token", ttl), "owner", sent=sent, **options)


# --- when


def test_the_first_renewal_is_due_a_third_of_the_lease_after_the_acquire_was_sent() -> None:
    held = hold()
    assert (held.due, held.deadline) == (110.0, 130.0)
    assert due([held], 109.9) == []
    assert due([held], 110.0) == [held]


def test_a_renewal_counts_from_when_it_was_sent_not_from_its_answer() -> None:
    held = hold()
    assert held.answered(HELD, sent=110.0, now=115.0) is None
    assert (held.due, held.deadline) == (120.0, 140.0)


@pytest.mark.parametrize(("ttl", "pause"), [(30.0, 1.0), (9.0, 1.0), (0.9, 0.1)])
def test_after_a_renewal_without_an_answer_another_follows_soon(ttl: float, pause: float) -> None:
    held = hold(ttl)
    assert held.answered(UNREACHABLE, sent=100.1, now=100.2) is None
    assert held.due == pytest.approx(100.2 + pause)
    assert held.deadline == 100.0 + ttl, "no answer is no longer lease"


def test_a_lease_without_renewal_is_never_due() -> None:
    held = hold(renew=False)
    assert held.due == inf
    assert due([held], 1e9) == []
    assert next_time([held]) == 130.0


def test_nothing_is_renewed_after_max_hold_not_even_late() -> None:
    held = hold(max_hold=25.0)
    held.answered(HELD, sent=110.0, now=110.1)
    assert held.due == 120.0
    assert due([held], 125.0) == [], "this process has slept through it"
    assert held.due == inf
    assert hold(max_hold=10.0).due == inf
    assert hold(max_hold=10.1).due == 110.0


def test_a_second_try_is_not_sent_after_max_hold_either() -> None:
    held = hold(max_hold=10.5)
    held.answered(UNREACHABLE, sent=110.0, now=110.4)
    assert held.due == inf


def test_lateness_is_the_time_since_a_renewal_was_due() -> None:
    held = hold()
    assert held.lateness(109.0) == 0.0
    assert held.lateness(113.5) == 3.5
    assert hold(renew=False).lateness(1e9) == 0.0


def test_the_next_time_is_the_first_renewal_or_the_first_deadline() -> None:
    assert next_time([]) == inf
    first, second = hold(sent=100.0), hold(sent=90.0, renew=False)
    assert next_time([first]) == 110.0
    assert next_time([first, second]) == 110.0
    assert next_time([second]) == 120.0
    second.check(120.0)
    assert next_time([second]) == inf, "it has been told; nothing is left to do"


# --- what


def test_a_lease_whose_key_is_missing_is_lost_for_good() -> None:
    held = hold()
    assert held.answered(MISSING, sent=110.0, now=110.1) == Change(Loss.MISSING)
    assert (held.loss, held.final, held.due) == (Loss.MISSING, True, inf)


def test_a_lease_that_somebody_else_has_taken_is_lost_for_good() -> None:
    held = hold()
    assert held.answered(TAKEN, sent=110.0, now=110.1) == Change(Loss.TAKEN)
    assert held.answered(HELD, sent=120.0, now=120.1) is None, "an older answer changes nothing"
    assert (held.loss, held.final, held.due) == (Loss.TAKEN, True, inf)


def test_a_lease_that_cannot_be_asked_after_is_lost_at_its_deadline_and_not_before() -> None:
    held = hold()
    assert held.answered(UNREACHABLE, sent=110.0, now=129.9) is None
    assert held.check(129.9) is None
    assert held.check(130.0) == Change(Loss.UNREACHABLE)
    assert held.check(131.0) is None, "told once"
    assert not held.final


def test_a_deadline_that_passes_while_waiting_for_an_answer_is_told_with_it() -> None:
    assert hold().answered(UNREACHABLE, sent=129.0, now=131.0) == Change(Loss.UNREACHABLE)


def test_an_unreachable_lease_that_is_still_there_has_recovered() -> None:
    held = hold()
    held.answered(UNREACHABLE, sent=129.0, now=131.0)
    assert held.answered(HELD, sent=132.0, now=132.1) == Change(None)
    assert (held.loss, held.deadline, held.due) == (None, 162.0, 142.0)


def test_an_unreachable_lease_that_turns_out_to_be_gone_is_not_told_twice() -> None:
    held = hold()
    held.answered(UNREACHABLE, sent=129.0, now=131.0)
    assert held.answered(TAKEN, sent=132.0, now=132.1) is None
    assert (held.loss, held.final) == (Loss.TAKEN, True)


def test_an_answer_that_is_older_than_a_lease_does_not_make_it_held() -> None:
    held = hold()
    assert held.answered(HELD, sent=110.0, now=141.0) == Change(Loss.EXPIRED)
    assert held.answered(HELD, sent=142.0, now=180.0) is None
    assert held.loss is Loss.EXPIRED
    assert held.answered(HELD, sent=181.0, now=182.0) == Change(None)


def test_a_lease_that_is_not_renewed_expires() -> None:
    assert hold(renew=False).check(130.0) == Change(Loss.EXPIRED)
    assert hold(renew=False, max_hold=1.0).check(130.0) == Change(Loss.EXPIRED), "there was nothing to stop"


def test_a_lease_that_ends_because_of_max_hold_says_so() -> None:
    held = hold(max_hold=5.0)
    assert held.check(129.9) is None, "what was granted is held to its end"
    assert held.check(130.0) == Change(Loss.MAX_HOLD)


# --- what the main process says to a pool process


def test_a_renewal_by_the_main_process_counts_until_the_deadline_that_it_names() -> None:
    held = hold()
    assert held.renewed_until(150.0, now=125.0) is None
    assert held.deadline == 150.0
    assert held.check(149.9) is None
    assert held.check(150.0) == Change(Loss.EXPIRED)
    assert held.renewed_until(160.0, now=155.0) == Change(None)


def test_old_news_from_the_main_process_do_not_make_a_lease_held() -> None:
    held = hold()
    held.check(130.0)
    assert held.renewed_until(140.0, now=141.0) is None, "this process was starved, and reads what has piled up"
    assert held.loss is Loss.EXPIRED


def test_old_news_from_the_main_process_do_not_make_a_lease_lost_while_newer_ones_may_be_behind_them() -> None:
    held = hold()
    assert held.renewed_until(140.0, now=165.0) is None
    assert held.renewed_until(170.0, now=165.0) is None
    assert held.check(165.0) is None


def test_a_lease_that_the_main_process_has_not_even_tried_to_renew_is_neglected() -> None:
    held = hold()  # ends at 130
    assert not held.neglected(119.9)
    assert held.neglected(120.0), "the last renewal that would be in time is overdue, too"
    held.unanswered()
    assert not held.neglected(120.0), "it has tried"
    assert not hold(renew=False).neglected(129.0)
    assert not hold(max_hold=20.0).neglected(129.0)
    lost = hold()
    lost.check(130.0)
    assert not lost.neglected(131.0)


def test_a_loss_that_the_main_process_tells_is_final_if_it_says_so() -> None:
    held = hold()
    assert held.lost(Loss.UNREACHABLE, final=False) == Change(Loss.UNREACHABLE)
    assert held.renewed_until(150.0, now=125.0) == Change(None)
    assert held.lost(Loss.TAKEN, final=True) == Change(Loss.TAKEN)
    assert held.renewed_until(160.0, now=126.0) is None
    assert held.lost(Loss.ORPHANED, final=True) is None, "told once"
    assert (held.loss, held.final, held.due) == (Loss.TAKEN, True, inf)


def test_losses_have_the_names_that_events_tell() -> None:
    assert {str(loss) for loss in Loss} == {"taken", "missing", "unreachable", "expired", "max_hold", "orphaned"}


# --- whatever happens

seconds = st.floats(0, 40, allow_nan=False).map(lambda value: round(value, 3))
answers = st.sampled_from([HELD, HELD, HELD, UNREACHABLE, UNREACHABLE, MISSING, TAKEN])
steps = st.lists(st.tuples(seconds, seconds, answers), max_size=30)


@given(steps, st.sampled_from([0.1, 3.0, 30.0]), st.booleans(), st.none() | st.floats(0.01, 100, allow_nan=False))
def test_whatever_the_store_answers_and_the_clock_does(
    steps: list[tuple[float, float, Renewal | None]], ttl: float, renew: bool, max_hold: float | None
) -> None:
    now = 1_000.0
    held = hold(ttl, now, renew=renew, max_hold=max_hold)
    stop = inf if max_hold is None or not renew else now + max_hold
    granted, told, over = now, [], False
    for wait, latency, answer in steps:
        now += wait
        told.append(held.check(now))
        _claims_nothing_beyond_its_deadline(held, now)
        if due([held], now):
            assert now < stop
            assert not over
            sent, now = now, now + latency
            told.append(held.answered(answer, sent=sent, now=now))
            over = answer is not None and not answer.held
            if answer is HELD:
                granted = sent
                assert held.due in (sent + ttl / 3, inf), "each renewal is due within a third of the last success"
                assert held.due < inf or sent + ttl / 3 >= stop
            elif answer is UNREACHABLE:
                assert now < held.due <= now + ttl / 9 or held.due == inf
                assert held.due < inf or now + min(ttl / 9, 1.0) >= stop
            _claims_nothing_beyond_its_deadline(held, now)
        assert held.deadline == granted + ttl, "only an answer makes a lease longer"
        assert held.final == over, "lost for good if, and only if, the store said so"
        assert held.due < stop or held.due == inf
        if over:
            assert held.loss in (Loss.TAKEN, Loss.MISSING)
            assert next_time([held]) == inf
        else:
            assert next_time([held]) == min(held.due, held.deadline if held.loss is None else inf)
    changes = [change.loss for change in told if change is not None]
    assert all((loss is None) == bool(number % 2) for number, loss in enumerate(changes)), "lost, recovered, lost, ..."
    assert bool(changes and changes[-1]) == (held.loss is not None)


def _claims_nothing_beyond_its_deadline(held: Hold, now: float) -> None:
    assert held.loss is not None or now < held.deadline
