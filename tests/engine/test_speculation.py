"""How far to guess: decided by numbers, and the numbers can be faked."""

from __future__ import annotations

import pytest

from afterglow.engine.costs import StepCosts
from afterglow.engine.settings import EngineSettings
from afterglow.engine.speculation import Acceptance, Account, Guessing, choose_length, expected_tokens
from afterglow.errors import InvalidArgument


def test_expected_tokens_are_a_geometric_sum():
    assert expected_tokens(0.75, 3) == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3)
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1


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
    assert choose_length(0.8, 8, costs, guessing=0.0).length > choose_length(0.8, 8, costs, guessing=0.2).length
    assert choose_length(0.8, 8, costs, guessing=1.0).length == 0


def test_company_makes_guesses_worth_less():
    """Where a decode of eight jobs is compute-bound already, nobody guesses."""
    costs = lambda rows: max(1.0, rows / 8)  # noqa: E731
    assert choose_length(0.8, 7, costs, rows=1).length > 2
    assert choose_length(0.8, 7, costs, rows=8).length == 0


def test_nobody_is_made_much_slower_for_the_luck_of_another():
    """One of eight would be sixteen times as fast, all tokens together more, and seven answers half as fast."""
    costs = lambda rows: 1.0 + max(0, rows - 8) / 16  # noqa: E731
    assert choose_length(1.0, 16, costs, rows=8).length == 16
    assert choose_length(1.0, 16, costs, rows=8, sharing=1).length < 8
    assert choose_length(1.0, 16, costs, rows=8, sharing=8).length == 16


def test_a_plateau_is_used_to_its_end():
    """On a GPU eight rows and sixteen cost the same."""
    costs = lambda rows: 1.4 if rows == 1 else 2.0 if rows <= 8 else 4.0  # noqa: E731
    assert choose_length(0.95, 15, costs).length == 7


def test_acceptance_counts_no_guess_behind_the_first_wrong_one():
    known = Acceptance()
    known.verified(drafted=8, accepted=0)
    assert known.tried == 1
    known = Acceptance()
    for _ in range(50):
        known.verified(drafted=4, accepted=4)
    assert known.rate(0.1) > 0.85
    for _ in range(20):
        known.verified(drafted=4, accepted=0)
    assert known.rate(0.1) < 0.3  # what was long ago fades


def test_each_drafter_is_known_by_itself():
    guessing = Guessing()
    for _ in range(9):
        guessing.verified("lookup", 4, 4)
        guessing.verified("mtp", 4, 0)
    assert guessing.rate("lookup", 0.5) > 0.8 > 0.3 > guessing.rate("mtp", 0.5)
    assert guessing.rate("draft", 0.5) == 0.5


def test_step_costs_are_interpolated_and_never_fall():
    costs = StepCosts()
    for _ in range(5):
        costs.measured(1, 1.0)
        costs.measured(5, 3.0)
    assert costs.of(1, 0.1) == 1.0
    assert costs.of(3, 0.1) == pytest.approx(2.0)
    assert costs.of(7, 0.1) == pytest.approx(4.0)  # beyond: as steep as before
    for _ in range(5):
        costs.measured(9, 0.5)  # noise
    assert costs.of(7, 0.1) == pytest.approx(3.0)
    assert costs.longest == 9


def test_before_anything_was_measured_rows_cost_what_prompts_do():
    costs = StepCosts()
    for _ in range(2):
        costs.measured(1, 1.0)
    assert costs.of(5, 0.25) == pytest.approx(2.0)
    assert not costs.known(1)


def test_a_hiccup_of_the_machine_does_not_decide():
    costs = StepCosts()
    costs.measured(4, 9.0)  # the first decode of a shape also prepares it
    assert costs.of(4, 0.1) == pytest.approx(0.4)
    for _ in range(3):
        costs.measured(4, 1.0)
    assert costs.known(4)
    assert costs.of(4, 0.1) == 1.0
    for _ in range(3):
        costs.measured(4, 100.0)
        costs.measured(4, 1.0)
    assert costs.of(4, 0.1) == 1.0
    for _ in range(8):
        costs.measured(4, 2.0)
    assert costs.of(4, 0.1) == 2.0  # but it is kept up to date


def test_an_account_allows_a_small_loss_and_no_more():
    account = Account()
    assert not account.solvent  # nothing is known yet
    lost = time = 0.0
    for _ in range(10_000):
        if account.solvent:
            account.guessed(spent=2.0, saved=1.0, step=1.0)  # always loses
            lost, time = lost + 1.0, time + 2.0
        else:
            account.plain(1.0)
            time += 1.0
    assert 0 < lost < 0.015 * time
    assert account.won == pytest.approx(-lost)


def test_within_a_few_answers_an_account_loses_less_than_three_per_cent():
    """Guesses that are always wrong, by a drafter that catches up whenever it may."""
    account, steps = Account(), 0
    while steps < 640:
        if account.affords(1.0, 1.0):
            account.invested(1.0)
        if account.solvent:
            account.guessed(spent=2.0, saved=1.0, step=1.0)
        else:
            account.plain(1.0)
        steps += 1
    assert 0 < -account.won < 0.03 * steps


def test_an_account_that_wins_goes_on():
    account = Account()
    account.plain(1.0)
    for round in range(100):
        assert account.solvent, round
        account.guessed(spent=1.2, saved=1.0 if round % 3 else 4.0, step=1.0)
    assert account.won > 0


@pytest.mark.parametrize("value", ["fast", 0, -1, 17, 2.5, None, True])
def test_speculation_is_auto_off_or_a_number(value):
    with pytest.raises(InvalidArgument, match="speculation"):
        EngineSettings(speculation=value)


def test_drafters_are_names():
    with pytest.raises(InvalidArgument, match="drafters"):
        EngineSettings(drafters="lookup")
    assert EngineSettings(drafters=("lookup",), speculation=3).speculation == 3
