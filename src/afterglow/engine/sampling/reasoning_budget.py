"""Reasoning budget: counts the reasoning tokens of a completion and forces the closing tokens at the limit."""

from __future__ import annotations

from afterglow.engine.sampling.stops import StopMatcher
from afterglow.engine.types.constraints import ReasoningBudget


class ReasoningLimiter:
    """Counts the reasoning tokens of one completion."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._is_reasoning = budget.starts_open
        self._remaining_tokens = budget.max_tokens
        self._pending_tokens = list(budget.closing_tokens)  # closing tokens to force once the budget is used up
        self._marker_matcher = StopMatcher([budget.end_marker if budget.starts_open else budget.start_marker])

    def get_forced_token(self) -> int | None:
        """Return the token that must come next if the budget is used up, else None."""
        is_used_up = self._is_reasoning and self._remaining_tokens <= 0
        return self._pending_tokens[0] if is_used_up and self._pending_tokens else None

    def accept(self, piece: bytes) -> None:
        """Advance by the text of a token of the completion."""
        has_marker = self._marker_matcher.feed(piece) is not None
        if self.get_forced_token() is not None:
            self._pending_tokens.pop(0)  # all closing tokens are forced, also those after the end marker
            if not self._pending_tokens:
                self._set_reasoning(is_reasoning=False)
        elif self._is_reasoning:
            self._remaining_tokens -= 1
            if has_marker:
                self._set_reasoning(is_reasoning=False)
        elif has_marker:
            self._set_reasoning(is_reasoning=True)

    def _set_reasoning(self, *, is_reasoning: bool) -> None:
        self._is_reasoning = is_reasoning
        self._pending_tokens = list(self._budget.closing_tokens)
        self._marker_matcher = StopMatcher([self._budget.end_marker if is_reasoning else self._budget.start_marker])
