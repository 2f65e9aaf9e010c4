"""The choice of the draft length, the acceptance estimates it uses, and the loss budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from afterglow.engine.speculation.draft_length import (
    LENGTHS,
    DecodeShape,
    DecodeTimings,
    DraftLength,
    LossBudget,
    estimate_tokens,
)
from afterglow.engine.types.draft_stats import AcceptanceEstimator, DraftStats
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument


def test_expected_tokens_are_a_geometric_sum():
    assert estimate_tokens(0.75, 3) == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3)
    assert estimate_tokens(1.0, 5) == 6
    assert estimate_tokens(0.0, 5) == 1


def measure(seconds: Callable[[int], float], *, jobs: int = 1, drafting_jobs: int = 1) -> DecodeTimings:
    """Return timings of all draft lengths; `seconds` is the duration of a decode by its rows."""
    timings = DecodeTimings()
    for length in (0, *LENGTHS):
        shape = DecodeShape(jobs, "ngram", drafting_jobs, length) if length else DecodeShape(jobs)
        for _ in range(2):
            timings.record(shape, seconds(jobs + drafting_jobs * length))
    return timings


def choose(
    acceptance_rate: float, seconds: Callable[[int], float], *, jobs: int = 1, drafting_jobs: int = 1, **options: float
) -> DraftLength:
    timings = measure(seconds, jobs=jobs, drafting_jobs=drafting_jobs)
    return timings.choose_length(DecodeShape(jobs, "ngram", drafting_jobs), acceptance_rate, 16, **options)


def test_the_choice_depends_on_the_cost_of_rows():
    assert choose(0.9, lambda rows: 1.0).length == 16
    assert choose(0.9, float).trial_interval > 0  # every row costs a decode: drafts do not pay
    assert choose(1.0, float).trial_interval > 0


def test_the_choice_depends_on_the_acceptance_rate():
    choices = [choose(rate, lambda rows: 1.0 + 0.2 * (rows - 1)) for rate in (0.1, 0.4, 0.7, 0.9, 1.0)]
    lengths = [choice.length for choice in choices]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 16
    assert [choice.trial_interval > 0 for choice in choices] == [True, False, False, False, False]


def test_the_choice_depends_on_the_cost_of_rejections():
    """A KV cache that cannot drop rejected draft tokens restores a state and recomputes the accepted ones."""
    cheap = choose(0.9, lambda rows: 1.0 + 0.01 * rows, rejection_seconds=0.01)
    assert cheap.length > 4
    assert cheap.trial_interval == 0
    assert choose(0.9, lambda rows: 1.0 + 0.01 * rows, rejection_seconds=10.0).trial_interval > 0


def test_concurrent_jobs_make_drafting_worth_less():
    """If a decode of eight jobs is compute-bound already, drafts do not pay."""
    costs = lambda rows: max(1.0, rows / 8)  # noqa: E731
    assert choose(0.8, costs).length > 2
    assert choose(0.8, costs, jobs=8, drafting_jobs=8).trial_interval > 0


def test_no_job_is_slowed_down_much_for_the_benefit_of_another():
    """One of eight jobs would be sixteen times as fast, total throughput higher, and seven jobs half as fast."""
    costs = lambda rows: 1.0 + max(0, rows - 8) / 16  # noqa: E731
    assert choose(1.0, costs, jobs=8, drafting_jobs=1).length < 8
    assert choose(1.0, costs, jobs=8, drafting_jobs=8).length == 16


def test_a_cost_plateau_is_used_to_its_end():
    """On a GPU, up to nine rows cost the same."""
    assert choose(0.95, lambda rows: 1.4 if rows == 1 else 2.0 if rows <= 9 else 4.0).length == 8


def test_a_length_is_tried_if_the_next_shorter_one_is_measured():
    timings, shape = DecodeTimings(), DecodeShape(1, "ngram", 1)
    for _ in range(2):
        timings.record(DecodeShape(1), 1.0)
    for length in LENGTHS:
        assert timings.choose_length(shape, 0.9, 16).length == length
        for is_first in (True, False):  # the first decode of a shape prepares the later ones
            assert timings.record(shape._replace(length=length), 1.1) == is_first
    assert timings.choose_length(shape, 0.9, 16).length == 16
    assert timings.choose_length(shape, 0.9, 6).length == 4


def test_drafts_that_do_not_pay_are_tried_so_seldom_that_little_is_lost():
    choice = choose(0.0, lambda rows: 0.5 + 0.5 * rows)
    lost_decodes = 1 / choice.speedup - 1
    assert choice.length == 1
    assert 0.004 < lost_decodes / choice.trial_interval < 0.005


def test_outliers_do_not_change_a_duration():
    timings = DecodeTimings()
    timings.record(DecodeShape(1), 9.0)  # the first decode of a shape is a warm-up
    assert timings.get_seconds(DecodeShape(1)) == 0.0
    for seconds in (1.0, 100.0, 1.0, 100.0, 1.0):
        timings.record(DecodeShape(1), seconds)
        assert timings.get_seconds(DecodeShape(1)) == 1.0
    for _ in range(8):
        timings.record(DecodeShape(1), 2.0)
    assert timings.get_seconds(DecodeShape(1)) == 2.0  # but a lasting change is followed


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
