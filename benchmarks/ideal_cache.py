"""What a cache that forgets nothing would compute: every token once, and the last of each prompt always.

Pure: it sees token lists and knows no server.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from afterglow.engine.types.entries import common_prefix_length

TEMPLATE = 8  # tokens that every conversation begins with; finding them again is no merit


class Ideal:
    """Everything that was computed so far.

    >>> cache = Ideal()
    >>> prompt = list(range(20))
    >>> cache.needed(prompt), cache.needed(prompt), cache.needed([*prompt[:15], 99, 99])
    (20, 1, 2)
    """

    def __init__(self) -> None:
        self._known: list[np.ndarray] = []

    def needed(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that have to be computed; from then on they are known.

        The last one is computed always: what follows it is asked for.
        """
        tokens = np.asarray(prompt)
        found = max((common_prefix_length(tokens, known) for known in self._known), default=0)
        self._known.append(tokens)
        return len(tokens) - (min(found, len(tokens) - 1) if found > TEMPLATE else 0)

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """An answer was written, so all of it but its last token was computed."""
        if len(answer) > 1:
            self._known.append(np.asarray([*prompt, *answer[:-1]]))
