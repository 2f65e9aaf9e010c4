"""C17: the cells of a saved sequence can be cut and joined anywhere, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from afterglow.errors import InvalidState
from afterglow.llama import kv_layout
from afterglow.llama.context import LlamaContext
from afterglow.llama.kv_layout import KVLayout

CONTEXTS = [{}, {"unified": True}, {"flash_attention": False}, {"key_type": "f32"}, {"sequences": 1}]
every_context = pytest.mark.parametrize("settings", CONTEXTS, ids=str)
every_kind = pytest.mark.parametrize("kind", ["attention", "window", "hybrid"])


def fill(context: LlamaContext, sequence: int, start: int, count: int) -> None:
    context.batch.clear()
    tokens = np.arange(20 + start, 20 + start + count, dtype=np.int32) % 200 + 20
    context.batch.add(tokens, position=start, sequence=sequence, outputs=1)
    context.decode()


def parts(context: LlamaContext, kind: str, sequence: int) -> tuple[np.ndarray, np.ndarray | None]:
    full = context.state.save(sequence).data
    return full, None if kind == "attention" else context.state.save(sequence, "partial").data


@every_context
@every_kind
def test_joined_pieces_are_the_whole(open_context, kind, settings):
    context = open_context(kind, **settings)
    fill(context, 0, 0, 100)
    full, partial = parts(context, kind, 0)
    cells = kv_layout.parse_cells(full, 0 if partial is None else len(partial) - kv_layout.HEADER_BYTES)
    assert cells is not None
    assert len(cells) == 100
    pieces = [cells.copy_rows(start, stop) for start, stop in ((0, 30), (30, 31), (31, 100))]
    assert np.array_equal(kv_layout.join_cells(KVLayout.unpack(cells.layout), pieces, partial), full)


@every_kind
def test_cells_that_lie_in_disorder_are_read_in_order(open_context, kind):
    """Unified: another sequence had the first cells, and gave them back."""
    context = open_context(kind, kv_unified=True, cells=256)
    fill(context, 1, 0, 60)
    fill(context, 0, 0, 100)
    context.memory.remove(1)
    fill(context, 0, 100, 120)
    full, partial = parts(context, kind, 0)
    cells = kv_layout.parse_cells(full, 0 if partial is None else len(partial) - kv_layout.HEADER_BYTES)
    assert cells is not None
    positions = cells.copy_rows(0, len(cells))[:, :4].copy().view("<i4")[:, 0]
    assert positions.tolist() == list(range(220))


@every_kind
def test_what_is_not_a_state_of_cells_is_not_cut(open_context, kind):
    context = open_context(kind)
    fill(context, 0, 0, 100)
    full, partial = parts(context, kind, 0)
    rest = 0 if partial is None else len(partial) - kv_layout.HEADER_BYTES
    for data in (full[:-1], full[:50], np.zeros(0, dtype=np.uint8), np.concatenate([full, full[:8]])):
        assert kv_layout.parse_cells(data, rest) is None
    assert kv_layout.parse_cells(full, rest + 1) is None
    random = np.random.default_rng(1)
    for _ in range(300):  # damaged anywhere in the heads, it is cut or not, and nothing else happens
        damaged = full.copy()
        damaged[random.integers(8, 40)] ^= np.uint8(random.integers(1, 255))
        kv_layout.parse_cells(damaged, rest)


def test_a_recurrent_state_has_no_cells(open_context):
    context = open_context("recurrent")
    fill(context, 0, 0, 100)
    assert kv_layout.parse_cells(context.state.save(0).data, 0) is None


@pytest.mark.parametrize("damage", [b"", b"x" * 7, b"\xff" * 200, bytes(28), bytes(28 + 16)])
def test_a_bad_layout_is_refused(damage):
    with pytest.raises(InvalidState):
        KVLayout.unpack(damage)


def test_cells_of_another_width_are_refused():
    narrow = KVLayout(1, 12, 0, b"", ((1, 32, 1, 32),))
    for blocks in ([], [np.zeros((4, 75), dtype=np.uint8)], [np.zeros(76, dtype=np.uint8)]):
        with pytest.raises(InvalidState):
            kv_layout.join_cells(narrow, blocks, None)
