"""Hyperparameters that llama.cpp asserts on, divides by or allocates by are checked before it reads them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from afterglow.llama.gguf.formats import ValueType
from support.gguf_verdict import get_rejection, inspect_document, open_document

U32, I32, F32, TEXT = ValueType.UINT32, ValueType.INT32, ValueType.FLOAT32, ValueType.STRING


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("context_length", 0, "is 0, it must be from 1"),
        ("embedding_length", 2**31, "is 2,147,483,648, it must be from 1 to 1,048,576"),
        ("block_count", 0, "it must be from 1 to 512"),
        ("block_count", 513, "it must be from 1 to 512"),
        ("attention.head_count", 2**20, "it must be from 0 to 65,536"),
        ("attention.sliding_window", 2**31 - 1, "llama.attention.sliding_window is"),
        ("nextn_predict_layers", 2, "llama.nextn_predict_layers is 2, block_count only 1"),
        ("n_deepstack_layers", 2**20, "llama.n_deepstack_layers is"),
        ("num_loops", 2**20, "llama.num_loops is"),
        ("full_attention_interval", 0, "llama.full_attention_interval is 0"),
        ("pooling_type", 9, "llama.pooling_type is 9"),
        ("some.other_number", 2**32 - 1, "over the limit of 2,147,483,647"),
        ("rope.dimension_count", 0, "it must be from 2"),
        ("rope.dimension_count", 7, "is 7, it must be even"),
        ("rope.dimension_count", 512, "the heads have 16 dimensions"),
        ("rope.dimension_count_swa", 512, "the heads have 16 dimensions"),
        ("expert_count", 2, "it uses 0 of 2 experts per token"),
        ("expert_used_count", 2, "it uses 2 of 0 experts per token"),
        ("expert_group_count", 3, "0 experts cannot form 3 groups"),
    ],
)
def test_an_out_of_range_number_is_rejected(key: str, value: int, reason: str, tmp_path: Path) -> None:
    document = open_document("draft")
    document.set(f"llama.{key}", U32, value)
    assert reason in get_rejection(document, tmp_path)


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count"])
def test_the_error_names_a_missing_key(key: str, tmp_path: Path) -> None:
    document = open_document("draft")
    document.remove(f"llama.{key}")
    assert get_rejection(document, tmp_path) == f"llama.{key} is missing"


def test_the_error_names_a_key_with_the_wrong_stored_type(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("llama.block_count", I32, 1)
    assert get_rejection(document, tmp_path) == "llama.block_count is stored as INT32, it must be UINT32"
    document.set("llama.block_count", U32, 1, array=True)
    assert get_rejection(document, tmp_path) == "llama.block_count is stored as an array of UINT32, it must be UINT32"


@pytest.mark.parametrize("sections", [[0, 0, 0, 0], [40, 0, 0, 0], [1, 1, 1, 1, 1], [-1, 3, 0, 0]])
def test_rope_sections_that_do_not_divide_a_head_are_rejected(sections: list[int], tmp_path: Path) -> None:
    document = open_document("hybrid")
    document.set("qwen35.rope.dimension_sections", I32, *sections)
    assert f"{sections}, which does not divide heads of 32" in get_rejection(document, tmp_path)


def test_expert_groups_must_divide_the_experts(tmp_path: Path) -> None:
    document = open_document("draft")
    for key, value in (("expert_count", 8), ("expert_used_count", 2), ("expert_group_count", 3)):
        document.set(f"llama.{key}", U32, value)
    assert get_rejection(document, tmp_path) == "8 experts cannot form 3 groups"
    document.set("llama.expert_group_count", U32, 4)
    assert "expert_group_used_count is not between 0 and the 4 groups" in get_rejection(document, tmp_path)


def test_an_oversized_recurrent_state_is_rejected(tmp_path: Path) -> None:
    document = open_document("recurrent")
    document.set("mamba.ssm.group_count", U32, 65_536)
    document.set("mamba.ssm.state_size", U32, 65_536)
    assert "the recurrent state of one layer would have" in get_rejection(document, tmp_path)


@pytest.mark.parametrize(("key", "value"), [("inner_size", 63), ("time_step_rank", 3), ("group_count", 0)])
def test_delta_net_heads_that_do_not_match_the_inner_size_are_rejected(key: str, value: int, tmp_path: Path) -> None:
    document = open_document("hybrid")
    document.set(f"qwen35.ssm.{key}", U32, value)
    assert "do not make an inner size of" in get_rejection(document, tmp_path)


@pytest.mark.parametrize("epsilon", [-1.0, -math.inf, math.inf, math.nan])
def test_a_negative_or_infinite_epsilon_is_rejected(epsilon: float, tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("llama.attention.layer_norm_rms_epsilon", F32, epsilon)
    assert "it must be zero or more" in get_rejection(document, tmp_path)


@pytest.mark.parametrize("key", ["rope.scaling.type", "classifier.activation"])
def test_an_unknown_enumeration_value_is_rejected_with_the_allowed_ones(key: str, tmp_path: Path) -> None:
    document = open_document("draft")
    document.set(f"llama.{key}", TEXT, b"sideways")
    assert f"llama.{key} is 'sideways', it must be one of" in get_rejection(document, tmp_path)


def test_a_per_layer_number_must_be_an_integer(tmp_path: Path) -> None:
    document = open_document("draft")
    document.set("llama.attention.head_count", F32, 2.0, array=True)
    assert "head_count is stored as an array of FLOAT32, it must be an array of UINT32" in get_rejection(
        document, tmp_path
    )
    document.set("llama.attention.head_count", I32, 2, array=True)
    assert inspect_document(document, tmp_path)
