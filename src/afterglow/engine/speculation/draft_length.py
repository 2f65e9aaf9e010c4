"""How far to guess ahead: as far as it is expected to bring more tokens per second, and not at all where it loses.

Pure, but for the accounts it keeps. Who guesses, and what, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MIN_SPEEDUP = 1.03  # a smaller gain is within what measurements err by
MIN_SHARED_SPEEDUP = 1.15  # where others share a decode: all tokens come later in it, and then several at once


def estimate_tokens(acceptance_rate: float, length: int) -> float:
    """Tokens that one decode is expected to bring with `length` guesses, each right with probability `rate`.

    >>> expected_tokens(1.0, 3), expected_tokens(0.0, 3), expected_tokens(0.5, 2)
    (4.0, 1.0, 1.75)
    """
    if acceptance_rate >= 1:
        return length + 1.0
    return float((1 - acceptance_rate ** (length + 1)) / (1 - acceptance_rate))


@dataclass(frozen=True, slots=True)
class DraftLength:
    """So many guesses, and how many times faster than none they are expected to be."""

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
    """The number of guesses that is expected to bring most tokens per second; 0 where none is.

    `seconds` says what a decode of so many rows takes, `rows` how many it has without these guesses, and `guessing`
    what making one guess takes. All tokens of a decode count alike. But where `sharing` jobs guess as far and the other
    rows are answers that come later for their sake, the geometric mean of all speeds counts, so that nobody is made
    much slower for somebody else's luck.

    Memory that cannot drop a wrong guess saves its state before, which takes `saving`, puts it back where one was
    wrong, and computes the right ones again with the next token.

    >>> choose_length(0.8, 8, lambda rows: 1.0 + 0.01 * rows).length    # rows cost nothing: guess far
    8
    >>> choose_length(0.8, 8, lambda rows: 1.0 * rows).length           # every row costs a decode: do not
    0
    >>> choose_length(0.8, 8, lambda rows: 1.0 + 0.01 * rows, saving=2.0).length    # more than it brings
    0
    >>> choose_length(1.0, 8, lambda rows: 1.0 + 0.2 * rows, rows=8, sharing=1).length    # seven would wait for it
    0
    >>> choose_length(1.0, 8, lambda rows: 1.0 + 0.2 * rows, rows=8, sharing=8).length    # none of them does
    8
    >>> choose_length(1.0, 8, lambda rows: 0.6 + 1.0 * rows, rows=8, sharing=8).length    # hardly faster, in lumps
    0
    """
    plain, guessers, best = estimate_seconds(rows), drafting_jobs or 1, NO_DRAFT
    least = MIN_SPEEDUP if drafting_jobs is None or rows == 1 else MIN_SHARED_SPEEDUP
    for length in range(1, max_length + 1):
        tokens = estimate_tokens(acceptance_rate, length)
        cost = estimate_seconds(rows + guessers * length) + guessers * length * seconds_per_draft_token
        if save_seconds is not None:
            again = estimate_seconds(rows + guessers * round(tokens)) - plain  # the token before the guesses, too
            cost += save_seconds + (1 - acceptance_rate**length) * (save_seconds + again)
        speed = (rows - 1 + tokens) / rows if drafting_jobs is None else tokens ** (drafting_jobs / rows)
        gain = speed * plain / cost
        if gain > max(best.speedup, least):
            best = DraftLength(length, gain)
    return best


@dataclass(slots=True)
class LossBudget:
    """What guessing has won and lost, in seconds. It may lose a small share of the time and no more.

    Whatever was measured or predicted wrongly, the balance ends it: without credit nobody guesses, and credit comes
    with decodes that had no guesses, or from guesses that won.
    """

    MAX_LOSS_SHARE: float = 0.01  # of the time of plain decodes that may be lost
    INITIAL_CREDIT_DECODES: float = 3.0  # decodes that may be lost at the beginning: something has to be tried
    MAX_CREDIT_DECODES: float = 16.0  # decodes of credit that are kept from better times
    MAX_LOSS_DECODES: float = 6.0  # decodes that one round may count as lost: more is a hiccup of the machine

    credit_seconds: float | None = None
    saved_seconds: float = 0.0  # seconds, over all
    elapsed_seconds: float = 0.0  # seconds of all decodes, those of prompts too
    debt_seconds: float = 0.0  # seconds in which drafters caught up, as far as they were not won back

    def record_plain_decode(self, seconds: float) -> None:
        """A decode without guesses took so long."""
        self.elapsed_seconds += seconds
        if self.credit_seconds is None:
            self.credit_seconds = self.INITIAL_CREDIT_DECODES * seconds
        self.credit_seconds = min(
            self.credit_seconds + self.MAX_LOSS_SHARE * seconds, self.MAX_CREDIT_DECODES * seconds
        )

    def record_draft_decode(
        self, spent_seconds: float, plain_equivalent_seconds: float, plain_decode_seconds: float
    ) -> float:
        """A decode with guesses took `spent` seconds; without, its tokens would have taken `saved`. `step` is what a
        plain decode takes. What was won, or lost where it is less than 0."""
        gain = max(plain_equivalent_seconds - spent_seconds, -self.MAX_LOSS_DECODES * plain_decode_seconds)
        self.saved_seconds += gain
        self.elapsed_seconds += spent_seconds
        self.debt_seconds = max(0.0, self.debt_seconds - max(0.0, gain))
        self.credit_seconds = min((self.credit_seconds or 0.0) + gain, self.MAX_CREDIT_DECODES * plain_decode_seconds)
        return gain

    def can_afford(self, seconds: float, plain_decode_seconds: float) -> bool:
        """Whether a drafter may take so long to catch up. What that costs has its own share, until it is won back."""
        return (
            self.debt_seconds + seconds
            <= self.INITIAL_CREDIT_DECODES * plain_decode_seconds + self.MAX_LOSS_SHARE * self.elapsed_seconds
        )

    def record_catch_up(self, seconds: float) -> None:
        """A drafter took so long to catch up."""
        self.saved_seconds -= seconds
        self.debt_seconds += seconds

    @property
    def has_credit(self) -> bool:
        return self.credit_seconds is not None and self.credit_seconds > 0
