"""C17: save and restore the state of a sequence, full and partial, as bytes and as files."""

from __future__ import annotations

import pytest

from afterglow.errors import InvalidState, KVCacheFull, UnsupportedOperation
from afterglow.llama.lora import LoraAdapter
from afterglow.llama.state import SavedState
from afterglow.testing import models
from support.contexts import KV_LAYOUTS, MEMORY_KINDS, decode_tokens, max_difference, random_tokens

pytestmark = pytest.mark.native


@pytest.mark.parametrize("unified", KV_LAYOUTS)
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c17_a_restored_sequence_continues_exactly(open_context, kind, unified):
    context = open_context(kind, kv_unified=unified)
    decode_tokens(context, 0, random_tokens(80))
    data = context.state.save(0).to_bytes()
    expected = decode_tokens(context, 0, [42], 80)
    context.memory.clear()
    context.state.load(0, SavedState.from_bytes(data))
    assert context.memory.get_position_range(0)[1] == 79
    assert max_difference(decode_tokens(context, 0, [42], 80), expected) == 0.0


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c17_a_state_can_be_loaded_by_another_context_of_the_same_model(open_model, open_context, kind):
    model = open_model(kind)
    first, second = open_context(model), open_context(model, cells=4096)
    decode_tokens(first, 1, random_tokens(80))
    second.state.load(0, first.state.save(1))
    assert max_difference(decode_tokens(second, 0, [42], 80), decode_tokens(first, 1, [42], 80)) == 0.0


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_c17_a_partial_state_restores_a_recurrent_memory(open_context, kind):
    context = open_context(kind)
    decode_tokens(context, 0, random_tokens(60))
    partial = context.state.save(0, "partial")
    assert partial.nbytes <= context.state.save(0).nbytes
    expected = decode_tokens(context, 0, [42], 60)
    decode_tokens(context, 0, random_tokens(20, seed=9), 61)
    context.state.load(0, partial)
    assert context.memory.get_position_range(0)[1] == 59
    assert max_difference(decode_tokens(context, 0, [42], 60), expected) == 0.0


def test_c17_a_partial_state_restores_a_window(open_context):
    context = open_context("window", cells=2048, sequences=1, ubatch=32, batch=32)
    decode_tokens(context, 0, random_tokens(100))
    partial = context.state.save(0, "partial")
    expected = decode_tokens(context, 0, [42], 100)
    decode_tokens(context, 0, random_tokens(700, seed=9), 101)
    assert not context.memory.can_resume(0, 100)
    context.state.load(0, partial)
    assert context.memory.get_position_range(0)[1] == 99
    assert context.memory.can_resume(0, 100)
    assert max_difference(decode_tokens(context, 0, [42], 100), expected) == 0.0


def test_c17_full_attention_has_no_partial_state(open_context):
    context = open_context("attention")
    decode_tokens(context, 0, random_tokens(10))
    with pytest.raises(UnsupportedOperation, match="partial"):
        context.state.save(0, "partial")


@pytest.mark.parametrize("damage", ["truncate", "extend", "flip", "foreign magic", "empty"])
def test_c17_a_damaged_state_is_rejected_and_changes_nothing(open_context, damage):
    context = open_context("hybrid")
    decode_tokens(context, 0, random_tokens(30))
    before = context.state.save(0)
    data = bytearray(before.to_bytes())
    match damage:
        case "truncate":
            data = data[:-7]
        case "extend":
            data += b"x"
        case "flip":
            data[len(data) // 2] ^= 4
        case "foreign magic":
            data[:4] = b"GGUF"
        case "empty":
            data.clear()
    with pytest.raises(InvalidState):
        context.state.load(0, SavedState.from_bytes(bytes(data)))
    assert context.state.save(0).data.tobytes() == before.data.tobytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_type_k": "f32"},
        {"cache_type_v": "f32"},
        {"kv_unified": True},
        {"sequences": 3},
        {"rope_freq_base": 5e5},
        {"flash_attention": False},
    ],
    ids=str,
)
def test_c17_a_state_of_a_context_with_other_settings_is_rejected(open_model, open_context, settings):
    model = open_model("attention")
    first, second = open_context(model), open_context(model, **settings)
    decode_tokens(first, 0, random_tokens(20))
    decode_tokens(second, 0, random_tokens(5))
    with pytest.raises(InvalidState, match="another"):
        second.state.load(0, first.state.save(0))
    assert second.memory.get_position_range(0) == (0, 4)


def test_c17_a_state_of_another_model_is_rejected(open_context):
    first, second = open_context("attention"), open_context("successor-attention")  # same shapes, other weights
    decode_tokens(first, 0, random_tokens(20))
    with pytest.raises(InvalidState, match="another model"):
        second.state.load(0, first.state.save(0))


def test_c17_a_state_computed_with_another_adapter_is_rejected(open_model, open_context):
    """The key must include everything that affects the state."""
    model = open_model("attention")
    context = open_context(model)
    decode_tokens(context, 0, random_tokens(20))
    plain = context.state.save(0)
    adapter = LoraAdapter.load(model, models.get_path("adapter"))
    context.set_adapters({adapter: 1.0})
    with pytest.raises(InvalidState, match="adapter"):
        context.state.load(0, plain)
    context.set_adapters({})
    context.state.load(0, plain)


def test_c17_a_state_that_cannot_fit_is_rejected_and_changes_nothing(open_model, open_context):
    model = open_model("attention")
    large, small = open_context(model, cells=4096, sequences=1), open_context(model, cells=256, sequences=1)
    decode_tokens(large, 0, random_tokens(600))
    decode_tokens(small, 0, random_tokens(10))
    with pytest.raises(KVCacheFull) as caught:
        small.state.load(0, large.state.save(0))
    assert (caught.value.rows, caught.value.cells) == (600, 256)
    assert small.memory.get_position_range(0) == (0, 9)


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_c17_all_sequences_can_be_saved_to_and_loaded_from_a_file(open_model, open_context, tmp_path, kind):
    model = open_model(kind)
    context = open_context(model, sequences=3)
    decode_tokens(context, 0, random_tokens(40))
    decode_tokens(context, 2, random_tokens(25, seed=1))
    context.state.save_file(tmp_path / "all.state")
    expected = [decode_tokens(context, 0, [42], 40), decode_tokens(context, 2, [42], 25)]
    other = open_context(model, sequences=3)
    decode_tokens(other, 1, random_tokens(9))  # a sequence that is empty in the file is empty after the load
    assert other.state.load_file(tmp_path / "all.state") == [0, 1, 2]
    assert other.memory.get_position_range(1) is None
    assert max_difference(decode_tokens(other, 0, [42], 40), expected[0]) == 0.0
    assert max_difference(decode_tokens(other, 2, [42], 25), expected[1]) == 0.0


def test_c17_one_sequence_can_be_loaded_from_a_file_into_another_sequence(open_context, tmp_path):
    context = open_context("hybrid")
    decode_tokens(context, 0, random_tokens(40))
    context.state.save_file(tmp_path / "first.state", 0)
    assert context.state.load_file(tmp_path / "first.state", 1) == [1]
    assert max_difference(decode_tokens(context, 0, [42], 40), decode_tokens(context, 1, [42], 40)) == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["first.state"]


@pytest.mark.parametrize("cut", [1, 11, 40, 200])
def test_c17_a_truncated_file_is_rejected_and_changes_nothing(open_context, tmp_path, cut):
    context = open_context("attention")
    decode_tokens(context, 0, random_tokens(40))
    decode_tokens(context, 1, random_tokens(10))
    path = tmp_path / "cut.state"
    context.state.save_file(path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InvalidState):
        context.state.load_file(path)
    assert context.memory.get_position_range(0) == (0, 39)


def test_c17_an_empty_sequence_can_be_saved_and_loaded(open_context):
    context = open_context("attention")
    decode_tokens(context, 1, random_tokens(10))
    context.state.load(1, SavedState.from_bytes(context.state.save(0).to_bytes()))
    assert context.memory.get_position_range(1) is None
