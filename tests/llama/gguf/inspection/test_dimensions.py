"""Are the numbers that llama.cpp would assert, divide by or allocate checked before it sees them?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from afterglow.llama.gguf.formats import ValueType
from support.gguf_verdict import opened, passes, refusal

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
        ("nextn_predict_layers", 2, "2 of its 1 layers are said to predict"),
        ("n_deepstack_layers", 2**20, "llama.n_deepstack_layers is"),
        ("num_loops", 2**20, "llama.num_loops is"),
        ("full_attention_interval", 0, "llama.full_attention_interval is 0"),
        ("pooling_type", 9, "llama.pooling_type is 9"),
        ("some.other_number", 2**32 - 1, "over the limit of 2,147,483,647"),
        ("rope.dimension_count", 0, "it must be from 2"),
        ("rope.dimension_count", 7, "is 7, it must be even"),
        ("rope.dimension_count", 512, "the heads have 16 dimensions"),
        ("rope.dimension_count_swa", 512, "the heads have 16 dimensions"),
        ("expert_count", 2, "0 of 2 experts are said to be used"),
        ("expert_used_count", 2, "2 of 0 experts are said to be used"),
        ("expert_group_count", 3, "0 experts are said to be in 3 groups"),
    ],
)
def test_a_number_that_cannot_be_is_refused(key: str, value: int, reason: str, tmp_path: Path) -> None:
    document = opened("draft")
    document.put(f"llama.{key}", U32, value)
    assert reason in refusal(document, tmp_path)


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count"])
def test_a_missing_number_is_named(key: str, tmp_path: Path) -> None:
    document = opened("draft")
    document.drop(f"llama.{key}")
    assert refusal(document, tmp_path) == f"llama.{key} is missing"


def test_a_number_stored_in_another_way_is_named(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("llama.block_count", I32, 1)
    assert refusal(document, tmp_path) == "llama.block_count is stored as INT32, it must be UINT32"
    document.put("llama.block_count", U32, 1, array=True)
    assert refusal(document, tmp_path) == "llama.block_count is stored as an array of UINT32, it must be UINT32"


@pytest.mark.parametrize("sections", [[0, 0, 0, 0], [40, 0, 0, 0], [1, 1, 1, 1, 1], [-1, 3, 0, 0]])
def test_sections_that_do_not_divide_a_head_are_refused(sections: list[int], tmp_path: Path) -> None:
    document = opened("hybrid")
    document.put("qwen35.rope.dimension_sections", I32, *sections)
    assert f"{sections}, which does not divide heads of 32" in refusal(document, tmp_path)


def test_groups_of_experts_must_divide_them(tmp_path: Path) -> None:
    document = opened("draft")
    for key, value in (("expert_count", 8), ("expert_used_count", 2), ("expert_group_count", 3)):
        document.put(f"llama.{key}", U32, value)
    assert refusal(document, tmp_path) == "8 experts are said to be in 3 groups"
    document.put("llama.expert_group_count", U32, 4)
    assert "expert_group_used_count is not between 0 and the 4 groups" in refusal(document, tmp_path)


def test_a_recurrent_state_of_absurd_size_is_refused(tmp_path: Path) -> None:
    document = opened("recurrent")
    document.put("mamba.ssm.group_count", U32, 65_536)
    document.put("mamba.ssm.state_size", U32, 65_536)
    assert "the recurrent state of one layer would have" in refusal(document, tmp_path)


@pytest.mark.parametrize(("key", "value"), [("inner_size", 63), ("time_step_rank", 3), ("group_count", 0)])
def test_heads_that_do_not_fill_a_delta_net_are_refused(key: str, value: int, tmp_path: Path) -> None:
    document = opened("hybrid")
    document.put(f"qwen35.ssm.{key}", U32, value)
    assert "do not make an inner size of" in refusal(document, tmp_path)


@pytest.mark.parametrize("epsilon", [-1.0, -math.inf, math.inf, math.nan])
def test_an_epsilon_below_zero_is_refused(epsilon: float, tmp_path: Path) -> None:
    document = opened("draft")
    document.put("llama.attention.layer_norm_rms_epsilon", F32, epsilon)
    assert "it must be zero or more" in refusal(document, tmp_path)


@pytest.mark.parametrize("key", ["rope.scaling.type", "classifier.activation"])
def test_an_unknown_word_is_refused_with_the_known_ones(key: str, tmp_path: Path) -> None:
    document = opened("draft")
    document.put(f"llama.{key}", TEXT, b"sideways")
    assert f"llama.{key} is 'sideways', it must be one of" in refusal(document, tmp_path)


def test_a_number_for_each_layer_must_be_a_whole_one(tmp_path: Path) -> None:
    document = opened("draft")
    document.put("llama.attention.head_count", F32, 2.0, array=True)
    assert "head_count is stored as an array of FLOAT32, it must be an array of UINT32" in refusal(document, tmp_path)
    document.put("llama.attention.head_count", I32, 2, array=True)
    assert passes(document, tmp_path)
