"""How far to guess: decided by numbers, and the numbers can be faked."""

from __future__ import annotations

import pytest

from afterglow.engine.kvcache.cost_model import StepCosts
from afterglow.engine.speculation.draft_length import LossBudget, choose_length, estimate_tokens
from afterglow.engine.types.draft_stats import AcceptanceEstimator, DraftStats
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument


def test_expected_tokens_are_a_geometric_sum():
    assert estimate_tokens(0.75, 3) == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3)
    assert estimate_tokens(1.0, 5) == 6
    assert estimate_tokens(0.0, 5) == 1


def test_the_choice_flips_with_the_cost_of_rows():
    free = lambda rows: 1.0  # noqa: E731
    each = lambda rows: float(rows)  # noqa: E731
    assert choose_length(0.9, 8, free).length == 8
    assert choose_length(0.9, 8, each).length == 0
    assert choose_length(1.0, 8, each).length == 0


def test_the_choice_flips_with_acceptance():
    costs = lambda rows: 1.0 + 0.2 * (rows - 1)  # noqa: E731
    lengths = [choose_length(rate, 16, costs).length for rate in (0.1, 0.4, 0.7, 0.9, 1.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == 16


def test_the_choice_flips_with_the_cost_of_guessing():
    costs = lambda rows: 1.0 + 0.05 * rows  # noqa: E731
    assert (
        choose_length(0.8, 8, costs, seconds_per_draft_token=0.0).length
        > choose_length(0.8, 8, costs, seconds_per_draft_token=0.2).length
    )
    assert choose_length(0.8, 8, costs, seconds_per_draft_token=1.0).length == 0


def test_company_makes_guesses_worth_less():
    """Where a decode of eight jobs is compute-bound already, nobody guesses."""
    costs = lambda rows: max(1.0, rows / 8)  # noqa: E731
    assert choose_length(0.8, 7, costs, rows=1).length > 2
    assert choose_length(0.8, 7, costs, rows=8).length == 0


def test_nobody_is_made_much_slower_for_the_luck_of_another():
    """One of eight would be sixteen times as fast, all tokens together more, and seven answers half as fast."""
    costs = lambda rows: 1.0 + max(0, rows - 8) / 16  # noqa: E731
    assert choose_length(1.0, 16, costs, rows=8).length == 16
    assert choose_length(1.0, 16, costs, rows=8, drafting_jobs=1).length < 8
    assert choose_length(1.0, 16, costs, rows=8, drafting_jobs=8).length == 16


def test_a_plateau_is_used_to_its_end():
    """On a GPU eight rows and sixteen cost the same."""
    costs = lambda rows: 1.4 if rows == 1 else 2.0 if rows <= 8 else 4.0  # noqa: E731
    assert choose_length(0.95, 15, costs).length == 7


def test_acceptance_counts_no_guess_behind_the_first_wrong_one():
    known = AcceptanceEstimator()
    known.update(drafted=8, accepted=0)
    assert known.drafted == 1
    known = AcceptanceEstimator()
    for _ in range(50):
        known.update(drafted=4, accepted=4)
    assert known.estimate(0.1) > 0.85
    for _ in range(20):
        known.update(drafted=4, accepted=0)
    assert known.estimate(0.1) < 0.3  # what was long ago fades


def test_each_drafter_is_known_by_itself():
    guessing = DraftStats()
    for _ in range(9):
        guessing.update("lookup", 4, 4)
        guessing.update("mtp", 4, 0)
    assert guessing.estimate_acceptance("lookup", 0.5) > 0.8 > 0.3 > guessing.estimate_acceptance("mtp", 0.5)
    assert guessing.estimate_acceptance("draft", 0.5) == 0.5


def test_step_costs_are_interpolated_and_never_fall():
    costs = StepCosts()
    for _ in range(5):
        costs.record(1, 1.0)
        costs.record(5, 3.0)
    assert costs.estimate_seconds(1, 0.1) == 1.0
    assert costs.estimate_seconds(3, 0.1) == pytest.approx(2.0)
    assert costs.estimate_seconds(7, 0.1) == pytest.approx(4.0)  # beyond: as steep as before
    for _ in range(5):
        costs.record(9, 0.5)  # noise
    assert costs.estimate_seconds(7, 0.1) == pytest.approx(3.0)
    assert costs.max_measured_rows == 9


def test_before_anything_was_measured_rows_cost_what_prompts_do():
    costs = StepCosts()
    for _ in range(2):
        costs.record(1, 1.0)
    assert costs.estimate_seconds(5, 0.25) == pytest.approx(2.0)
    assert not costs.is_measured(1)


def test_a_hiccup_of_the_machine_does_not_decide():
    costs = StepCosts()
    costs.record(4, 9.0)  # the first decode of a shape also prepares it
    assert costs.estimate_seconds(4, 0.1) == pytest.approx(0.4)
    for _ in range(3):
        costs.record(4, 1.0)
    assert costs.is_measured(4)
    assert costs.estimate_seconds(4, 0.1) == 1.0
    for _ in range(3):
        costs.record(4, 100.0)
        costs.record(4, 1.0)
    assert costs.estimate_seconds(4, 0.1) == 1.0
    for _ in range(8):
        costs.record(4, 2.0)
    assert costs.estimate_seconds(4, 0.1) == 2.0  # but it is kept up to date


def test_an_account_allows_a_small_loss_and_no_more():
    account = LossBudget()
    assert not account.has_credit  # nothing is known yet
    lost = time = 0.0
    for _ in range(10_000):
        if account.has_credit:
            account.record_draft_decode(spent=2.0, saved=1.0, step=1.0)  # always loses
            lost, time = lost + 1.0, time + 2.0
        else:
            account.record_plain_decode(1.0)
            time += 1.0
    assert 0 < lost < 0.015 * time
    assert account.saved_seconds == pytest.approx(-lost)


def test_within_a_few_answers_an_account_loses_less_than_three_per_cent():
    """Guesses that are always wrong, by a drafter that catches up whenever it may."""
    account, steps = LossBudget(), 0
    while steps < 640:
        if account.can_afford(1.0, 1.0):
            account.record_catch_up(1.0)
        if account.has_credit:
            account.record_draft_decode(spent_seconds=2.0, plain_equivalent_seconds=1.0, plain_decode_seconds=1.0)
        else:
            account.record_plain_decode(1.0)
        steps += 1
    assert 0 < -account.saved_seconds < 0.03 * steps


def test_an_account_that_wins_goes_on():
    account = LossBudget()
    account.record_plain_decode(1.0)
    for round in range(100):
        assert account.has_credit, round
        account.record_draft_decode(
            spent_seconds=1.2, plain_equivalent_seconds=1.0 if round % 3 else 4.0, plain_decode_seconds=1.0
        )
    assert account.saved_seconds > 0


@pytest.mark.parametrize("value", ["fast", 0, -1, 17, 2.5, None, True])
def test_speculation_is_auto_off_or_a_number(value):
    with pytest.raises(InvalidArgument, match="speculation"):
        EngineSettings(speculation=value)


def test_drafters_are_names():
    with pytest.raises(InvalidArgument, match="drafters"):
        EngineSettings(drafters="lookup")
    assert EngineSettings(drafters=("lookup",), speculation=3).speculation == 3
