"""What leads the choice of tokens beside the sampler: the grammar's mask and the end of a thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.sampling.grammar import GrammarCompiler, GrammarMatcher
from afterglow.engine.sampling.reasoning_budget import ReasoningLimiter
from afterglow.engine.types.backend import Sampler
from afterglow.engine.types.constraints import TokenBytes
from afterglow.engine.types.request import Request


@dataclass(slots=True)
class TokenConstraint:
    """Leads one answer."""

    matcher: GrammarMatcher | None
    reasoning_limiter: ReasoningLimiter | None
    pieces: Sequence[bytes]

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher is not None and self.matcher.is_finished

    def sample(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        """The next token: the forced one, or what the sampler draws from those that are allowed. Both move on."""
        token = None if self.reasoning_limiter is None else self.reasoning_limiter.get_forced_token()
        if token is None:
            token = sampler.sample_and_accept(
                logits, None if self.matcher is None else self.matcher.get_allowed_tokens()
            )
        else:
            sampler.accept(token)
        self._accept(token)
        return token

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of some guessed tokens may come next."""
        if self.reasoning_limiter is not None and self.reasoning_limiter.get_forced_token() is not None:
            return 0
        return len(tokens) if self.matcher is None else self.matcher.count_allowed(tokens)

    def _accept(self, token: int) -> None:
        if self.reasoning_limiter is not None:
            self.reasoning_limiter.accept(token, self.pieces[token])
        if self.matcher is not None:
            self.matcher.accept(token)


class TokenConstraintFactory:
    """Makes the guides of requests, on any thread: compiling a grammar may take longer than a decode."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._grammar_compiler = GrammarCompiler(token_bytes)

    def build(self, request: Request) -> TokenConstraint | None:
        """What leads the request's answer; None where nothing does. `InvalidGrammar` where it cannot be led."""
        if not request.is_constrained:
            return None
        matcher = None if request.constraint is None else self._grammar_compiler.compile(request.constraint)
        thought = None if request.reasoning_budget is None else ReasoningLimiter(request.reasoning_budget)
        return TokenConstraint(matcher, thought, self._token_bytes.pieces)
