"""C17: save, restore and clear the state of a sequence, whole and partial, to bytes and to files."""

from __future__ import annotations

import pytest

from afterglow.errors import InvalidState, KVCacheFull, UnsupportedOperation
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.state import SavedState
from afterglow.testing import models
from support.contexts import LAYOUTS, MEMORIES, distance, feed, tokens


@pytest.mark.parametrize("unified", LAYOUTS)
@pytest.mark.parametrize("kind", MEMORIES)
def test_c17_a_restored_sequence_continues_exactly(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified)
    feed(context, 0, tokens(80))
    sealed = context.state.save(0).to_bytes()
    expected = feed(context, 0, [42], 80)
    context.memory.clear()
    context.state.load(0, SavedState.from_bytes(sealed))
    assert context.memory.get_position_range(0)[1] == 79
    assert distance(feed(context, 0, [42], 80), expected) == 0.0


@pytest.mark.parametrize("kind", MEMORIES)
def test_c17_a_state_moves_to_another_context_of_the_same_model(open_model, open_context, kind):
    model = open_model(kind)
    one, other = open_context(model), open_context(model, cells=4096)
    feed(one, 1, tokens(80))
    other.state.load(0, one.state.save(1))
    assert distance(feed(other, 0, [42], 80), feed(one, 1, [42], 80)) == 0.0


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_c17_a_partial_state_brings_a_recurrent_memory_back(open_context, kind):
    context = open_context(kind)
    feed(context, 0, tokens(60))
    partial = context.state.save(0, "partial")
    assert partial.nbytes <= context.state.save(0).nbytes
    expected = feed(context, 0, [42], 60)
    feed(context, 0, tokens(20, seed=9), 61)
    context.state.load(0, partial)
    assert context.memory.get_position_range(0)[1] == 59
    assert distance(feed(context, 0, [42], 60), expected) == 0.0


def test_c17_a_partial_state_brings_a_passed_window_back(open_context):
    context = open_context("window", cells=2048, sequences=1, ubatch=32, batch=32)
    feed(context, 0, tokens(100))
    partial = context.state.save(0, "partial")
    expected = feed(context, 0, [42], 100)
    feed(context, 0, tokens(700, seed=9), 101)
    assert not context.memory.can_resume(0, 100)
    context.state.load(0, partial)
    assert context.memory.get_position_range(0)[1] == 99
    assert context.memory.can_resume(0, 100)
    assert distance(feed(context, 0, [42], 100), expected) == 0.0


def test_c17_full_attention_has_no_partial_state(open_context):
    context = open_context("attention")
    feed(context, 0, tokens(10))
    with pytest.raises(UnsupportedOperation, match="partial"):
        context.state.save(0, "partial")


@pytest.mark.parametrize("damage", ["truncate", "extend", "flip", "foreign magic", "empty"])
def test_c17_a_damaged_state_is_refused_and_nothing_changes(open_context, damage):
    context = open_context("hybrid")
    feed(context, 0, tokens(30))
    before = context.state.save(0)
    sealed = bytearray(before.to_bytes())
    match damage:
        case "truncate":
            sealed = sealed[:-7]
        case "extend":
            sealed += b"x"
        case "flip":
            sealed[len(sealed) // 2] ^= 4
        case "foreign magic":
            sealed[:4] = b"GGUF"
        case "empty":
            sealed.clear()
    with pytest.raises(InvalidState):
        context.state.load(0, SavedState.from_bytes(bytes(sealed)))
    assert context.state.save(0).data.tobytes() == before.data.tobytes()


@pytest.mark.parametrize(
    "other",
    [
        {"key_type": "f32"},
        {"value_type": "f32"},
        {"unified": True},
        {"sequences": 3},
        {"rope_base": 5e5},
        {"flash_attention": False},
    ],
    ids=str,
)
def test_c17_a_state_of_another_kind_of_context_is_refused(open_model, open_context, other):
    model = open_model("attention")
    one, two = open_context(model), open_context(model, **other)
    feed(one, 0, tokens(20))
    feed(two, 0, tokens(5))
    with pytest.raises(InvalidState, match="another"):
        two.state.load(0, one.state.save(0))
    assert two.memory.positions(0) == (0, 4)


def test_c17_a_state_of_another_model_is_refused(open_context):
    one, two = open_context("attention"), open_context("successor-attention")  # the same shapes, other weights
    feed(one, 0, tokens(20))
    with pytest.raises(InvalidState, match="another model"):
        two.state.load(0, one.state.save(0))


def test_c17_a_state_computed_with_another_adapter_is_refused(open_model, open_context):
    """Trap 4: a key that forgets what shaped the numbers."""
    model = open_model("attention")
    context = open_context(model)
    feed(context, 0, tokens(20))
    plain = context.state.save(0)
    adapter = LoraAdapter.load(model, models.get_path("adapter"))
    context.set_adapters({adapter: 1.0})
    with pytest.raises(InvalidState, match="adapter"):
        context.state.load(0, plain)
    context.set_adapters({})
    context.state.load(0, plain)


def test_c17_a_state_that_cannot_fit_is_refused_before_anything_is_lost(open_model, open_context):
    model = open_model("attention")
    large, small = open_context(model, cells=4096, sequences=1), open_context(model, cells=256, sequences=1)
    feed(large, 0, tokens(600))
    feed(small, 0, tokens(10))
    with pytest.raises(KVCacheFull) as caught:
        small.state.load(0, large.state.save(0))
    assert (caught.value.rows, caught.value.cells) == (600, 256)
    assert small.memory.positions(0) == (0, 9)


@pytest.mark.parametrize("kind", MEMORIES)
def test_c17_all_sequences_go_to_a_file_and_come_back(open_model, open_context, tmp_path, kind):
    model = open_model(kind)
    context = open_context(model, sequences=3)
    feed(context, 0, tokens(40))
    feed(context, 2, tokens(25, seed=1))
    context.state.save_file(tmp_path / "all.state")
    expected = [feed(context, 0, [42], 40), feed(context, 2, [42], 25)]
    other = open_context(model, sequences=3)
    feed(other, 1, tokens(9))  # what was empty in the file is empty after the load
    assert other.state.load_file(tmp_path / "all.state") == [0, 1, 2]
    assert other.memory.get_position_range(1) is None
    assert distance(feed(other, 0, [42], 40), expected[0]) == 0.0
    assert distance(feed(other, 2, [42], 25), expected[1]) == 0.0


def test_c17_one_sequence_goes_to_a_file_and_into_another_sequence(open_context, tmp_path):
    context = open_context("hybrid")
    feed(context, 0, tokens(40))
    context.state.save_file(tmp_path / "one.state", 0)
    assert context.state.load_file(tmp_path / "one.state", 1) == [1]
    assert distance(feed(context, 0, [42], 40), feed(context, 1, [42], 40)) == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["one.state"]


@pytest.mark.parametrize("cut", [1, 11, 40, 200])
def test_c17_a_truncated_file_is_refused_whole(open_context, tmp_path, cut):
    context = open_context("attention")
    feed(context, 0, tokens(40))
    feed(context, 1, tokens(10))
    path = tmp_path / "cut.state"
    context.state.save_file(path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InvalidState):
        context.state.load_file(path)
    assert context.memory.get_position_range(0) == (0, 39)


def test_c17_an_empty_sequence_can_be_saved_and_loaded(open_context):
    context = open_context("attention")
    feed(context, 1, tokens(10))
    context.state.load(1, SavedState.from_bytes(context.state.save(0).to_bytes()))
    assert context.memory.get_position_range(1) is None
