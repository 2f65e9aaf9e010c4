"""Inspection passes every valid file and rejects every other file quickly and with a reason."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.formats import TENSOR_TYPES, ValueType
from afterglow.llama.gguf.inspection import inspect_file
from afterglow.testing import models
from support.gguf_mutations import generate_mutations
from support.gguf_verdict import get_rejection, inspect_document, open_document

U16, U32, F32, TEXT = ValueType.UINT16, ValueType.UINT32, ValueType.FLOAT32, ValueType.STRING
TYPE_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


@pytest.mark.parametrize("name", models.list_names())
def test_every_tiny_model_projector_and_adapter_passes_inspection(name: str) -> None:
    assert inspect_file(models.get_path(name)).tensors


def test_a_file_without_architecture_is_rejected(tmp_path: Path) -> None:
    document = open_document("draft")
    document.remove("general.architecture")
    assert "names no architecture" in get_rejection(document, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("original", ["draft", "hybrid-mtp", "embedding", "projector-qwen", "adapter"])
def test_400_damaged_copies_pass_or_are_rejected_with_a_reason(original: str, tmp_path: Path) -> None:
    reasons, path = [], tmp_path / "model.gguf"
    for description, data in itertools.islice(generate_mutations(models.get_path(original).read_bytes(), seed=3), 400):
        path.write_bytes(data)
        started = time.process_time()
        try:
            inspect_file(path)
        except InvalidModel as error:
            reasons.append(error.reason)
        assert time.process_time() - started < 0.5, description
    assert all(reasons)
    assert 100 < len(reasons) < 400


def test_the_same_seed_gives_the_same_mutations() -> None:
    original = models.get_path("draft").read_bytes()
    first, second = (list(itertools.islice(generate_mutations(original, seed=5), 20)) for _ in range(2))
    assert first == second
    assert first != list(itertools.islice(generate_mutations(original, seed=6), 20))


def get_retype_rejection(name: str, tensor: bytes, kind: str, folder: Path) -> str:
    """Return the rejection of a tiny model in which one tensor has another type and the matching size."""
    document = open_document(name)
    changed = next(item for item in document.tensors if item.name == tensor)
    changed.kind = TYPE_NUMBERS[kind]
    _, block, size = TENSOR_TYPES[changed.kind]
    elements = 1
    for length in changed.shape:
        elements *= length
    changed.data = bytes(elements // block * size)
    return get_rejection(document, folder)


@pytest.mark.parametrize("kind", ["F64", "I8", "I16", "I32", "I64", "Q8_1"])
def test_a_matrix_of_a_non_weight_type_is_rejected(kind: str, tmp_path: Path) -> None:
    reason = get_retype_rejection("draft", b"blk.0.ffn_up.weight", kind, tmp_path)
    assert reason == f"tensor 'blk.0.ffn_up.weight' is stored as {kind}, which cannot be used for weights"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("draft", b"blk.0.attn_norm.weight"),
        ("embedding", b"blk.0.attn_q.bias"),
        ("recurrent", b"blk.0.ssm_a"),
        ("projector-llava", b"v.blk.0.ln1.weight"),
    ],
)
def test_a_vector_that_must_be_f32_is_rejected_otherwise(name: str, tensor: bytes, tmp_path: Path) -> None:
    assert "is stored as F16, it must be F32" in get_retype_rejection(name, tensor, "F16", tmp_path)


def test_an_adapter_factor_must_have_a_weight_type(tmp_path: Path) -> None:
    tensor = open_document("adapter").tensors[0].name
    assert "cannot be used for weights" in get_retype_rejection("adapter", tensor, "I16", tmp_path)


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
def test_adapter_and_projector_keys_must_have_the_expected_stored_type(
    name: str, key: str, kind: ValueType, tmp_path: Path
) -> None:
    document = open_document(name)
    document.set(key, kind, 1)
    assert f"{key} is stored as {kind.name}, it must be" in get_rejection(document, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("block_count", 2**30, "it must be from 0 to 1,024"),
        ("patch_size", 0, "it must be from 1"),
        ("attention.head_count", 3, "not a multiple of its 3 heads"),
        ("spatial_merge_size", 60, "one token would cover 480 by 480 pixels"),
    ],
)
def test_an_oversized_projector_is_rejected(key: str, value: int, reason: str, tmp_path: Path) -> None:
    document = open_document("projector-qwen")
    document.set(f"clip.vision.{key}", U32, value)
    assert reason in get_rejection(document, tmp_path)


def test_a_projector_with_a_negative_epsilon_is_rejected(tmp_path: Path) -> None:
    document = open_document("projector-qwen")
    document.set("clip.vision.attention.layer_norm_epsilon", F32, -1.0)
    assert "layer_norm_epsilon is -1.0, it must be zero or more" in get_rejection(document, tmp_path)


def test_a_part_of_a_split_model_must_have_the_matching_file_name(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("split.count", U16, 3)
    document.set("split.no", U16, 0)
    assert inspect_document(document, tmp_path, "model-00001-of-00003.gguf").split_count == 3
    assert "its name should end in -00001-of-00003.gguf" in get_rejection(document, tmp_path, "model.gguf")
    document.set("split.no", U32, 0)
    assert "split.no is stored as UINT32, it must be UINT16" in get_rejection(
        document, tmp_path, "model-00001-of-00003.gguf"
    )


def test_later_parts_of_a_split_model_need_no_metadata(tmp_path: Path) -> None:
    document = open_document("draft")
    document.entries = []
    document.set("split.count", U16, 3)
    document.set("split.no", U16, 1)
    assert inspect_document(document, tmp_path, "model-00002-of-00003.gguf").tensors
