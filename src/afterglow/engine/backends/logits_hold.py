"""`LogitsHold`: decides when the logits of decodes stay on the GPU instead of being copied to the host."""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.engine.types.backend import DecodeSpan
from afterglow.llama.context import LlamaContext

MIN_HELD_ROWS = 16  # llama.cpp copies the logits of fewer rows in little time
# Decodes after which logits are held or released. Both take tens of milliseconds.
DECODES_BEFORE_CHANGE = 32
DECODES_AFTER_DRAFTS = 1024


class LogitsHold:
    """Holds the logits of a context while many sequences decode and hardly any of their rows are read.

    Rows are read for constraints, penalties and log-probabilities, after prompts, and if few sequences decode.
    """

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._outputs = 0  # of the last decode
        self._remaining = DECODES_BEFORE_CHANGE  # decodes until logits are held or released
        self.read_rows = 0  # of the last decode

    def prepare_decode(self, spans: Sequence[DecodeSpan]) -> None:
        """Hold or release the logits of the next decode."""
        is_holding = self._context.is_holding_logits
        is_suitable = self._outputs >= MIN_HELD_ROWS and self.read_rows * 4 <= self._outputs
        outputs = [span.outputs for span in spans]
        self._outputs, self.read_rows = sum(outputs), 0
        if max(outputs) > 1:  # drafts are verified
            self._context.release_logits()
            self._remaining = DECODES_AFTER_DRAFTS
        elif is_suitable == is_holding:
            self._remaining = max(self._remaining, DECODES_BEFORE_CHANGE)
        elif self._remaining > 0:
            self._remaining -= 1
        else:
            change = self._context.release_logits if is_holding else self._context.hold_logits
            change()
            self._remaining = DECODES_BEFORE_CHANGE
