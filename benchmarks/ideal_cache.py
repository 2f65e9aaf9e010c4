"""Ideal prefix cache without eviction: computes every token once, and the last token of each prompt always.

Works on token lists only, without a server.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from afterglow.engine.types.entries import common_prefix_length

# Tokens that the template puts at the start of every conversation. A prefix hit of no more than these does not count.
TEMPLATE_TOKENS = 8


class IdealCache:
    """All token sequences computed so far.

    >>> cache = IdealCache()
    >>> prompt = list(range(20))
    >>> cache.add_prompt(prompt), cache.add_prompt(prompt), cache.add_prompt([*prompt[:15], 99, 99])
    (20, 1, 2)
    """

    def __init__(self) -> None:
        self._sequences: list[np.ndarray] = []

    def add_prompt(self, prompt: Sequence[int]) -> int:
        """Add a prompt to the cache and return how many of its tokens had to be computed.

        The last token is always computed, because its logits are needed. A cache that stores logits can do better.
        """
        tokens = np.asarray(prompt)
        hit = max((common_prefix_length(tokens, sequence) for sequence in self._sequences), default=0)
        self._sequences.append(tokens)
        return len(tokens) - (min(hit, len(tokens) - 1) if hit > TEMPLATE_TOKENS else 0)

    def add_completion(self, prompt: Sequence[int], completion: Sequence[int]) -> None:
        """Add a completion. All its tokens but the last one have been computed."""
        if len(completion) > 1:
            self._sequences.append(np.asarray([*prompt, *completion[:-1]]))
