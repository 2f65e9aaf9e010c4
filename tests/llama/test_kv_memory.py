"""C11: KV memory operations, with streams and unified, on every memory kind."""

from __future__ import annotations

import pytest

from afterglow.errors import Cancelled, InvalidArgument, UnsupportedOperation
from afterglow.llama.kv_memory import KVMemory
from support.contexts import KV_LAYOUTS, LOGIT_TOLERANCE, MEMORY_KINDS, decode_tokens, max_difference, random_tokens
from support.llama_engines import EXACT, abort_decodes

pytestmark = pytest.mark.native

BEYOND = 2**31


@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c11_a_copied_sequence_continues_exactly_like_its_source(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified)
    decode_tokens(context, 0, random_tokens(100))
    context.memory.copy(0, 1)
    assert context.memory.get_position_range(1)[1] == context.memory.get_position_range(0)[1] == 99
    assert max_difference(decode_tokens(context, 0, [42], 100), decode_tokens(context, 1, [42], 100)) == 0.0


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c11_a_copy_between_streams_can_be_saved_before_any_decode(open_context, kind):
    """llama.cpp's own copy is deferred to the next decode, and a save before it is silently wrong."""
    context = open_context(kind)
    decode_tokens(context, 0, random_tokens(60))
    context.memory.copy(0, 1)
    saved = context.state.save(1)
    decode_tokens(context, 0, random_tokens(10, seed=1), 60)  # the source continues
    context.memory.remove(0)
    context.state.load(0, saved)
    assert max_difference(decode_tokens(context, 0, [42], 60), decode_tokens(context, 1, [42], 60)) == 0.0


@pytest.mark.parametrize("kind", ["attention", "window"])
@pytest.mark.parametrize("use", ["decode", "save", "load into the source", "load into the target"])
def test_a_copy_on_the_device_equals_a_copy_of_the_state(open_context, kind, use):
    """llama.cpp applies it at the next decode; what reads or replaces the bytes before that applies it first."""
    context = open_context(kind, sequences=4)
    decode_tokens(context, 0, random_tokens(60))
    decode_tokens(context, 2, random_tokens(30, seed=2))
    other = context.state.save(2)
    expected = decode_tokens(context, 0, [42], 60)
    context.memory.remove(0, start=60)
    context.memory.copies_on_device = True
    assert context.memory.copy(0, 1) == 0
    match use:
        case "save":
            saved = context.state.save(1)
            context.memory.remove(1)
            context.state.load(1, saved)
        case "load into the source":
            context.memory.remove(0)
            context.state.load(0, other)
        case "load into the target":
            context.memory.remove(1)
            context.state.load(1, other)
            assert max_difference(decode_tokens(context, 1, [42], 30), decode_tokens(context, 2, [42], 30)) == 0.0
            return
    assert context.memory.get_position_range(1)[1] == 59
    assert max_difference(decode_tokens(context, 1, [42], 60), expected) == 0.0
    assert context.memory.get_position_range(3) is None, "the row that applied the copy is removed"


def test_copies_on_the_device_apply_in_a_full_context(open_context):
    context = open_context("attention", sequences=2, cells=512)
    decode_tokens(context, 0, random_tokens(context.cells_per_sequence))
    original = context.state.save(0)
    context.memory.copies_on_device = True
    context.memory.copy(0, 1)
    copied = context.state.save(1)
    context.memory.remove(0)
    context.state.load(0, copied)
    assert bytes(context.state.save(0).data) == bytes(original.data)


@pytest.mark.parametrize("unified", KV_LAYOUTS)
def test_c11_a_range_of_attention_can_be_copied(open_context, unified):
    context = open_context("attention", kv_unified=unified)
    decode_tokens(context, 0, random_tokens(100))
    context.memory.copy(0, 1, start=0, stop=40)
    assert context.memory.get_position_range(1) == (0, 39)
    expected = open_context("attention", kv_unified=unified)
    decode_tokens(expected, 0, random_tokens(40))
    assert max_difference(decode_tokens(context, 1, [42], 40), decode_tokens(expected, 0, [42], 40)) < LOGIT_TOLERANCE


@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_c11_copying_a_range_of_a_recurrent_state_is_rejected(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified)
    decode_tokens(context, 0, random_tokens(50))
    with pytest.raises(UnsupportedOperation, match="newest state"):
        context.memory.copy(0, 1, stop=20)
    assert context.memory.get_position_range(1) is None


@pytest.mark.parametrize("unified", KV_LAYOUTS)
def test_c11_copying_a_range_before_the_window_is_rejected(open_context, unified):
    context = open_context("window", kv_unified=unified, cells=4096, ubatch=32, batch=32)
    decode_tokens(context, 0, random_tokens(1200))
    assert context.memory.get_position_range(0)[0] > 500
    with pytest.raises(UnsupportedOperation, match="window"):
        context.memory.copy(0, 1, stop=400)


def test_c11_a_copy_to_a_non_empty_sequence_is_rejected(open_context):
    context = open_context("attention", kv_unified=True)
    decode_tokens(context, 0, random_tokens(30))
    decode_tokens(context, 1, random_tokens(10, seed=5))
    with pytest.raises(InvalidArgument, match="already has positions"):
        context.memory.copy(0, 1)


@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c11_a_whole_sequence_can_always_be_removed(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified)
    decode_tokens(context, 0, random_tokens(30))
    decode_tokens(context, 1, random_tokens(20))
    assert context.memory.remove(0) is True
    assert context.memory.get_position_range(0) is None
    assert context.memory.get_position_range(1)[1] == 19


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_c11_an_unsupported_partial_removal_returns_false_and_changes_nothing(open_context, kind):
    context = open_context(kind)
    decode_tokens(context, 0, random_tokens(30))
    before = context.state.save(0).data.tobytes()
    assert context.memory.remove(0, start=20) is False
    assert context.memory.remove(0, start=5, stop=10) is False
    assert context.state.save(0).data.tobytes() == before


@pytest.mark.parametrize("unified", KV_LAYOUTS)
def test_c11_removing_the_tail_of_attention_leaves_no_trace(open_context, unified):
    context = open_context("attention", kv_unified=unified)
    decode_tokens(context, 0, random_tokens(40))
    fresh = decode_tokens(context, 0, [42], 40)
    assert context.memory.remove(0, start=40) is True
    decode_tokens(context, 0, random_tokens(20, seed=3), 40)
    assert context.memory.remove(0, start=40) is True
    assert max_difference(decode_tokens(context, 0, [42], 40), fresh) == 0.0


def test_c11_a_window_cannot_be_truncated_to_a_position_before_it(open_context):
    """llama.cpp allows it and computes wrong results."""
    context = open_context("window", cells=2048, sequences=1, ubatch=32, batch=32)
    decode_tokens(context, 0, random_tokens(700))
    first, last = context.memory.get_position_range(0)
    assert first > 300
    assert context.memory.can_resume(0, last + 1)
    assert context.memory.can_resume(0, first + 31)
    assert not context.memory.can_resume(0, first + 30)
    assert context.memory.remove(0, start=112) is False
    assert context.memory.get_position_range(0) == (first, last)
    assert context.memory.remove(0, start=first + 31) is True
    fresh = open_context("window", cells=2048, sequences=1, ubatch=32, batch=32)
    decode_tokens(fresh, 0, random_tokens(700)[: first + 31])
    expected = decode_tokens(fresh, 0, [42], first + 31)
    assert max_difference(decode_tokens(context, 0, [42], first + 31), expected) < LOGIT_TOLERANCE


def test_c11_an_idle_window_can_be_resumed_after_others_recycled_its_cells(open_context):
    """If unified, other sequences take the cells that the next token does not see."""
    context = open_context("window", kv_unified=True, cells=512, sequences=2, ubatch=32, batch=32)
    decode_tokens(context, 0, random_tokens(200))
    decode_tokens(context, 1, random_tokens(250, seed=1))
    assert context.memory.can_resume(0, 200)
    fresh = open_context("window", kv_unified=True, cells=512, sequences=2, ubatch=32, batch=32)
    decode_tokens(fresh, 0, random_tokens(200))
    expected = decode_tokens(fresh, 0, [42], 200)
    assert max_difference(decode_tokens(context, 0, [42], 200), expected) < LOGIT_TOLERANCE


def test_c11_window_cells_that_a_decode_needs_are_not_recycled_by_its_last_rows(open_context):
    """llama.cpp removes cells for all ubatches of a decode before it computes the first, in unified memory."""
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
    context = open_context("window", kv_unified=True, cells=256, ubatch=16, batch=24, **exact)
    tokens, others = random_tokens(54), random_tokens(46, seed=1)
    decode_tokens(context, 1, tokens[:10])
    decode_tokens(context, 0, others[:23])
    decode_tokens(context, 1, tokens[10:20], 10)
    decode_tokens(context, 0, others[23:], 23)
    decode_tokens(context, 1, tokens[20:30], 20)
    context.memory.remove(0)
    decoded = decode_tokens(context, 1, tokens[30:], 30)
    assert context.memory.get_position_range(1)[0] > 0, "no cell was recycled"
    fresh = open_context("window", cells=256, sequences=1, ubatch=16, batch=16, **exact)
    assert max_difference(decoded, decode_tokens(fresh, 0, tokens)) < LOGIT_TOLERANCE


@pytest.mark.parametrize(("rows", "back", "possible"), [(4, 3, True), (4, 4, False), (1, 1, False), (8, 4, False)])
def test_c11_a_hybrid_rollback_is_limited_by_the_last_decode_and_the_snapshots(open_context, rows, back, possible):
    """llama.cpp allows up to `recurrent_snapshots` regardless of the last decode, and is silently wrong."""
    context = open_context("hybrid", recurrent_snapshots=3)
    assert context.max_rollback == 3
    decode_tokens(context, 0, random_tokens(20))
    decode_tokens(context, 0, random_tokens(rows, seed=2), 20)
    end = 20 + rows
    assert context.memory.can_resume(0, end - back) is possible
    assert context.memory.remove(0, start=end - back) is possible
    if possible:
        expected = open_context("hybrid")
        decode_tokens(expected, 0, random_tokens(20))
        remaining = random_tokens(rows, seed=2)[: rows - back]
        again = decode_tokens(expected, 0, [*remaining, 42], 20)
        assert max_difference(decode_tokens(context, 0, [42], end - back), again) < LOGIT_TOLERANCE


@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("rows", [5, 16], ids=["equal rows", "other rows"])
def test_c11_a_hybrid_rolls_back_beside_a_sequence_with(open_context, unified, rows):
    """llama.cpp loses the snapshots of sequences that have fewer rows than others."""
    context = open_context("hybrid", recurrent_snapshots=4, kv_unified=unified)
    tokens = random_tokens(30)
    decode_tokens(context, 1, tokens[:20])
    context.batch.clear()
    context.batch.add(random_tokens(rows, seed=1), position=0, sequence=0, outputs=1)
    context.batch.add(tokens[20:25], position=20, sequence=1, outputs=1)
    context.decode()
    is_possible = rows == 5
    assert context.memory.can_resume(1, 22) is is_possible
    assert context.memory.remove(1, start=22) is is_possible
    if is_possible:
        fresh = open_context("hybrid")
        expected = decode_tokens(fresh, 0, [*tokens[:22], 42])
        assert max_difference(decode_tokens(context, 1, [42], 22), expected) < LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("rows", "is_possible"), [({1: 5, 2: 4, 3: 4}, False), ({0: 4, 2: 4, 3: 4}, False), ({1: 5, 2: 5, 3: 5}, True)]
)
def test_c11_a_hybrid_rolls_back_only_after_a_decode_of_one_ubatch(open_context, rows, is_possible):
    """A later ubatch moves the states of earlier sequences, without their snapshots, so that it can be adjacent."""
    context = open_context("hybrid", sequences=4, recurrent_snapshots=4)
    tokens = {sequence: random_tokens(20 + sequence, seed=sequence) for sequence in (1, 3, 0, 2)}
    for sequence in tokens:  # the states are in this order
        decode_tokens(context, sequence, tokens[sequence])
    checked, drafts = min(rows), random_tokens(5, seed=9)
    context.batch.clear()
    for sequence, count in rows.items():
        context.batch.add(drafts[:count], position=20 + sequence, sequence=sequence, outputs=1)
    context.decode()
    assert context.memory.can_resume(checked, 21 + checked) is is_possible
    assert context.memory.remove(checked, start=21 + checked) is is_possible
    if is_possible:
        expected = decode_tokens(open_context("hybrid"), 0, [*tokens[checked], drafts[0], 42])
        assert max_difference(decode_tokens(context, checked, [42], 21 + checked), expected) < LOGIT_TOLERANCE


def test_c11_a_hybrid_rolls_back_once_per_decode(open_context):
    context = open_context("hybrid", recurrent_snapshots=3)
    decode_tokens(context, 0, random_tokens(20))
    assert context.memory.remove(0, start=19) is True
    assert context.memory.can_resume(0, 18) is False
    assert context.memory.remove(0, start=18) is False


@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c11_keep_only_removes_every_other_sequence(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified, sequences=4)
    for sequence in range(4):
        decode_tokens(context, sequence, random_tokens(10 + sequence))
    context.memory.keep_only(2)
    assert [context.memory.get_position_range(sequence) is None for sequence in range(4)] == [True, True, False, True]


@pytest.mark.parametrize("kind", MEMORY_KINDS)
@pytest.mark.parametrize("data", [False, True])
def test_c11_clear_empties_everything(open_context, kind, data):
    context = open_context(kind)
    fresh = decode_tokens(context, 0, random_tokens(30))
    context.memory.clear(data=data)
    assert context.memory.get_position_range(0) is None
    assert max_difference(decode_tokens(context, 0, random_tokens(30)), fresh) == 0.0


# The model `draft` has one layer, so the cells of a token do not depend on the tokens before it: after a removal and a
# shift they must be those of a sequence that was computed without the removed tokens.


@pytest.mark.parametrize("unified", KV_LAYOUTS)
def test_c11_a_shifted_sequence_continues_like_one_computed_without_the_removed_tokens(open_context, unified):
    context, tokens = open_context("draft", kv_unified=unified), random_tokens(40)
    unshifted = decode_tokens(open_context("draft"), 0, [*tokens, 42])
    decode_tokens(context, 0, tokens)
    assert context.memory.remove(0, start=10, stop=20) is True
    context.memory.shift(0, -10, start=20)
    assert context.memory.get_position_range(0) == (0, 29)
    shifted = decode_tokens(context, 0, [42], 30)
    assert context.memory.get_position_range(0) == (0, 30)
    expected = decode_tokens(open_context("draft"), 0, [*tokens[:10], *tokens[20:], 42])
    assert max_difference(shifted, expected) < LOGIT_TOLERANCE
    assert max_difference(shifted, unshifted) > 20 * LOGIT_TOLERANCE


def test_c11_a_shift_of_a_whole_sequence_changes_no_logits(open_context):
    """Positions are relative: only distances count."""
    context = open_context("attention")
    expected = decode_tokens(open_context("attention"), 0, [*random_tokens(40), 42])
    decode_tokens(context, 0, random_tokens(40))
    context.memory.shift(0, 100)
    assert context.memory.get_position_range(0) == (100, 139)
    assert max_difference(decode_tokens(context, 0, [42], 140), expected) < LOGIT_TOLERANCE


def test_c11_a_sequence_with_a_pending_shift_cannot_be_saved(open_context):
    context = open_context("attention")
    decode_tokens(context, 0, random_tokens(20))
    context.memory.shift(0, 5)
    with pytest.raises(UnsupportedOperation, match="decode first to apply the shift"):
        context.state.save(0)
    with pytest.raises(UnsupportedOperation, match="decode first to apply the shift"):
        context.memory.copy(0, 1)
    decode_tokens(context, 0, [42], 25)
    assert context.state.save(0).positions == (5, 25)


def test_c11_a_divided_sequence_continues_like_one_with_each_position_shifted(open_context):
    divided, shifted, plain = (open_context("attention", kv_unified=True) for _ in range(3))
    for context in (divided, shifted, plain):
        decode_tokens(context, 0, random_tokens(40))
    divided.memory.divide(0, 2)
    for position in range(1, 40):
        shifted.memory.shift(0, position // 2 - position, start=position, stop=position + 1)
    assert divided.memory.get_position_range(0) == shifted.memory.get_position_range(0) == (0, 19)
    logits = decode_tokens(divided, 0, [42], 20)
    assert max_difference(logits, decode_tokens(shifted, 0, [42], 20)) < LOGIT_TOLERANCE
    assert max_difference(logits, decode_tokens(plain, 0, [42], 40)) > 20 * LOGIT_TOLERANCE
    assert divided.memory.get_position_range(0) == (0, 20)


@pytest.mark.parametrize("divisor", [0, 256, -1])
def test_c11_a_divisor_is_1_to_255(open_context, divisor):
    context = open_context("attention")
    decode_tokens(context, 0, random_tokens(10))
    with pytest.raises(InvalidArgument, match="divisor"):
        context.memory.divide(0, divisor)


@pytest.mark.parametrize("operation", ["shift", "divide"])
@pytest.mark.parametrize(("kind", "settings"), [("hybrid", {}), ("window", {"cells": 4096, "ubatch": 32})])
def test_c11_an_unsupported_shift_is_rejected(open_context, operation, kind, settings):
    context = open_context(kind, **settings)
    decode_tokens(context, 0, random_tokens(10))
    assert context.memory.can_shift is False
    with pytest.raises(UnsupportedOperation):
        getattr(context.memory, operation)(0, 2)


def test_c11_an_encoder_has_no_memory_to_change(open_context):
    context = open_context("embedding", embeddings=True, outputs=64, cells=512, sequences=1)
    assert context.memory.kind == "none"
    assert context.memory.get_position_range(0) is None
    for attempt in (context.memory.clear, lambda: context.memory.shift(0, 1), lambda: context.state.save(0)):
        with pytest.raises(UnsupportedOperation):
            attempt()


def test_c11_positions_are_none_for_an_empty_or_unknown_sequence(open_context):
    context = open_context("attention")
    assert context.memory.get_position_range(0) is None
    assert context.memory.get_position_range(99) is None
    assert context.memory.get_position_range(-1) is None


ARGUMENTS = {
    "source": lambda memory: memory.copy(BEYOND, 0),
    "target": lambda memory: memory.copy(0, BEYOND),
    "start": lambda memory: memory.copy(0, 1, start=BEYOND),
    "stop": lambda memory: memory.remove(0, stop=BEYOND),
    "sequence": lambda memory: memory.keep_only(BEYOND),
    "delta": lambda memory: memory.shift(0, BEYOND),
    "divisor": lambda memory: memory.divide(0, BEYOND),
    "position": lambda memory: memory.can_resume(0, BEYOND),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_c11_a_number_beyond_32_bits_is_rejected_by_name_and_changes_nothing(open_context, name):
    context = open_context("attention")
    decode_tokens(context, 0, random_tokens(10))
    before = context.state.save(0).data.tobytes()
    with pytest.raises(InvalidArgument) as caught:
        ARGUMENTS[name](context.memory)
    assert caught.value.name == name
    assert context.state.save(0).data.tobytes() == before


def test_c11_every_operation_is_a_method():
    for name in (
        "copy",
        "remove",
        "clear",
        "keep_only",
        "shift",
        "divide",
        "get_position_range",
        "can_shift",
        "can_resume",
    ):
        assert hasattr(KVMemory, name)


# --- recurrent snapshots


SNAPSHOTS = 4


def decode_each(context, tokens: dict[int, list[int]], positions: dict[int, int]) -> None:
    """Decode the rows of several sequences in one batch."""
    context.batch.clear()
    for sequence, rows in tokens.items():
        context.batch.add(rows, position=positions[sequence], sequence=sequence, outputs=1)
    context.decode()


@pytest.mark.parametrize("unified", KV_LAYOUTS)
def test_a_copy_ends_the_rollback_of_both_sequences(open_context, unified):
    """If unified, llama.cpp shares the recurrent state, and refuses to roll a shared one back."""
    context = open_context("hybrid", kv_unified=unified, recurrent_snapshots=SNAPSHOTS)
    decode_tokens(context, 0, random_tokens(30))
    assert context.memory.can_resume(0, 28)
    context.memory.copy(0, 1)
    for sequence in (0, 1):
        if context.memory.can_resume(sequence, 28):
            assert context.memory.remove(sequence, start=28)
    assert not context.memory.can_resume(1, 28)
    ends = {sequence: context.memory.get_position_range(sequence)[1] + 1 for sequence in (0, 1)}
    decode_each(context, {0: random_tokens(4, seed=1), 1: random_tokens(4, seed=2)}, ends)
    for sequence in (0, 1):  # a decode gives each its own state and snapshots
        end = context.memory.get_position_range(sequence)[1] + 1
        assert context.memory.can_resume(sequence, end - 2)
        assert context.memory.remove(sequence, start=end - 2)


@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("how", ["copy", "save", "save partial"])
def test_a_rolled_back_sequence_is_copied_and_saved_with_its_own_state(open_context, unified, how):
    """llama.cpp's copy shares the newest state, not the one that the source was rolled back to."""
    context = open_context("hybrid", kv_unified=unified, recurrent_snapshots=SNAPSHOTS)
    decode_tokens(context, 0, random_tokens(30))
    decode_tokens(context, 0, random_tokens(4, seed=1), 30)
    assert context.memory.remove(0, start=31)
    if how == "copy":
        context.memory.copy(0, 1)
    elif how == "save":
        context.state.load(1, context.state.save(0))
    else:
        saved = context.state.save(0, "partial")
        decode_tokens(context, 0, random_tokens(4, seed=7), 31)
        context.memory.copy(0, 1)
        context.state.load(1, saved)
    fresh = open_context("hybrid", kv_unified=unified, recurrent_snapshots=SNAPSHOTS)
    decode_tokens(fresh, 0, random_tokens(30) + random_tokens(4, seed=1)[:1])
    expected = decode_tokens(fresh, 0, random_tokens(5, seed=2), 31)
    assert max_difference(decode_tokens(context, 1, random_tokens(5, seed=2), 31), expected) < LOGIT_TOLERANCE
    if how != "save partial":
        assert max_difference(decode_tokens(context, 0, random_tokens(5, seed=2), 31), expected) < LOGIT_TOLERANCE


@pytest.mark.parametrize("unified", KV_LAYOUTS)
def test_a_decode_of_other_sequences_ends_a_rollback(open_context, unified):
    """llama.cpp moves the states of idle sequences so that those of a batch are adjacent, without their snapshots."""
    context = open_context("hybrid", kv_unified=unified, sequences=4, recurrent_snapshots=SNAPSHOTS)
    for sequence in (0, 1, 2):
        decode_tokens(context, sequence, random_tokens(20, seed=sequence))
    decode_tokens(context, 1, random_tokens(4, seed=9), 20)
    decode_each(context, {0: [42], 2: [43]}, {0: 20, 2: 20})
    fresh = open_context("hybrid", kv_unified=unified, recurrent_snapshots=SNAPSHOTS)
    length = 22 if context.memory.can_resume(1, 22) else 24
    assert context.memory.remove(1, start=length)
    decode_tokens(fresh, 0, (random_tokens(20, seed=1) + random_tokens(4, seed=9))[:length])
    expected = decode_tokens(fresh, 0, random_tokens(5, seed=2), length)
    assert max_difference(decode_tokens(context, 1, random_tokens(5, seed=2), length), expected) < LOGIT_TOLERANCE


@pytest.mark.parametrize("unified", KV_LAYOUTS)
def test_a_rollback_survives_a_decode_of_other_sequences(open_context, unified):
    context = open_context("hybrid", kv_unified=unified, sequences=4, recurrent_snapshots=SNAPSHOTS)
    for sequence in (0, 1, 2):
        decode_tokens(context, sequence, random_tokens(20, seed=sequence))
    decode_tokens(context, 1, random_tokens(4, seed=9), 20)
    assert context.memory.remove(1, start=22)
    decode_each(context, {0: [42], 2: [43]}, {0: 20, 2: 20})
    fresh = open_context("hybrid", kv_unified=unified, recurrent_snapshots=SNAPSHOTS)
    decode_tokens(fresh, 0, random_tokens(20, seed=1) + random_tokens(4, seed=9)[:2])
    expected = decode_tokens(fresh, 0, random_tokens(5, seed=2), 22)
    assert max_difference(decode_tokens(context, 1, random_tokens(5, seed=2), 22), expected) < LOGIT_TOLERANCE


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_new_sequences_start_from_zero_after_an_aborted_decode(open_context, kind: str, kv_unified: bool) -> None:
    """llama.cpp marks empty cells between those of a decode as zeroed, even if the decode is aborted before that."""
    context, cold = (open_context(kind, sequences=4, kv_unified=kv_unified, **EXACT) for _ in range(2))
    for sequence in range(3):
        decode_tokens(context, sequence, random_tokens(12, seed=9 + sequence))
    context.memory.remove(1)
    context.batch.clear()
    for sequence in (0, 2):
        context.batch.add(random_tokens(3), position=12, sequence=sequence, outputs=1)
    with abort_decodes(context, 0), pytest.raises(Cancelled):
        context.decode()
    for sequence in range(3):
        context.memory.remove(sequence)
    context.batch.clear()
    for sequence in range(3):
        context.batch.add(random_tokens(10, seed=sequence), position=0, sequence=sequence, outputs=1)
    context.decode()
    for sequence in range(3):
        expected = decode_tokens(cold, sequence, random_tokens(10, seed=sequence))
        assert max_difference(context.get_logits(9 + 10 * sequence), expected) < 5e-3
