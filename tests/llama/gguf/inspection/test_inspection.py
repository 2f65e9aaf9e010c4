"""Is every good file let through, and every other one refused in words, quickly, whatever is wrong with it?"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.formats import TENSOR_TYPES, ValueType
from afterglow.llama.gguf.inspection import inspect_file
from afterglow.testing import models
from support.gguf_mutations import mutations
from support.gguf_verdict import opened, passes, refusal

U16, U32, F32, TEXT = ValueType.UINT16, ValueType.UINT32, ValueType.FLOAT32, ValueType.STRING
NUMBER_OF = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


@pytest.mark.parametrize("name", models.list_names())
def test_every_tiny_model_projector_and_adapter_passes(name: str) -> None:
    assert inspect_file(models.get_path(name)).tensors


def test_a_file_without_architecture_is_refused(tmp_path: Path) -> None:
    document = opened("draft")
    document.drop("general.architecture")
    assert "which architecture" in refusal(document, tmp_path)


@pytest.mark.parametrize("original", ["draft", "hybrid-mtp", "embedding", "projector-qwen", "adapter"])
def test_four_hundred_damaged_copies_are_let_through_or_refused_in_words(original: str, tmp_path: Path) -> None:
    reasons, path = [], tmp_path / "model.gguf"
    for what, data in itertools.islice(mutations(models.get_path(original).read_bytes(), seed=3), 400):
        path.write_bytes(data)
        started = time.process_time()
        try:
            inspect_file(path)
        except InvalidModel as error:
            reasons.append(error.reason)
        assert time.process_time() - started < 0.5, what
    assert all(reasons)
    assert 100 < len(reasons) < 400


def test_the_same_seed_gives_the_same_damage() -> None:
    original = models.get_path("draft").read_bytes()
    first, second = (list(itertools.islice(mutations(original, seed=5), 20)) for _ in range(2))
    assert first == second
    assert first != list(itertools.islice(mutations(original, seed=6), 20))


def retyped(name: str, tensor: bytes, kind: str, folder: Path) -> str:
    """The reason against a tiny model in which one tensor has another type, and as many bytes as that needs."""
    document = opened(name)
    weights = next(one for one in document.weights if one.name == tensor)
    weights.kind = NUMBER_OF[kind]
    _, block, size = TENSOR_TYPES[weights.kind]
    elements = 1
    for length in weights.shape:
        elements *= length
    weights.data = bytes(elements // block * size)
    return refusal(document, folder)


@pytest.mark.parametrize("kind", ["F64", "I8", "I16", "I32", "I64", "Q8_1"])
def test_a_matrix_that_nothing_can_multiply_is_refused(kind: str, tmp_path: Path) -> None:
    reason = retyped("draft", b"blk.0.ffn_up.weight", kind, tmp_path)
    assert reason == f"tensor 'blk.0.ffn_up.weight' is stored as {kind}, which cannot be computed with"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("draft", b"blk.0.attn_norm.weight"),
        ("embedding", b"blk.0.attn_q.bias"),
        ("recurrent", b"blk.0.ssm_a"),
        ("projector-llava", b"v.blk.0.ln1.weight"),
    ],
)
def test_a_vector_that_is_not_of_single_precision_is_refused(name: str, tensor: bytes, tmp_path: Path) -> None:
    assert "is stored as F16, it must be F32" in retyped(name, tensor, "F16", tmp_path)


def test_a_factor_of_an_adapter_must_be_computable(tmp_path: Path) -> None:
    tensor = opened("adapter").weights[0].name
    assert "cannot be computed with" in retyped("adapter", tensor, "I16", tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        ("adapter", "adapter.lora.alpha", U32),
        ("adapter", "general.type", U32),
        ("projector-llava", "clip.vision.block_count", F32),
        ("projector-llava", "clip.vision.attention.layer_norm_epsilon", U32),
        ("projector-llava", "clip.has_vision_encoder", U32),
        ("projector-llava", "clip.projector_type", U32),
    ],
)
def test_what_is_read_without_asking_must_be_stored_as_expected(
    name: str, key: str, kind: ValueType, tmp_path: Path
) -> None:
    document = opened(name)
    document.put(key, kind, 1)
    assert f"{key} is stored as {kind.name}, it must be" in refusal(document, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("block_count", 2**30, "it must be from 0 to 1,024"),
        ("patch_size", 0, "it must be from 1"),
        ("attention.head_count", 3, "not divided by its 3 heads"),
        ("spatial_merge_size", 60, "one token would stand for 480 by 480 pixels"),
    ],
)
def test_a_projector_of_absurd_size_is_refused(key: str, value: int, reason: str, tmp_path: Path) -> None:
    document = opened("projector-qwen")
    document.put(f"clip.vision.{key}", U32, value)
    assert reason in refusal(document, tmp_path)


def test_a_projector_with_an_epsilon_below_zero_is_refused(tmp_path: Path) -> None:
    document = opened("projector-qwen")
    document.put("clip.vision.attention.layer_norm_epsilon", F32, -1.0)
    assert "layer_norm_epsilon is -1.0, it must be zero or more" in refusal(document, tmp_path)


def test_a_part_of_a_model_is_known_by_its_name(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("split.count", U16, 3)
    document.put("split.no", U16, 0)
    assert passes(document, tmp_path, "model-00001-of-00003.gguf").split_count == 3
    assert "its name should end in -00001-of-00003.gguf" in refusal(document, tmp_path, "model.gguf")
    document.put("split.no", U32, 0)
    assert "split.no is stored as UINT32, it must be UINT16" in refusal(document, tmp_path, "model-00001-of-00003.gguf")


def test_a_later_part_needs_no_description(tmp_path: Path) -> None:
    document = opened("draft")
    document.entries = []
    document.put("split.count", U16, 3)
    document.put("split.no", U16, 1)
    assert passes(document, tmp_path, "model-00002-of-00003.gguf").tensors
