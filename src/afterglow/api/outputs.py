"""What a model answers, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from afterglow.engine.types.request import Finished, FinishReason, Token, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer. `finish` says what ended it: `stop`, `length` or `deadline`.

    >>> choice = model.complete("One, two, three,", max_tokens=20, stop=["five"]).choices[0]
    >>> choice.text, choice.finish, choice.stop
    (' four, ', 'stop', 'five')
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop text, or the token, that ended it
    logprobs: tuple[float, ...] = ()
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()

    @classmethod
    def from_tokens(cls, tokens: Sequence[Token], text: str, end: Finished) -> Choice:
        return cls(
            text=text,
            tokens=tuple(token.token for token in tokens),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason.decode() if isinstance(end.stop_reason, bytes) else end.stop_reason,
            logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
            alternatives=tuple(token.alternatives for token in tokens if token.alternatives),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answers to one prompt, and what each took. `text`, `tokens`, `finish` and `usage` are the first's.

    >>> answer = model.complete("Once upon a time", n=2, temperature=0.8, max_tokens=8)
    >>> len(answer.choices), answer.text == answer.choices[0].text
    (2, True)
    """

    choices: tuple[Choice, ...]
    usages: tuple[Usage, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.usages[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """`values[i]` is the log-probability of `tokens[i + 1]` after everything before it.

    Tokens beyond the context length are scored in overlapping windows; `windows` says how many there were.

    >>> score = model.logprobs("The capital of France is Paris")
    >>> len(score.tokens) - len(score.values), score.windows
    (1, 1)
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    windows: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability."""
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))
