"""Streaming detokenizer: bytes of tokens to text, without partial characters and without any part of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Decodes bytes to text and holds back what may become a stop text.

    >>> detokenizer = Detokenizer(stops=["END"])
    >>> detokenizer.feed(b"the E"), detokenizer.feed(b"gg"), detokenizer.finish()
    ('the ', 'Egg', '')
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [stop for stop in stops if stop]
        self._pending_text = ""

    def feed(self, piece: bytes) -> str:
        """Return the text that can be emitted now."""
        if not self._stops:
            return self._decoder.decode(piece)
        self._pending_text += self._decoder.decode(piece)
        end = len(self._pending_text) - self._match_partial_stop()
        text, self._pending_text = self._pending_text[:end], self._pending_text[end:]
        return text

    def finish(self, stop: str | None = None) -> str:
        """Return the remaining text. If `stop` ended the answer, drop it and what follows."""
        rest = self._pending_text + self._decoder.decode(b"", final=True)
        self._pending_text = ""
        if stop is None or stop not in rest:  # it may span a control token whose text is visible here
            return rest
        return rest[: rest.index(stop)]

    def _match_partial_stop(self) -> int:
        """Return how many of the last characters begin, or contain, a stop text."""
        for start in range(len(self._pending_text)):
            tail = self._pending_text[start:]
            if any(stop.startswith(tail) or tail.startswith(stop) for stop in self._stops):
                return len(tail)
        return 0
