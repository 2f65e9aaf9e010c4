"""Token constraints of one request, applied around the sampler: grammar mask, reasoning budget, minimum length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.sampling.grammar import GrammarCompiler, GrammarMatcher
from afterglow.engine.sampling.reasoning_budget import ReasoningLimiter
from afterglow.engine.types.backend import Sampler
from afterglow.engine.types.constraints import GrammarConstraint, TokenBytes, convert_gbnf
from afterglow.engine.types.request import Request


@dataclass(slots=True)
class TokenConstraint:
    """Constrains the tokens of one completion."""

    matcher: GrammarMatcher | None
    reasoning_limiter: ReasoningLimiter | None
    pieces: Sequence[bytes]
    min_tokens: int = 0  # tokens that must still come before one of `end_tokens`
    end_tokens: tuple[int, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is complete and no token may follow."""
        return self.matcher is not None and self.matcher.is_finished

    def sample(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        """Return the forced token, or sample from the allowed ones. Advances the sampler and the constraint."""
        token = None if self.reasoning_limiter is None else self.reasoning_limiter.get_forced_token()
        if token is None:
            allowed = None if self.matcher is None else self.matcher.get_allowed_tokens()
            logits = self._forbid_end(logits, allowed)
            token = sampler.sample_and_accept(logits, allowed)
            token = token if self.matcher is None else self.matcher.replace_other_text(token)
        else:
            sampler.accept(token)
        self._accept(token)
        return token

    def find_forced_tokens(self) -> list[int]:
        """Return the tokens that must come next whatever the logits are; empty if there is a choice.

        Their text is the only one that the grammar allows, and they are how the vocabulary writes it.
        """
        is_reasoning_ending = (
            self.reasoning_limiter is not None and self.reasoning_limiter.get_forced_token() is not None
        )
        if self.matcher is None or self.min_tokens > 0 or is_reasoning_ending:
            return []
        return self.matcher.find_forced_tokens()

    def accept_forced(self, sampler: Sampler, token: int) -> None:
        """Advance the sampler and the constraint by a forced token.

        It is sampled from one candidate, so that a seeded sampler draws as often as without forced tokens.
        """
        logits = np.broadcast_to(np.float32(0), len(self.pieces))  # one number: a vocabulary may have 250,000 tokens
        sampler.sample_and_accept(logits, np.array([token], dtype=np.intp))
        self._accept(token)

    def _accept(self, token: int) -> None:
        if self.reasoning_limiter is not None:
            self.reasoning_limiter.accept(self.pieces[token])
        if self.matcher is not None:
            self.matcher.accept(token)
        self.min_tokens -= 1

    def _forbid_end(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None) -> NDArray[np.float32]:
        """Return the logits without end tokens if the text is too short. A grammar that ends takes precedence."""
        if self.min_tokens <= 0 or (allowed is not None and np.isin(allowed, self.end_tokens).all()):
            return logits
        logits = logits.copy()
        logits[list(self.end_tokens)] = -np.inf
        return logits

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these draft tokens are allowed next, in order."""
        if self.reasoning_limiter is not None and self.reasoning_limiter.get_forced_token() is not None:
            return 0
        count = len(tokens) if self.matcher is None else self.matcher.count_allowed(tokens)
        if self.min_tokens > 0:
            too_early = tokens[: min(count, self.min_tokens)]
            return next((index for index, token in enumerate(too_early) if token in self.end_tokens), count)
        return count


class TokenConstraintFactory:
    """Builds token constraints, on any thread: compiling a grammar may take longer than a decode."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._grammar_compiler = GrammarCompiler(token_bytes)

    def build(self, request: Request) -> TokenConstraint | None:
        """Return the constraint of a request, or None if it has none. Raise `InvalidGrammar` if it does not compile."""
        if not request.is_constrained:
            return None
        constraint = request.constraint
        if constraint is None and request.sampling.grammar:
            constraint = GrammarConstraint(grammar=convert_gbnf(request.sampling.grammar))
        matcher = None if constraint is None else self._grammar_compiler.compile(constraint)
        limiter = None if request.reasoning_budget is None else ReasoningLimiter(request.reasoning_budget)
        end_tokens = tuple(self._token_bytes.eog_tokens | request.stop_tokens)
        return TokenConstraint(matcher, limiter, self._token_bytes.pieces, request.min_tokens, end_tokens)
