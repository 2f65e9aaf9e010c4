"""Draft acceptance of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR_WEIGHT_TOKENS = 4.0  # number of draft tokens that the prior counts as
DECAY_PER_STEP = 0.9  # weight of a verification step relative to the one after it


@dataclass(slots=True)
class AcceptanceEstimator:
    """Estimates the probability that a draft token is accepted if those before it were. Newer steps weigh more."""

    decay: float = DECAY_PER_STEP
    prior_weight: float = PRIOR_WEIGHT_TOKENS
    accepted: float = 0.0
    drafted: float = 0.0

    def update(self, drafted: int, accepted: int) -> None:
        """Count the `accepted` of `drafted` tokens, and the first rejected one: those after it carry no information."""
        self.accepted = self.decay * self.accepted + accepted
        self.drafted = self.decay * self.drafted + min(drafted, accepted + 1)

    def estimate(self, prior: float) -> float:
        """Return the acceptance probability; `prior` is that of other requests."""
        return (self.accepted + self.prior_weight * prior) / (self.drafted + self.prior_weight)


@dataclass(slots=True)
class DraftStats:
    """Draft statistics of one request."""

    acceptance: dict[str, AcceptanceEstimator] = field(default_factory=dict)  # by draft kind
    last_kind: str = ""  # kind of the last draft
    last_decode: int = 0  # decode in which a draft was last verified or, before that, first considered
    disabled: bool = False  # the KV cache could not drop a rejected token: never draft again

    def estimate_acceptance(self, kind: str, prior: float) -> float:
        """Return the acceptance probability of a draft kind."""
        estimator = self.acceptance.get(kind)
        return prior if estimator is None else estimator.estimate(prior)

    def update(self, kind: str, drafted: int, accepted: int) -> None:
        self.acceptance.setdefault(kind, AcceptanceEstimator()).update(drafted, accepted)
