"""Logits that stay on the device: the same numbers, and none of them copied by llama.cpp."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.errors import DecodeFailed
from afterglow.llama import top_logits
from afterglow.llama.context import LlamaContext
from afterglow.llama.device_logits import DeviceLogits, divide_rows
from afterglow.llama.top_logits import TOP_COUNT
from support.contexts import max_difference, random_tokens

pytestmark = pytest.mark.native
SEQUENCES = 6


@pytest.fixture(autouse=True)
def small_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the largest logits of tiny vocabularies, too."""
    monkeypatch.setattr(top_logits, "MIN_SHORTLIST_CANDIDATES", TOP_COUNT + 1)


def open_pair(open_context, kind: str) -> tuple[LlamaContext, LlamaContext]:
    """Return a context that copies logits and one that holds them, after a decode of one row in each sequence."""
    ubatch = 64 if kind == "window" else 16  # a decode of window memory has one ubatch
    pair = tuple(open_context(kind, sequences=SEQUENCES, ubatch=ubatch) for _ in range(2))
    pair[1].enable_top_logits()
    for context in pair:
        decode(context, [(sequence, 0, 1, 1) for sequence in range(SEQUENCES)])
    assert pair[1].get_top_logits(1) is not None
    assert pair[1].hold_logits()
    return pair


def decode(context: LlamaContext, spans: list[tuple[int, int, int, int]]) -> list[int]:
    """Decode spans of (sequence, position, rows, outputs); return the rows with outputs."""
    context.batch.clear()
    for sequence, position, rows, outputs in spans:
        tokens = random_tokens(rows, seed=100 * sequence + position)
        context.batch.add(tokens, position=position, sequence=sequence, outputs=outputs)
    context.decode()
    return np.flatnonzero(context.batch.outputs[: context.batch.count]).tolist()


BATCHES = {
    "a row of each sequence": [(sequence, 1, 1, 1) for sequence in range(SEQUENCES)],
    "a prompt beside rows": [(0, 1, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1), (3, 1, 20, 1)],
    "a part of a prompt beside rows": [(0, 1, 1, 1), (1, 1, 1, 1), (2, 1, 20, 0)],
    "prompts of different lengths": [(0, 1, 5, 1), (1, 1, 9, 1), (2, 1, 14, 1)],
    "sequences that are no neighbours": [(0, 1, 1, 1), (2, 1, 1, 1), (3, 1, 1, 1), (5, 1, 8, 1)],
    "a prompt of several ubatches": [(4, 1, 40, 1)],
    "a prompt without outputs": [(4, 1, 40, 0)],
}


@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("kind", ["attention", "window"])
def test_logits_on_the_device_are_those_that_llama_cpp_copies(open_context, kind: str, spans) -> None:
    plain, held = open_pair(open_context, kind)
    for _ in range(2):
        rows = decode(plain, spans)
        assert decode(held, spans) == rows
        for row in rows:
            assert max_difference(held.get_logits(row), plain.get_logits(row)) < 5e-3
        assert plain.memory.get_position_range(4) == held.memory.get_position_range(4)
        if rows:
            assert max_difference(np.asarray(held.get_all_logits()), np.asarray(plain.get_all_logits())) < 5e-3
        spans = [(sequence, position + count, 1, 1) for sequence, position, count, _ in spans]


def test_llama_cpp_copies_no_logits_of_a_context_that_holds_them(open_context) -> None:
    _, held = open_pair(open_context, "attention")
    symbols, size = held._library.symbols, held.model.vocabulary.size
    decode(held, BATCHES["a row of each sequence"])
    assert isinstance(held.get_all_logits(), DeviceLogits)
    host = held._view_floats(symbols.llama_get_logits(held.pointer), SEQUENCES * size).copy()
    decode(held, [(sequence, 2, 1, 1) for sequence in range(SEQUENCES)])
    assert (held._view_floats(symbols.llama_get_logits(held.pointer), SEQUENCES * size) == host).all()
    assert symbols.llama_get_sampled_logits_count_ith(held.pointer, 0) == 0


def test_the_largest_logits_beside_a_prompt_are_found(open_context) -> None:
    _, held = open_pair(open_context, "attention")
    for spans in (BATCHES["a prompt beside rows"], [(sequence, 2, 1, 1) for sequence in range(3)] + [(3, 21, 1, 1)]):
        decode(held, spans)
        top = held.get_top_logits(1)
        assert top.values[:, 0].tolist() == np.asarray(held.get_all_logits()).max(axis=1).tolist()


def test_several_outputs_of_a_sequence_release_the_logits(open_context) -> None:
    plain, held = open_pair(open_context, "attention")
    spans = [(0, 1, 1, 1), (1, 1, 4, 4), (2, 1, 1, 1)]
    for row in decode(plain, spans):
        if row == 0:
            assert held.is_holding_logits
            decode(held, spans)
            assert not held.is_holding_logits
        assert max_difference(held.get_logits(row), plain.get_logits(row)) < 5e-3


def test_logits_can_be_held_and_released_repeatedly(open_context) -> None:
    plain, held = open_pair(open_context, "attention")
    for position in range(1, 9):
        for context in (plain, held):
            decode(context, [(sequence, position, 1, 1) for sequence in range(SEQUENCES)])
        assert isinstance(held.get_all_logits(), DeviceLogits) == (position % 2 == 1)
        assert max_difference(np.asarray(held.get_all_logits()), np.asarray(plain.get_all_logits())) < 5e-3
        if held.is_holding_logits:
            held.release_logits()
        else:
            assert held.get_top_logits(1) is not None
            assert held.hold_logits()


def test_logits_are_not_held_before_they_were_compared(open_context) -> None:
    context = open_context("attention", sequences=SEQUENCES)
    assert not context.hold_logits()
    context.enable_top_logits()
    assert not context.hold_logits()


@pytest.mark.parametrize("case", ["unified", "hidden states", "recurrent", "hybrid"])
def test_logits_are_not_held_where_batches_are_not_divided(open_context, case: str) -> None:
    kind = case if case in ("recurrent", "hybrid") else "attention"
    context = open_context(kind, sequences=SEQUENCES, kv_unified=case == "unified")
    if case == "hidden states":
        context.enable_hidden_states(every_row=True)
    context.enable_top_logits()
    decode(context, [(sequence, 0, 1, 1) for sequence in range(SEQUENCES)])
    assert context.get_top_logits(1) is not None
    assert not context.hold_logits()


def test_logits_that_the_device_lost_are_an_error(open_context) -> None:
    _, held = open_pair(open_context, "attention")
    decode(held, BATCHES["a row of each sequence"])
    with pytest.raises(DecodeFailed, match="6 rows, not of 4"):
        DeviceLogits(held._top_logits, 4)[0]


DIVISIONS = [
    ([0, 1, 2], [1, 1, 1], [[0, 1, 2]]),
    ([0, 1, 1, 2], [1, 0, 1, 1], [[1], [0, 2, 3]]),
    ([0, 2, 3], [1, 1, 1], [[0], [1, 2]]),
    ([4, 4, 4], [0, 0, 1], [[0, 1, 2]]),
    ([0, 0, 1, 1], [0, 0, 0, 0], [[0, 1, 2, 3]]),
    ([0, 1, 2, 3, 4], [1] * 5, [[0, 1, 2, 3], [4]]),
    ([0, 1, 1], [1, 1, 1], None),  # two outputs of one sequence
    ([0, 1, 1], [1, 1, 0], None),  # an output before the last row
    ([1, 0], [1, 1], None),  # not ordered
]


@pytest.mark.parametrize(("sequences", "outputs", "parts"), DIVISIONS)
def test_a_batch_is_divided_so_that_each_part_has_its_outputs_in_one_ubatch(sequences, outputs, parts) -> None:
    divided = divide_rows(np.array(sequences, np.int32), np.array(outputs, np.int8), max_rows=4)
    assert divided == parts if parts is None else [rows.tolist() for rows in divided] == parts
