"""Top logits: found by the device that computed the logits. tests/models/test_smollm2.py samples from them."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.llama import top_logits
from afterglow.llama.context import LlamaContext
from afterglow.llama.top_logits import MIN_ROWS, TOP_COUNT, TopLogitsReducer
from support.contexts import random_tokens

pytestmark = pytest.mark.native
KINDS = ("attention", "window", "recurrent", "hybrid")


@pytest.fixture(autouse=True)
def small_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the largest logits of tiny vocabularies, too."""
    monkeypatch.setattr(top_logits, "MIN_SHORTLIST_CANDIDATES", TOP_COUNT + 1)


def decode_rows(context: LlamaContext, sequences: range, position: int) -> None:
    """Decode one row with an output in each sequence."""
    context.batch.clear()
    for sequence, token in zip(sequences, random_tokens(len(sequences), seed=position), strict=True):
        context.batch.add_row(token, position=position, sequence=sequence, output=True)
    context.decode()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_logits_of_each_row_are_found(open_context, kind: str) -> None:
    context = open_context(kind, sequences=8)
    context.enable_top_logits()
    for position in range(3):
        decode_rows(context, range(8), position)
        top, logits = context.get_top_logits(TOP_COUNT), context.get_all_logits()
        assert top is not None
        assert (np.sort(top.values) == np.sort(logits)[:, -TOP_COUNT:]).all()
        assert (np.take_along_axis(logits, top.tokens, 1) == top.values).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_logit_of_each_row_is_found(open_context, kind: str) -> None:
    context = open_context(kind, sequences=8)
    context.enable_top_logits()
    decode_rows(context, range(8), 0)
    assert context.get_top_logits(0).tokens.shape == (8, TOP_COUNT)  # of the graph that was built before
    decode_rows(context, range(6), 1)
    top = context.get_top_logits(0)
    assert top.tokens[:, 0].tolist() == context.get_all_logits().argmax(axis=1).tolist()
    assert top.values[:, 0].tolist() == context.get_all_logits().max(axis=1).tolist()
    assert context.get_top_logits(TOP_COUNT).tokens.shape == (6, 1)
    decode_rows(context, range(5), 2)
    assert context.get_top_logits(TOP_COUNT).tokens.shape == (5, TOP_COUNT)


def test_logits_are_the_same_with_and_without_them(open_context) -> None:
    plain, reduced = open_context("attention", sequences=8), open_context("attention", sequences=8)
    reduced.enable_top_logits()
    for context in (plain, reduced):
        decode_rows(context, range(8), 0)
    assert (plain.get_all_logits() == reduced.get_all_logits()).all()
    assert plain.get_top_logits(TOP_COUNT) is None


def test_a_decode_of_few_rows_finds_none(open_context) -> None:
    context = open_context("attention", sequences=8)
    context.enable_top_logits()
    decode_rows(context, range(8), 0)
    decode_rows(context, range(MIN_ROWS - 1), 1)
    assert context.get_top_logits(TOP_COUNT) is None


def test_a_decode_with_a_prompt_finds_none(open_context) -> None:
    context = open_context("attention", sequences=8)
    context.enable_top_logits()
    decode_rows(context, range(6), 0)
    context.batch.clear()
    for sequence in range(5):
        context.batch.add_row(3, position=1, sequence=sequence, output=True)
    context.batch.add(random_tokens(30), position=0, sequence=7, outputs=1)
    context.decode()
    assert len(context.get_all_logits()) == 6
    assert context.get_top_logits(1) is None
    decode_rows(context, range(5), 2)
    assert context.get_top_logits(1).tokens.shape == (5, 1)  # what the first token after the prompt needed


def test_a_decode_of_several_ubatches_finds_none(open_context) -> None:
    context = open_context("attention", sequences=12)
    context.enable_top_logits()
    decode_rows(context, range(12), 0)
    context.batch.clear()
    for sequence in (0, 1, 2, 3, 6, 7, 8, 9):  # llama.cpp computes neighbours together, and these are no neighbours
        context.batch.add_row(5, position=1, sequence=sequence, output=True)
    context.decode()
    assert context.get_top_logits(TOP_COUNT) is None


def test_rows_in_another_order_are_noticed(open_context) -> None:
    context = open_context("attention", sequences=6)
    context.enable_top_logits()
    decode_rows(context, range(6), 0)
    top, logits = context._top_logits.read(6), context.get_all_logits()
    assert not context._top_logits.verify(top, logits[::-1])
    assert context.get_top_logits(TOP_COUNT) is None, "each graph is checked once"
    decode_rows(context, range(5), 1)
    assert context.get_top_logits(TOP_COUNT) is not None, "another number of rows is another graph"


def test_the_operations_are_added_once_to_a_graph(open_context, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp asks for the operations of a sampler once for each output that a sequence may have."""
    context = open_context("attention", sequences=6, outputs=64)
    context.enable_top_logits()
    symbols, added = context._library.symbols, []
    top_k = symbols.ggml_top_k
    monkeypatch.setattr(symbols, "ggml_top_k", lambda *arguments: added.append(None) or top_k(*arguments))
    for position in range(4):
        decode_rows(context, range(6), position)
    reserved = len(added) - 1
    decode_rows(context, range(5), 4)
    assert reserved in (2, 3)  # graphs for which llama.cpp reserves memory
    assert len(added) == reserved + 2


def test_a_closed_context_releases_its_callbacks(open_context) -> None:
    context = open_context("attention", sequences=6)
    context.enable_top_logits()
    reducer = context._top_logits
    assert isinstance(reducer, TopLogitsReducer)
    decode_rows(context, range(6), 0)
    context.close()
    assert reducer.closed
