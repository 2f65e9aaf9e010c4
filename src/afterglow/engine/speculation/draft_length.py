"""Choice of the draft length by measured tokens per second, and the loss budget that bounds what drafting may cost.

Independent of drafters, jobs and backends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from afterglow.engine.types.settings import MAX_DRAFT_TOKENS

LENGTHS = (1, 2, 4, 8, MAX_DRAFT_TOKENS)
MIN_SPEEDUP = 1.03  # a smaller gain is within the measurement error
MAX_TRIAL_SHARE = 0.005  # of the decode time that trials of drafts may lose that are not expected to pay


def estimate_tokens(acceptance_rate: float, length: int) -> float:
    """Return the expected tokens of one decode with `length` draft tokens, each accepted with `acceptance_rate`.

    >>> estimate_tokens(1.0, 3), estimate_tokens(0.0, 3), estimate_tokens(0.5, 2)
    (4.0, 1.0, 1.75)
    """
    if acceptance_rate >= 1:
        return length + 1.0
    return float((1 - acceptance_rate ** (length + 1)) / (1 - acceptance_rate))


class RecentTimings:
    """Duration of an operation: the lower quartile of its latest measurements, 0 without any.

    Other load on the machine only ever makes a measurement longer, so the short ones are the accurate ones.

    >>> timings = RecentTimings()
    >>> for seconds in (9.0, 1.2, 1.0):
    ...     timings.add(seconds)
    >>> timings.seconds
    1.0
    """

    MAX_SAMPLES = 8

    def __init__(self) -> None:
        self.seconds = 0.0
        self._samples: deque[float] = deque(maxlen=self.MAX_SAMPLES)

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.seconds = sorted(self._samples)[(len(self._samples) - 1) // 4]


class DecodeShape(NamedTuple):
    """What the duration of a decode depends on: its jobs, how many of them draft, by which drafter and how far."""

    jobs: int
    drafter: str = ""
    drafting_jobs: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class DraftLength:
    """A number of draft tokens and its speedup over plain decoding."""

    length: int
    speedup: float

    @property
    def trial_interval(self) -> float:
        """Decodes between two such drafts: 0 if they pay, else so many that trials lose no more than their share."""
        return max(0.0, MIN_SPEEDUP / self.speedup - 1) / MAX_TRIAL_SHARE


class DecodeTimings:
    """Measured seconds of decodes by shape, including the time to draft."""

    def __init__(self) -> None:
        # Empty after the first decode of a shape, which is not measured: it prepares the later ones.
        self._timings: dict[DecodeShape, RecentTimings] = {}

    def record(self, shape: DecodeShape, seconds: float) -> bool:
        """Record a decode. Return whether it was the first of its shape."""
        timings = self._timings.get(shape)
        if timings is None:
            self._timings[shape] = RecentTimings()
            return True
        timings.add(seconds)
        return False

    def get_seconds(self, shape: DecodeShape) -> float:
        """Return the seconds of such a decode, 0 if it was not measured."""
        timings = self._timings.get(shape)
        return 0.0 if timings is None else timings.seconds

    def choose_length(
        self, shape: DecodeShape, acceptance_rate: float, max_length: int, rejection_seconds: float = 0.0
    ) -> DraftLength:
        """Return the fastest draft length for a decode of this shape, even if plain decoding is faster.

        A length that was not measured counts as fast as the next shorter one, so it is tried if it could pay. Speed is
        the geometric mean over all jobs, so that no job is slowed down much for the benefit of another.
        `rejection_seconds` is the additional time after a rejected draft token.
        """
        plain_seconds = seconds = self.get_seconds(DecodeShape(shape.jobs))
        fastest = DraftLength(1, 0.0)
        for length in [length for length in LENGTHS if length <= max_length]:
            measured = self.get_seconds(shape._replace(length=length))
            seconds = measured or seconds
            tokens = estimate_tokens(acceptance_rate, length) ** (shape.drafting_jobs / shape.jobs)
            rejection = (1 - acceptance_rate**length) * rejection_seconds
            speedup = tokens * plain_seconds / (seconds + rejection)
            if speedup > fastest.speedup:
                fastest = DraftLength(length, speedup)
            if not measured:
                break
        return fastest


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
        self.credit_seconds = min(
            self.credit_seconds + self.MAX_LOSS_SHARE * seconds, self.MAX_CREDIT_DECODES * seconds
        )

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
