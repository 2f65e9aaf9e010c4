"""When logits are held on the device: changes come with long decodes, or after many decodes."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.engine.backends.logits_hold import (
    DECODES_AFTER_DRAFTS,
    DECODES_BEFORE_HOLD,
    DECODES_BEFORE_RELEASE,
    LogitsHold,
)
from afterglow.engine.types.backend import DecodeSpan


class Context:
    """Records whether logits are held."""

    def __init__(self) -> None:
        self.is_holding_logits = False

    def hold_logits(self) -> bool:
        self.is_holding_logits = True
        return True

    def release_logits(self) -> None:
        self.is_holding_logits = False


class Decoder:
    """Decodes with a `LogitsHold`; rows are read after each decode."""

    def __init__(self) -> None:
        self.context = Context()
        self._hold = LogitsHold(self.context)

    def decode(self, sequences: int, *, rows: int = 1, outputs: int = 1, read_rows: int = 0, count: int = 1) -> bool:
        """Decode `count` times; return whether the logits of the last decode are held."""
        for _ in range(count):
            span = DecodeSpan(sequence=0, entries=np.zeros(rows, np.int64), position=0, outputs=outputs)
            self._hold.prepare_decode([span] * sequences)
            self._hold.read_rows += read_rows
        return self.context.is_holding_logits


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


def test_logits_are_held_with_the_prompts_of_many_sequences(decoder: Decoder) -> None:
    assert decoder.decode(32, rows=48, read_rows=32)
    assert decoder.decode(32, count=100)


@pytest.mark.parametrize(("sequences", "rows"), [(8, 400), (32, 4)])
def test_logits_of_few_sequences_or_of_short_prompts_are_not_held_at_once(
    decoder: Decoder, sequences: int, rows: int
) -> None:
    assert not decoder.decode(sequences, rows=rows)


def test_logits_are_held_after_many_decodes_of_many_sequences(decoder: Decoder) -> None:
    assert not decoder.decode(16, count=DECODES_BEFORE_HOLD)
    assert decoder.decode(16, count=2)


def test_few_sequences_keep_held_logits_for_long_and_release_them_with_a_long_prompt(decoder: Decoder) -> None:
    decoder.decode(32, rows=48)
    assert decoder.decode(1, count=DECODES_BEFORE_RELEASE)
    assert not decoder.decode(1, count=3)
    decoder.decode(32, rows=48)
    assert decoder.decode(1, count=10)
    assert not decoder.decode(1, rows=600)


def test_rows_that_are_read_release_the_logits_soon_and_keep_them_released(decoder: Decoder) -> None:
    decoder.decode(32, rows=48)
    assert decoder.decode(32, read_rows=32, count=DECODES_BEFORE_HOLD - 2)
    assert not decoder.decode(32, read_rows=32, count=5)
    assert not decoder.decode(32, rows=48, read_rows=32), "the requests read all rows"
    decoder.decode(32)
    decoder.decode(32)
    assert decoder.decode(32, rows=48), "nothing was read"


def test_drafts_release_the_logits_at_once_for_long(decoder: Decoder) -> None:
    decoder.decode(32, rows=48)
    assert not decoder.decode(32, outputs=2)
    assert not decoder.decode(32, rows=48)
    assert not decoder.decode(32, count=DECODES_AFTER_DRAFTS - 10)
    assert decoder.decode(32, count=20)
