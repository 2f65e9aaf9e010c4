"""Values that a model returns for prompts: `Completion`, `Choice` and `Score`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from afterglow.chat.output.response import ChatResponse, shorten_text
from afterglow.chat.prompt import Truncation
from afterglow.engine.types.request import FinishReason, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion of a prompt.

    `finish_reason` is `stop` (an end token or a stop string), `length` (`max_tokens` or the context is full) or
    `deadline`. `stop_reason` is the stop string or token that ended the text. `logprobs` and `alternatives` have one
    item per token if the request asked for logprobs.

    >>> choice = model.complete("One, two, three,", max_tokens=20, stop=["five"]).choices[0]
    >>> choice.text, choice.finish_reason, choice.stop_reason
    (' four, ', 'stop', 'five')
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[float, ...] = ()
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()  # (token, logprob) pairs, most likely first

    def __repr__(self) -> str:
        return f"Choice({shorten_text(self.text)!r}, {len(self.tokens)} tokens, finish_reason={self.finish_reason!r})"

    @classmethod
    def from_response(cls, response: ChatResponse) -> Choice:
        """Convert the response of the common reader of events."""
        assert response.finish_reason != "tool_calls"
        return cls(
            text=response.text,
            tokens=tuple(token.token for token in response.tokens),
            finish_reason=response.finish_reason,
            stop_reason=response.stop_reason,
            logprobs=tuple(token.logprob for token in response.tokens if token.logprob is not None),
            alternatives=tuple(token.alternatives for token in response.tokens if token.alternatives),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Result of `Model.complete`: one choice per requested completion, and the usage of each.

    `text`, `tokens`, `finish_reason` and `usage` are those of the first choice.

    >>> completion = model.complete("Once upon a time", n=2, temperature=0.8, max_tokens=8)
    >>> len(completion.choices), completion.text == completion.choices[0].text
    (2, True)
    >>> completion.usage.prompt_tokens, completion.usage.generated_tokens
    (4, 8)
    """

    choices: tuple[Choice, ...]
    usages: tuple[Usage, ...]
    truncation: Truncation | None = None  # what was dropped from the prompt by the overflow policy

    def __repr__(self) -> str:
        return f"Completion({', '.join(map(repr, self.choices))})"

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Token counts and times of the first choice."""
        return self.usages[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of `Model.logprobs`: `logprobs[i]` is the log-probability of `tokens[i + 1]` after all tokens before it.

    Text beyond the context length is scored in overlapping windows; `windows` is their number.

    >>> score = model.logprobs("The capital of France is Paris")
    >>> len(score.tokens) - len(score.logprobs), score.windows
    (1, 1)
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    windows: int

    def __repr__(self) -> str:
        return f"Score({len(self.tokens)} tokens, perplexity={self.perplexity:.4f})"

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability."""
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))
