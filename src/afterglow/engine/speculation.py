"""How far to guess ahead: as far as it is expected to bring more tokens per second, and not at all where it loses.

Pure, but for the accounts it keeps. Who guesses, and what, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

LONGEST = 16  # guesses behind one token; hardly anything is right so far out, and each needs an output
WORTHWHILE = 1.03  # a smaller gain is within what measurements err by
WORTHWHILE_TO_ALL = 1.15  # where others share a decode: all tokens come later in it, and then several at once
PRIOR_WEIGHT = 4.0  # guesses that what is usual counts for
FADING = 0.9  # what a round before the last counts for


@dataclass(slots=True)
class Acceptance:
    """How likely a guess is right if those before it were; newer rounds count more."""

    fading: float = FADING
    weight: float = PRIOR_WEIGHT
    right: float = 0.0
    tried: float = 0.0

    def verified(self, drafted: int, accepted: int) -> None:
        """Of `drafted` guesses the first `accepted` were right. Those behind the first wrong one tell nothing."""
        self.right = self.fading * self.right + accepted
        self.tried = self.fading * self.tried + min(drafted, accepted + 1)

    def rate(self, usual: float) -> float:
        """The estimate; `usual` is what others had."""
        return (self.right + self.weight * usual) / (self.tried + self.weight)


@dataclass(slots=True)
class Guessing:
    """What is known of the guesses about one answer."""

    acceptance: dict[str, Acceptance] = field(default_factory=dict)  # by kind
    kind: str = ""  # of the last guesses
    tried: int = 0  # the decode in which guesses were last verified, or first considered
    barred: bool = False  # its memory could not drop a wrong guess: never again

    def rate(self, kind: str, usual: float) -> float:
        """How likely guesses of this kind are right."""
        known = self.acceptance.get(kind)
        return usual if known is None else known.rate(usual)

    def verified(self, kind: str, drafted: int, accepted: int) -> None:
        self.acceptance.setdefault(kind, Acceptance()).verified(drafted, accepted)


def expected_tokens(rate: float, length: int) -> float:
    """Tokens that one decode is expected to bring with `length` guesses, each right with probability `rate`.

    >>> expected_tokens(1.0, 3), expected_tokens(0.0, 3), expected_tokens(0.5, 2)
    (4.0, 1.0, 1.75)
    """
    if rate >= 1:
        return length + 1.0
    return float((1 - rate ** (length + 1)) / (1 - rate))


@dataclass(frozen=True, slots=True)
class Choice:
    """So many guesses, and how many times faster than none they are expected to be."""

    length: int
    gain: float


NOTHING = Choice(0, 1.0)


def choose_length(
    rate: float,
    limit: int,
    seconds: Callable[[int], float],
    *,
    rows: int = 1,
    sharing: int | None = None,
    guessing: float = 0.0,
    saving: float | None = None,
) -> Choice:
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
    plain, guessers, best = seconds(rows), sharing or 1, NOTHING
    least = WORTHWHILE if sharing is None or rows == 1 else WORTHWHILE_TO_ALL
    for length in range(1, limit + 1):
        tokens = expected_tokens(rate, length)
        cost = seconds(rows + guessers * length) + guessers * length * guessing
        if saving is not None:
            again = seconds(rows + guessers * round(tokens)) - plain  # the token before the guesses, too
            cost += saving + (1 - rate**length) * (saving + again)
        speed = (rows - 1 + tokens) / rows if sharing is None else tokens ** (sharing / rows)
        gain = speed * plain / cost
        if gain > max(best.gain, least):
            best = Choice(length, gain)
    return best


@dataclass(slots=True)
class Account:
    """What guessing has won and lost, in seconds. It may lose a small share of the time and no more.

    Whatever was measured or predicted wrongly, the balance ends it: without credit nobody guesses, and credit comes
    with decodes that had no guesses, or from guesses that won.
    """

    SHARE: float = 0.01  # of the time of plain decodes that may be lost
    START: float = 3.0  # decodes that may be lost at the beginning: something has to be tried
    MOST: float = 16.0  # decodes of credit that are kept from better times
    WORST: float = 6.0  # decodes that one round may count as lost: more is a hiccup of the machine

    credit: float | None = None
    won: float = 0.0  # seconds, over all
    passed: float = 0.0  # seconds of all decodes, those of prompts too
    debt: float = 0.0  # seconds in which drafters caught up, as far as they were not won back

    def plain(self, seconds: float) -> None:
        """A decode without guesses took so long."""
        self.passed += seconds
        if self.credit is None:
            self.credit = self.START * seconds
        self.credit = min(self.credit + self.SHARE * seconds, self.MOST * seconds)

    def guessed(self, spent: float, saved: float, step: float) -> float:
        """A decode with guesses took `spent` seconds; without, its tokens would have taken `saved`. `step` is what a
        plain decode takes. What was won, or lost where it is less than 0."""
        gain = max(saved - spent, -self.WORST * step)
        self.won += gain
        self.passed += spent
        self.debt = max(0.0, self.debt - max(0.0, gain))
        self.credit = min((self.credit or 0.0) + gain, self.MOST * step)
        return gain

    def affords(self, seconds: float, step: float) -> bool:
        """Whether a drafter may take so long to catch up. What that costs has its own share, until it is won back."""
        return self.debt + seconds <= self.START * step + self.SHARE * self.passed

    def invested(self, seconds: float) -> None:
        """A drafter took so long to catch up."""
        self.won -= seconds
        self.debt += seconds

    @property
    def solvent(self) -> bool:
        return self.credit is not None and self.credit > 0
