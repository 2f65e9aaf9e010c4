"""Choice of the draft length: the length with the highest expected tokens per second, or 0 if drafting does not pay.

Also the loss budget that bounds what drafting may cost. Independent of drafters, jobs and backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MIN_SPEEDUP = 1.03  # a smaller gain is within the measurement error
MIN_SHARED_SPEEDUP = 1.15  # if other jobs share the decode: all tokens arrive later, several at once


def estimate_tokens(acceptance_rate: float, length: int) -> float:
    """Return the expected tokens of one decode with `length` draft tokens, each accepted with `acceptance_rate`.

    >>> estimate_tokens(1.0, 3), estimate_tokens(0.0, 3), estimate_tokens(0.5, 2)
    (4.0, 1.0, 1.75)
    """
    if acceptance_rate >= 1:
        return length + 1.0
    return float((1 - acceptance_rate ** (length + 1)) / (1 - acceptance_rate))


@dataclass(frozen=True, slots=True)
class DraftLength:
    """A number of draft tokens and the expected speedup over plain decoding."""

    length: int
    speedup: float


NO_DRAFT = DraftLength(0, 1.0)


def choose_length(
    acceptance_rate: float,
    max_length: int,
    estimate_seconds: Callable[[int], float],
    *,
    rows: int = 1,
    drafting_jobs: int | None = None,
    seconds_per_draft_token: float = 0.0,
    save_seconds: float | None = None,
) -> DraftLength:
    """Return the draft length with the highest expected tokens per second, or `NO_DRAFT`.

    `estimate_seconds` returns the seconds of a decode by its rows, `rows` is the row count without these draft tokens,
    and `seconds_per_draft_token` the cost of producing one. All tokens of a decode count alike, unless `drafting_jobs`
    is given: then that many jobs draft the same length, the other rows are jobs that are delayed by it, and the
    geometric mean of all speeds counts, so that no job is slowed down much for the benefit of another.

    A KV cache that cannot drop rejected draft tokens saves its state before the decode, which takes `save_seconds`. If
    a draft token is rejected, it restores the state and recomputes the accepted tokens with the next token.

    >>> choose_length(0.8, 8, lambda rows: 1.0 + 0.01 * rows).length    # rows are almost free: draft far
    8
    >>> choose_length(0.8, 8, lambda rows: 1.0 * rows).length           # every row costs a decode: do not draft
    0
    >>> choose_length(0.8, 8, lambda rows: 1.0 + 0.01 * rows, save_seconds=2.0).length    # saving costs more
    0
    >>> choose_length(1.0, 8, lambda rows: 1.0 + 0.2 * rows, rows=8, drafting_jobs=1).length    # delays seven others
    0
    >>> choose_length(1.0, 8, lambda rows: 1.0 + 0.2 * rows, rows=8, drafting_jobs=8).length    # all jobs gain
    8
    >>> choose_length(1.0, 8, lambda rows: 0.6 + 1.0 * rows, rows=8, drafting_jobs=8).length    # gain below 1.15
    0
    """
    plain_seconds, drafting, best = estimate_seconds(rows), drafting_jobs or 1, NO_DRAFT
    min_speedup = MIN_SPEEDUP if drafting_jobs is None or rows == 1 else MIN_SHARED_SPEEDUP
    for length in range(1, max_length + 1):
        tokens = estimate_tokens(acceptance_rate, length)
        seconds = estimate_seconds(rows + drafting * length) + drafting * length * seconds_per_draft_token
        if save_seconds is not None:
            # The token before the draft is recomputed, too.
            recompute_seconds = estimate_seconds(rows + drafting * round(tokens)) - plain_seconds
            seconds += save_seconds + (1 - acceptance_rate**length) * (save_seconds + recompute_seconds)
        token_gain = (rows - 1 + tokens) / rows if drafting_jobs is None else tokens ** (drafting_jobs / rows)
        speedup = token_gain * plain_seconds / seconds
        if speedup > max(best.speedup, min_speedup):
            best = DraftLength(length, speedup)
    return best


@dataclass(slots=True)
class LossBudget:
    """Seconds that drafting has saved and lost. It may lose a small share of the time and no more.

    The budget holds even if measurements or estimates are wrong: without credit there is no drafting, and credit comes
    only from plain decodes or from drafts that saved time.
    """

    MAX_LOSS_SHARE: float = 0.01  # of the time of plain decodes
    INITIAL_CREDIT_DECODES: float = 3.0  # decodes that may be lost at the start, since drafting has to be tried
    MAX_CREDIT_DECODES: float = 16.0  # upper bound of accumulated credit
    MAX_LOSS_DECODES: float = 6.0  # most that one decode may count as lost: more is an outlier of the machine

    credit_seconds: float | None = None
    saved_seconds: float = 0.0  # in total
    elapsed_seconds: float = 0.0  # of all decodes, including prefill
    debt_seconds: float = 0.0  # catch-up time of drafters that was not earned back yet

    def record_plain_decode(self, seconds: float) -> None:
        """Record a decode without draft tokens."""
        self.elapsed_seconds += seconds
        if self.credit_seconds is None:
            self.credit_seconds = self.INITIAL_CREDIT_DECODES * seconds
        credit = self.credit_seconds + self.MAX_LOSS_SHARE * seconds
        self.credit_seconds = min(credit, self.MAX_CREDIT_DECODES * seconds)

    def record_draft_decode(
        self, spent_seconds: float, plain_equivalent_seconds: float, plain_decode_seconds: float
    ) -> float:
        """Record a decode with draft tokens. Return the seconds saved, negative if it lost time.

        `plain_equivalent_seconds` is what its tokens would have taken without drafts, `plain_decode_seconds` the
        duration of one plain decode.
        """
        saved = max(plain_equivalent_seconds - spent_seconds, -self.MAX_LOSS_DECODES * plain_decode_seconds)
        self.saved_seconds += saved
        self.elapsed_seconds += spent_seconds
        self.debt_seconds = max(0.0, self.debt_seconds - max(0.0, saved))
        self.credit_seconds = min((self.credit_seconds or 0.0) + saved, self.MAX_CREDIT_DECODES * plain_decode_seconds)
        return saved

    def can_afford(self, seconds: float, plain_decode_seconds: float) -> bool:
        """Return whether a drafter may spend so long on catching up. Catch-up debt has a limit of its own."""
        return (
            self.debt_seconds + seconds
            <= self.INITIAL_CREDIT_DECODES * plain_decode_seconds + self.MAX_LOSS_SHARE * self.elapsed_seconds
        )

    def record_catch_up(self, seconds: float) -> None:
        """Record the time that a drafter spent on catching up."""
        self.saved_seconds -= seconds
        self.debt_seconds += seconds

    @property
    def has_credit(self) -> bool:
        return self.credit_seconds is not None and self.credit_seconds > 0
