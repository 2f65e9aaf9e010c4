"""Sampler and token bytes of `FakeBackend`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afterglow.llama.sampling import Sampling


class FakeSampler:
    """Draws from the softmax with the request's seed; takes the argmax at temperature 0."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.draw_count = 0
        self.accepted_tokens: list[int] = []
        self.closed = False

    def sample(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        if allowed is not None:
            masked = np.full_like(logits, -np.inf)
            masked[allowed] = logits[allowed]
            logits = masked
        if self.sampling.is_greedy:
            return int(logits.argmax())
        noise = np.random.default_rng([self.sampling.seed or 0, self.draw_count]).gumbel(size=len(logits))
        self.draw_count += 1
        return int((logits / self.sampling.temperature + noise).argmax())

    def sample_and_accept(self, logits: NDArray[np.float32], allowed: NDArray[np.intp] | None = None) -> int:
        token = self.sample(logits, allowed)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        self.accepted_tokens.append(token)

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True, slots=True)
class FakeTokenBytes:
    """Tokens are letters; token 0 ends the generation."""

    pieces: tuple[bytes, ...]
    eog_tokens: frozenset[int] = frozenset({0})
    control_tokens: frozenset[int] = frozenset({0})

    def tokenize(self, text: bytes) -> list[int]:
        return [self.pieces.index(bytes([byte]), 1) for byte in text]
