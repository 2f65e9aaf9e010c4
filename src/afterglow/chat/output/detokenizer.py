"""Tokens' bytes to text as they stream: no half characters, and nothing of a stop text ever shows."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Feed it bytes, get the text that is certain.

    >>> detokenizer = Detokenizer(stops=["END"])
    >>> detokenizer.feed(b"the E"), detokenizer.feed(b"gg"), detokenizer.finish()
    ('the ', 'Egg', '')
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [stop for stop in stops if stop]
        self._pending_text = ""

    def feed(self, piece: bytes) -> str:
        """The text that can be shown now."""
        if not self._stops:
            return self._decoder.decode(piece)
        self._pending_text += self._decoder.decode(piece)
        keep = self._match_partial_stop()
        shown, self._pending_text = (
            self._pending_text[: len(self._pending_text) - keep],
            self._pending_text[len(self._pending_text) - keep :],
        )
        return shown

    def finish(self, stop: str | None = None) -> str:
        """The rest, once no more comes; without `stop`, where that ended the answer, and what follows it."""
        rest = self._pending_text + self._decoder.decode(b"", final=True)
        self._pending_text = ""
        if stop is None or stop not in rest:  # it may lie across a control token that is shown here
            return rest
        return rest[: rest.index(stop)]

    def _match_partial_stop(self) -> int:
        """How many of the last characters may be the beginning of a stop text, or are one."""
        for start in range(len(self._pending_text)):
            tail = self._pending_text[start:]
            if any(stop.startswith(tail) or tail.startswith(stop) for stop in self._stops):
                return len(tail)
        return 0
