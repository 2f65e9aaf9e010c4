"""C11: the KV operations, in streams and unified, on every kind of memory."""

from __future__ import annotations

import pytest

from afterglow.errors import InvalidArgument, UnsupportedOperation
from afterglow.llama.kv_memory import KVMemory
from support.contexts import CLOSE, LAYOUTS, MEMORIES, distance, feed, tokens

BEYOND = 2**31


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", MEMORIES)
def test_c11_a_copied_sequence_continues_exactly_like_its_source(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified)
    feed(context, 0, tokens(100))
    context.memory.copy(0, 1)
    assert context.memory.get_position_range(1)[1] == context.memory.get_position_range(0)[1] == 99
    assert distance(feed(context, 0, [42], 100), feed(context, 1, [42], 100)) == 0.0


@pytest.mark.parametrize("kind", MEMORIES)
def test_c11_a_copy_between_streams_can_be_saved_before_any_decode(open_context, kind):
    """llama.cpp's own copy waits for the next decode and a save before it is silently wrong."""
    context = open_context(kind)
    feed(context, 0, tokens(60))
    context.memory.copy(0, 1)
    saved = context.state.save(1)
    feed(context, 0, tokens(10, seed=1), 60)  # the source moves on
    context.memory.remove(0)
    context.state.load(0, saved)
    assert distance(feed(context, 0, [42], 60), feed(context, 1, [42], 60)) == 0.0


@pytest.mark.parametrize("unified", LAYOUTS)
def test_c11_a_range_of_attention_can_be_copied(open_context, unified):
    context = open_context("attention", kv_unified=unified)
    feed(context, 0, tokens(100))
    context.memory.copy(0, 1, start=0, stop=40)
    assert context.memory.get_position_range(1) == (0, 39)
    expected = open_context("attention", kv_unified=unified)
    feed(expected, 0, tokens(40))
    assert distance(feed(context, 1, [42], 40), feed(expected, 0, [42], 40)) < CLOSE


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_c11_a_range_of_a_recurrent_state_is_refused(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified)
    feed(context, 0, tokens(50))
    with pytest.raises(UnsupportedOperation, match="newest state"):
        context.memory.copy(0, 1, stop=20)
    assert context.memory.get_position_range(1) is None


@pytest.mark.parametrize("unified", LAYOUTS)
def test_c11_a_range_whose_window_has_passed_is_refused(open_context, unified):
    context = open_context("window", kv_unified=unified, cells=4096, ubatch=32, batch=32)
    feed(context, 0, tokens(1200))
    assert context.memory.get_position_range(0)[0] > 500
    with pytest.raises(UnsupportedOperation, match="window"):
        context.memory.copy(0, 1, stop=400)


def test_c11_a_copy_never_mixes_two_pasts(open_context):
    context = open_context("attention", kv_unified=True)
    feed(context, 0, tokens(30))
    feed(context, 1, tokens(10, seed=5))
    with pytest.raises(InvalidArgument, match="already holds"):
        context.memory.copy(0, 1)


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", MEMORIES)
def test_c11_a_whole_sequence_can_always_be_removed(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified)
    feed(context, 0, tokens(30))
    feed(context, 1, tokens(20))
    assert context.memory.remove(0) is True
    assert context.memory.get_position_range(0) is None
    assert context.memory.get_position_range(1)[1] == 19


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_c11_a_partial_removal_is_false_where_memory_cannot_and_changes_nothing(open_context, kind):
    context = open_context(kind)
    feed(context, 0, tokens(30))
    before = context.state.save(0).data.tobytes()
    assert context.memory.remove(0, start=20) is False
    assert context.memory.remove(0, start=5, stop=10) is False
    assert context.state.save(0).data.tobytes() == before


@pytest.mark.parametrize("unified", LAYOUTS)
def test_c11_removing_a_tail_of_attention_equals_never_having_seen_it(open_context, unified):
    context = open_context("attention", kv_unified=unified)
    feed(context, 0, tokens(40))
    fresh = feed(context, 0, [42], 40)
    assert context.memory.remove(0, start=40) is True
    feed(context, 0, tokens(20, seed=3), 40)
    assert context.memory.remove(0, start=40) is True
    assert distance(feed(context, 0, [42], 40), fresh) == 0.0


def test_c11_a_window_that_has_passed_cannot_be_trimmed_back(open_context):
    """llama.cpp says yes and computes garbage."""
    context = open_context("window", cells=2048, sequences=1, ubatch=32, batch=32)
    feed(context, 0, tokens(700))
    first, last = context.memory.get_position_range(0)
    assert first > 300
    assert context.memory.can_resume(0, last + 1)
    assert context.memory.can_resume(0, first + 32)
    assert not context.memory.can_resume(0, first + 31)
    assert context.memory.remove(0, start=112) is False
    assert context.memory.get_position_range(0) == (first, last)


@pytest.mark.parametrize(("rows", "back", "possible"), [(4, 3, True), (4, 4, False), (1, 1, False), (8, 4, False)])
def test_c11_a_hybrid_rolls_back_less_than_its_last_decode_and_no_more_than_its_snapshots(
    open_context, rows, back, possible
):
    """llama.cpp says yes up to `rollback` whatever the last decode was, and is silently wrong."""
    context = open_context("hybrid", recurrent_snapshots=3)
    assert context.max_rollback == 3
    feed(context, 0, tokens(20))
    feed(context, 0, tokens(rows, seed=2), 20)
    end = 20 + rows
    assert context.memory.can_resume(0, end - back) is possible
    assert context.memory.remove(0, start=end - back) is possible
    if possible:
        expected = open_context("hybrid")
        feed(expected, 0, tokens(20))
        kept = tokens(rows, seed=2)[: rows - back]
        again = feed(expected, 0, [*kept, 42], 20)
        assert distance(feed(context, 0, [42], end - back), again) < CLOSE


def test_c11_a_hybrid_rolls_back_once_per_decode(open_context):
    context = open_context("hybrid", recurrent_snapshots=3)
    feed(context, 0, tokens(20))
    assert context.memory.remove(0, start=19) is True
    assert context.memory.can_resume(0, 18) is False
    assert context.memory.remove(0, start=18) is False


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", MEMORIES)
def test_c11_keep_removes_every_other_sequence(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified, sequences=4)
    for sequence in range(4):
        feed(context, sequence, tokens(10 + sequence))
    context.memory.keep_only(2)
    assert [context.memory.get_position_range(one) is None for one in range(4)] == [True, True, False, True]


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("data", [False, True])
def test_c11_clear_empties_everything(open_context, kind, data):
    context = open_context(kind)
    fresh = feed(context, 0, tokens(30))
    context.memory.clear(data=data)
    assert context.memory.get_position_range(0) is None
    assert distance(feed(context, 0, tokens(30)), fresh) == 0.0


def test_c11_a_shifted_sequence_has_new_positions_and_computes_on(open_context):
    context = open_context("attention", kv_unified=True)
    feed(context, 0, tokens(40))
    assert context.memory.remove(0, start=10, stop=20) is True
    context.memory.shift(0, -10, start=20)
    assert context.memory.get_position_range(0) == (0, 29)
    shifted = feed(context, 0, [42], 30)
    assert distance(shifted, feed(open_context("attention"), 0, [*tokens(40)[:10], *tokens(40)[20:], 42])) < 2.0
    assert context.memory.get_position_range(0) == (0, 30)


def test_c11_a_shift_that_waits_for_a_decode_cannot_be_saved(open_context):
    context = open_context("attention")
    feed(context, 0, tokens(20))
    context.memory.shift(0, 5)
    with pytest.raises(UnsupportedOperation, match="wait for the next decode"):
        context.state.save(0)
    with pytest.raises(UnsupportedOperation, match="wait for the next decode"):
        context.memory.copy(0, 1)
    feed(context, 0, [42], 25)
    assert context.state.save(0).positions == (5, 25)


def test_c11_divide_compresses_positions(open_context):
    context = open_context("attention", kv_unified=True)
    feed(context, 0, tokens(40))
    context.memory.divide(0, 2)
    assert context.memory.get_position_range(0) == (0, 19)


@pytest.mark.parametrize("divisor", [0, 256, -1])
def test_c11_a_divisor_is_1_to_255(open_context, divisor):
    context = open_context("attention")
    feed(context, 0, tokens(10))
    with pytest.raises(InvalidArgument, match="divisor"):
        context.memory.divide(0, divisor)


@pytest.mark.parametrize("operation", ["shift", "divide"])
@pytest.mark.parametrize(("kind", "settings"), [("hybrid", {}), ("window", {"cells": 4096, "ubatch": 32})])
def test_c11_positions_that_cannot_move_are_refused(open_context, operation, kind, settings):
    context = open_context(kind, **settings)
    feed(context, 0, tokens(10))
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
def test_c11_a_number_beyond_32_bits_is_refused_by_name_and_nothing_changes(open_context, name):
    context = open_context("attention")
    feed(context, 0, tokens(10))
    before = context.state.save(0).data.tobytes()
    with pytest.raises(InvalidArgument) as caught:
        ARGUMENTS[name](context.memory)
    assert caught.value.name == name
    assert context.state.save(0).data.tobytes() == before


def test_c11_every_operation_is_a_method():
    for name in ("copy", "remove", "clear", "keep", "shift", "divide", "positions", "can_shift", "resumable"):
        assert hasattr(KVMemory, name)
