"""The choice of the draft length, the acceptance estimates it uses, and the loss budget."""

from __future__ import annotations

import pytest

from afterglow.engine.speculation.draft_length import LossBudget, choose_length, estimate_tokens
from afterglow.engine.types.draft_stats import AcceptanceEstimator, DraftStats
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument


def test_expected_tokens_are_a_geometric_sum():
    assert estimate_tokens(0.75, 3) == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3)
    assert estimate_tokens(1.0, 5) == 6
    assert estimate_tokens(0.0, 5) == 1


def test_the_choice_depends_on_the_cost_of_rows():
    free = lambda rows: 1.0  # noqa: E731
    linear = lambda rows: float(rows)  # noqa: E731
    assert choose_length(0.9, 8, free).length == 8
    assert choose_length(0.9, 8, linear).length == 0
    assert choose_length(1.0, 8, linear).length == 0


def test_the_choice_depends_on_the_acceptance_rate():
    costs = lambda rows: 1.0 + 0.2 * (rows - 1)  # noqa: E731
    lengths = [choose_length(rate, 16, costs).length for rate in (0.1, 0.4, 0.7, 0.9, 1.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == 16


def test_the_choice_depends_on_the_cost_of_drafting():
    costs = lambda rows: 1.0 + 0.05 * rows  # noqa: E731
    assert (
        choose_length(0.8, 8, costs, seconds_per_draft_token=0.0).length
        > choose_length(0.8, 8, costs, seconds_per_draft_token=0.2).length
    )
    assert choose_length(0.8, 8, costs, seconds_per_draft_token=1.0).length == 0


def test_concurrent_jobs_make_drafting_worth_less():
    """If a decode of eight jobs is compute-bound already, there is no draft."""
    costs = lambda rows: max(1.0, rows / 8)  # noqa: E731
    assert choose_length(0.8, 7, costs, rows=1).length > 2
    assert choose_length(0.8, 7, costs, rows=8).length == 0


def test_no_job_is_slowed_down_much_for_the_benefit_of_another():
    """One of eight jobs would be sixteen times as fast, total throughput higher, and seven jobs half as fast."""
    costs = lambda rows: 1.0 + max(0, rows - 8) / 16  # noqa: E731
    assert choose_length(1.0, 16, costs, rows=8).length == 16
    assert choose_length(1.0, 16, costs, rows=8, drafting_jobs=1).length < 8
    assert choose_length(1.0, 16, costs, rows=8, drafting_jobs=8).length == 16


def test_a_cost_plateau_is_used_to_its_end():
    """On a GPU eight rows and sixteen cost the same."""
    costs = lambda rows: 1.4 if rows == 1 else 2.0 if rows <= 8 else 4.0  # noqa: E731
    assert choose_length(0.95, 15, costs).length == 7


def test_acceptance_does_not_count_tokens_after_the_first_rejected_one():
    estimator = AcceptanceEstimator()
    estimator.update(drafted=8, accepted=0)
    assert estimator.drafted == 1
    estimator = AcceptanceEstimator()
    for _ in range(50):
        estimator.update(drafted=4, accepted=4)
    assert estimator.estimate(0.1) > 0.85
    for _ in range(20):
        estimator.update(drafted=4, accepted=0)
    assert estimator.estimate(0.1) < 0.3  # old observations decay


def test_acceptance_is_estimated_per_drafter():
    stats = DraftStats()
    for _ in range(9):
        stats.update("ngram", 4, 4)
        stats.update("mtp", 4, 0)
    assert stats.estimate_acceptance("ngram", 0.5) > 0.8 > 0.3 > stats.estimate_acceptance("mtp", 0.5)
    assert stats.estimate_acceptance("draft", 0.5) == 0.5


def test_the_loss_budget_allows_a_small_loss_and_no_more():
    budget = LossBudget()
    assert not budget.has_credit  # nothing is measured yet
    lost = time = 0.0
    for _ in range(10_000):
        if budget.has_credit:  # drafting always loses
            budget.record_draft_decode(spent_seconds=2.0, plain_equivalent_seconds=1.0, plain_decode_seconds=1.0)
            lost, time = lost + 1.0, time + 2.0
        else:
            budget.record_plain_decode(1.0)
            time += 1.0
    assert 0 < lost < 0.015 * time
    assert budget.saved_seconds == pytest.approx(-lost)


def test_within_a_few_completions_the_loss_is_below_three_per_cent():
    """Drafts are always rejected, and the drafter catches up whenever it may."""
    budget, steps = LossBudget(), 0
    while steps < 640:
        if budget.can_afford(1.0, 1.0):
            budget.record_catch_up(1.0)
        if budget.has_credit:
            budget.record_draft_decode(spent_seconds=2.0, plain_equivalent_seconds=1.0, plain_decode_seconds=1.0)
        else:
            budget.record_plain_decode(1.0)
        steps += 1
    assert 0 < -budget.saved_seconds < 0.03 * steps


def test_the_loss_budget_keeps_credit_while_drafting_saves_time():
    budget = LossBudget()
    budget.record_plain_decode(1.0)
    for round in range(100):
        assert budget.has_credit, round
        budget.record_draft_decode(
            spent_seconds=1.2, plain_equivalent_seconds=1.0 if round % 3 else 4.0, plain_decode_seconds=1.0
        )
    assert budget.saved_seconds > 0


@pytest.mark.parametrize("value", ["fast", 0, -1, 17, 2.5, None, True])
def test_speculation_is_auto_off_or_a_number(value):
    with pytest.raises(InvalidArgument, match="speculation"):
        EngineSettings(speculation=value)


def test_drafters_is_a_tuple_of_names():
    with pytest.raises(InvalidArgument, match="drafters"):
        EngineSettings(drafters="ngram")
    assert EngineSettings(drafters=("ngram",), speculation=3).speculation == 3


def test_a_number_of_draft_tokens_needs_a_drafter():
    with pytest.raises(InvalidArgument, match="`speculation` is 3, but `drafters` is empty"):
        EngineSettings(drafters=(), speculation=3)
    assert EngineSettings(drafters=()).drafters == ()
