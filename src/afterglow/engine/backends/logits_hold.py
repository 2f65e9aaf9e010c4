"""`LogitsHold`: decides when the logits of decodes stay on the GPU instead of being copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from afterglow.engine.types.backend import DecodeSpan

MIN_HELD_ROWS = 16  # llama.cpp copies the logits of fewer rows in little time
# Holding and releasing take tens of milliseconds, in which all sequences wait. They come with a decode of many rows,
# which takes longer than that, or after this many decodes.
MIN_LONG_ROWS = 512
DECODES_BEFORE_HOLD = 32
DECODES_BEFORE_RELEASE = 256  # few rows lose little if their logits are held
DECODES_AFTER_DRAFTS = 1024


class HoldingContext(Protocol):
    """The part of a context that holds logits."""

    @property
    def is_holding_logits(self) -> bool: ...

    def hold_logits(self) -> bool: ...

    def release_logits(self) -> None: ...


class LogitsHold:
    """Holds the logits of a context while many sequences decode and hardly any of their rows are read.

    Rows are read for constraints, penalties and log-probabilities, after prompts, and if few sequences decode.
    """

    def __init__(self, context: HoldingContext) -> None:
        self._context = context
        self._outputs = 0  # of the last decode
        self._remaining = DECODES_BEFORE_HOLD  # decodes until logits are held or released
        self._was_read = False  # rows were read when logits were released
        self.read_rows = 0  # of the last decode

    def prepare_decode(self, spans: Sequence[DecodeSpan]) -> None:
        """Hold or release the logits of the next decode."""
        is_holding = self._context.is_holding_logits
        is_read = self.read_rows * 4 > self._outputs
        is_suitable = self._outputs >= MIN_HELD_ROWS and not is_read
        outputs = [span.outputs for span in spans]
        is_long = sum([len(span.entries) for span in spans]) >= MIN_LONG_ROWS
        self._outputs, self.read_rows = sum(outputs), 0
        if max(outputs) > 1:  # drafts are verified
            self._context.release_logits()
            self._remaining = DECODES_AFTER_DRAFTS
        elif is_holding:
            self._plan_release(is_suitable, is_read, hides_cost=is_long and len(spans) * 2 < MIN_HELD_ROWS)
        else:
            self._plan_hold(is_suitable, hides_cost=is_long and self._outputs >= MIN_HELD_ROWS)

    def _plan_hold(self, is_suitable: bool, *, hides_cost: bool) -> None:
        self._was_read = self._was_read and not is_suitable
        is_early = hides_cost and not self._was_read and self._remaining <= DECODES_BEFORE_HOLD
        if not is_suitable and not is_early:
            self._remaining = max(self._remaining, DECODES_BEFORE_HOLD)
        elif self._remaining > 0 and not is_early:
            self._remaining -= 1
        else:
            is_held = self._context.hold_logits()
            self._remaining = DECODES_BEFORE_RELEASE if is_held else DECODES_BEFORE_HOLD

    def _plan_release(self, is_suitable: bool, is_read: bool, *, hides_cost: bool) -> None:
        if is_suitable:
            self._remaining = DECODES_BEFORE_RELEASE
        elif self._remaining > 0 and not hides_cost:
            # Reading the rows of many sequences one by one is slow.
            self._remaining -= DECODES_BEFORE_RELEASE // DECODES_BEFORE_HOLD if is_read else 1
        else:
            self._context.release_logits()
            self._was_read = is_read
            self._remaining = DECODES_BEFORE_HOLD
