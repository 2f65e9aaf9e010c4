"""C17: the cells of a saved sequence can be split and joined anywhere, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.errors import InvalidState
from afterglow.llama import kv_layout
from afterglow.llama.context import LlamaContext
from afterglow.llama.kv_layout import KVLayout

CONTEXTS = [{}, {"kv_unified": True}, {"flash_attention": False}, {"cache_type_k": "f32"}, {"sequences": 1}]
each_context = pytest.mark.parametrize("settings", CONTEXTS, ids=str)
each_kind = pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])


def decode_range(context: LlamaContext, sequence: int, start: int, count: int) -> None:
    context.batch.clear()
    tokens = np.arange(20 + start, 20 + start + count, dtype=np.int32) % 200 + 20
    context.batch.add(tokens, position=start, sequence=sequence, outputs=1)
    context.decode()


def save_states(context: LlamaContext, kind: str, sequence: int) -> tuple[np.ndarray, np.ndarray | None]:
    full = context.state.save(sequence).data
    return full, None if kind == "attention" else context.state.save(sequence, "partial").data


@pytest.mark.native
@each_context
@each_kind
def test_joined_cells_equal_the_saved_state(open_context, kind, settings):
    context = open_context(kind, **settings)
    decode_range(context, 0, 0, 100)
    full, partial = save_states(context, kind, 0)
    cells = kv_layout.parse_cells(full, 0 if partial is None else len(partial) - kv_layout.HEADER_BYTES)
    assert cells is not None
    assert len(cells) == 100
    blocks = [cells.copy_rows(start, stop) for start, stop in ((0, 30), (30, 31), (31, 100))]
    assert np.array_equal(kv_layout.join_cells(KVLayout.unpack(cells.layout), blocks, partial), full)


@pytest.mark.native
@each_kind
def test_cells_stored_out_of_order_are_read_in_order(open_context, kind):
    """Unified: another sequence used the first cells and was removed."""
    context = open_context(kind, kv_unified=True, cells=256)
    decode_range(context, 1, 0, 60)
    decode_range(context, 0, 0, 100)
    context.memory.remove(1)
    decode_range(context, 0, 100, 120)
    full, partial = save_states(context, kind, 0)
    cells = kv_layout.parse_cells(full, 0 if partial is None else len(partial) - kv_layout.HEADER_BYTES)
    assert cells is not None
    positions = cells.copy_rows(0, len(cells))[:, :4].copy().view("<i4")[:, 0]
    assert positions.tolist() == list(range(220))


@pytest.mark.native
@each_kind
def test_data_that_is_not_a_state_is_not_parsed(open_context, kind):
    context = open_context(kind)
    decode_range(context, 0, 0, 100)
    full, partial = save_states(context, kind, 0)
    partial_bytes = 0 if partial is None else len(partial) - kv_layout.HEADER_BYTES
    for data in (full[:-1], full[:50], np.zeros(0, dtype=np.uint8), np.concatenate([full, full[:8]])):
        assert kv_layout.parse_cells(data, partial_bytes) is None
    assert kv_layout.parse_cells(full, partial_bytes + 1) is None
    random = np.random.default_rng(1)
    for _ in range(300):  # damage anywhere in the headers must not raise
        damaged = full.copy()
        damaged[random.integers(8, 40)] ^= np.uint8(random.integers(1, 255))
        kv_layout.parse_cells(damaged, partial_bytes)


@pytest.mark.native
def test_a_recurrent_state_has_no_cells(open_context):
    context = open_context("recurrent")
    decode_range(context, 0, 0, 100)
    assert kv_layout.parse_cells(context.state.save(0).data, 0) is None


@pytest.mark.parametrize("damage", [b"", b"x" * 7, b"\xff" * 200, bytes(28), bytes(28 + 16)])
def test_an_invalid_layout_is_rejected(damage):
    with pytest.raises(InvalidState):
        KVLayout.unpack(damage)


def test_cells_of_the_wrong_size_are_rejected():
    narrow = KVLayout(1, 12, 0, b"", ((1, 32, 1, 32),))
    for blocks in ([], [np.zeros((4, 75), dtype=np.uint8)], [np.zeros(76, dtype=np.uint8)]):
        with pytest.raises(InvalidState):
            kv_layout.join_cells(narrow, blocks, None)
