"""A bound on how long a model may think: when it is reached, the thought is closed for it."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.engine.stops import StopMatcher
from afterglow.errors import InvalidArgument
from afterglow.llama.arguments import integer


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtBudget:
    """At most `tokens` tokens between the texts `opens` and `closes`; then `ending` is written.

    >>> ThoughtBudget(tokens=100, opens=b"<think>", closes=b"</think>", ending=(7, 8), open=True).tokens
    100
    """

    tokens: int
    opens: bytes
    closes: bytes
    ending: tuple[int, ...]  # tokens that close a thought; they contain `closes`
    open: bool  # the prompt ends inside a thought

    def __post_init__(self) -> None:
        integer("reasoning budget", self.tokens, 0)
        if not self.closes or not self.ending:
            raise InvalidArgument("reasoning budget", "needs a text and tokens that close a thought")


class ThoughtWatch:
    """Counts the tokens of a thought."""

    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget = budget
        self._thinking = budget.open
        self._left = budget.tokens
        self._pending = list(budget.ending)  # what is still to be written, once nothing is left
        self._watch = StopMatcher([budget.closes if budget.open else budget.opens])

    def forced(self) -> int | None:
        """The token that must be next, where the budget is used up."""
        return self._pending[0] if self._thinking and self._left <= 0 and self._pending else None

    def accept(self, token: int, piece: bytes) -> None:
        """`token` was kept."""
        found = self._watch.feed(piece) is not None
        if self._thinking and self._left <= 0 and self._pending:
            self._pending.pop(0)  # the whole ending is written, also what follows the closing text
            if not self._pending:
                self._change(thinking=False)
        elif self._thinking:
            self._left -= 1
            if found:
                self._change(thinking=False)
        elif found:
            self._change(thinking=True)

    def _change(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._pending = list(self._budget.ending)
        self._watch = StopMatcher([self._budget.closes if thinking else self._budget.opens])
