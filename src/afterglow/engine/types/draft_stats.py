"""Draft acceptance of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR_WEIGHT_TOKENS = 4.0  # guesses that what is usual counts for
DECAY_PER_STEP = 0.9  # what a round before the last counts for


@dataclass(slots=True)
class AcceptanceEstimator:
    """How likely a guess is right if those before it were; newer rounds count more."""

    decay: float = DECAY_PER_STEP
    prior_weight: float = PRIOR_WEIGHT_TOKENS
    accepted: float = 0.0
    drafted: float = 0.0

    def update(self, drafted: int, accepted: int) -> None:
        """Of `drafted` guesses the first `accepted` were right. Those behind the first wrong one tell nothing."""
        self.accepted = self.decay * self.accepted + accepted
        self.drafted = self.decay * self.drafted + min(drafted, accepted + 1)

    def estimate(self, prior: float) -> float:
        """The estimate; `usual` is what others had."""
        return (self.accepted + self.prior_weight * prior) / (self.drafted + self.prior_weight)


@dataclass(slots=True)
class DraftStats:
    """What is known of the guesses about one answer."""

    acceptance: dict[str, AcceptanceEstimator] = field(default_factory=dict)  # by kind
    last_kind: str = ""  # of the last guesses
    last_decode: int = 0  # the decode in which guesses were last verified, or first considered
    disabled: bool = False  # its memory could not drop a wrong guess: never again

    def estimate_acceptance(self, kind: str, prior: float) -> float:
        """How likely guesses of this kind are right."""
        known = self.acceptance.get(kind)
        return prior if known is None else known.estimate(prior)

    def update(self, kind: str, drafted: int, accepted: int) -> None:
        self.acceptance.setdefault(kind, AcceptanceEstimator()).update(drafted, accepted)
