"""What leads the choice of tokens beside the sampler: the grammar's mask and the end of a thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Sampler
from afterglow.engine.constraint import Compiler, Matcher, Words
from afterglow.engine.request import Request
from afterglow.engine.thought import ThoughtWatch


@dataclass(slots=True)
class Guide:
    """Leads one answer."""

    matcher: Matcher | None
    thought: ThoughtWatch | None
    pieces: Sequence[bytes]

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher is not None and self.matcher.ended

    def take(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        """The next token: the forced one, or what the sampler draws from those that are allowed. Both move on."""
        token = None if self.thought is None else self.thought.forced()
        if token is None:
            token = sampler.take(logits, None if self.matcher is None else self.matcher.allowed())
        else:
            sampler.accept(token)
        self._accept(token)
        return token

    def permits(self, tokens: Sequence[int]) -> int:
        """How many of some guessed tokens may come next."""
        if self.thought is not None and self.thought.forced() is not None:
            return 0
        return len(tokens) if self.matcher is None else self.matcher.permits(tokens)

    def _accept(self, token: int) -> None:
        if self.thought is not None:
            self.thought.accept(token, self.pieces[token])
        if self.matcher is not None:
            self.matcher.accept(token)


class Guides:
    """Makes the guides of requests, on any thread: compiling a grammar may take longer than a decode."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._compiler = Compiler(words)

    def prepare(self, request: Request) -> Guide | None:
        """What leads the request's answer; None where nothing does. `InvalidGrammar` where it cannot be led."""
        if not request.guided:
            return None
        matcher = None if request.constraint is None else self._compiler.compile(request.constraint)
        thought = None if request.thought is None else ThoughtWatch(request.thought)
        return Guide(matcher, thought, self._words.pieces)
