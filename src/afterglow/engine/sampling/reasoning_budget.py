"""A bound on how long a model may think: when it is reached, the thought is closed for it."""

from __future__ import annotations

from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.types.constraints import ReasoningBudget


class ReasoningLimiter:
    """Counts the tokens of a thought."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._is_reasoning = budget.starts_open
        self._remaining_tokens = budget.max_tokens
        self._pending_tokens = list(budget.closing_tokens)  # what is still to be written, once nothing is left
        self._marker_matcher = StopMatcher([budget.end_marker if budget.starts_open else budget.start_marker])

    def get_forced_token(self) -> int | None:
        """The token that must be next, where the budget is used up."""
        return (
            self._pending_tokens[0]
            if self._is_reasoning and self._remaining_tokens <= 0 and self._pending_tokens
            else None
        )

    def accept(self, token: int, piece: bytes) -> None:
        """`token` was kept."""
        found = self._marker_matcher.feed(piece) is not None
        if self._is_reasoning and self._remaining_tokens <= 0 and self._pending_tokens:
            self._pending_tokens.pop(0)  # the whole ending is written, also what follows the closing text
            if not self._pending_tokens:
                self._set_reasoning(is_reasoning=False)
        elif self._is_reasoning:
            self._remaining_tokens -= 1
            if found:
                self._set_reasoning(is_reasoning=False)
        elif found:
            self._set_reasoning(is_reasoning=True)

    def _set_reasoning(self, *, is_reasoning: bool) -> None:
        self._is_reasoning = is_reasoning
        self._pending_tokens = list(self._budget.closing_tokens)
        self._marker_matcher = StopMatcher([self._budget.end_marker if is_reasoning else self._budget.start_marker])
