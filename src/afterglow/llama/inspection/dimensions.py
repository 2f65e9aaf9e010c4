"""The numbers that describe a text model: those that llama.cpp asserts, divides by, counts to or allocates.

That they agree with the tensors' shapes is not checked here: llama.cpp says so itself, and says it politely.
"""

from __future__ import annotations

import math

from afterglow.llama.formats import ValueType
from afterglow.llama.inspection.facts import Facts

LAYERS = 512
EXPERTS = 1024
INTEGER = 2**31 - 1  # much of llama.cpp holds these in a signed 32-bit number
WIDTH = 2**20
STATE = 2**28  # elements of one sequence's recurrent state

# The lowest and highest value of a key, or of each element where it has one for each layer. Zero where it is used as
# "none". Those at the end are counts of loops: a graph is built that often.
BOUNDS = {
    "context_length": (1, INTEGER), "embedding_length": (1, WIDTH), "block_count": (1, LAYERS),
    "embedding_length_out": (0, WIDTH), "embedding_length_per_layer_input": (0, WIDTH), "features_length": (0, WIDTH),
    "target_hidden_size": (0, WIDTH), "vocab_size": (0, 2**24), "feed_forward_length": (0, 2**24),
    "expert_count": (0, EXPERTS), "expert_used_count": (0, EXPERTS), "expert_group_count": (0, EXPERTS),
    "experts_per_group": (1, EXPERTS), "nextn_predict_layers": (0, LAYERS), "n_deepstack_layers": (0, LAYERS),
    "decoder_block_count": (0, LAYERS), "full_attention_interval": (1, INTEGER), "pooling_type": (0, 4),
    "classifier.pooling_type": (0, 4), "attention.head_count": (0, 65_536), "attention.head_count_kv": (0, 65_536),
    "attention.key_length": (0, 65_536), "attention.value_length": (0, 65_536),
    "attention.key_length_swa": (0, 65_536), "attention.value_length_swa": (0, 65_536),
    "attention.sliding_window": (0, 2**28), "rope.dimension_count": (2, 65_536),
    "rope.dimension_count_swa": (2, 65_536), "rope.scaling.original_context_length": (0, INTEGER),
    "ssm.conv_kernel": (0, 256), "ssm.inner_size": (0, WIDTH), "ssm.state_size": (0, WIDTH),
    "ssm.time_step_rank": (0, WIDTH), "ssm.group_count": (0, 65_536), "wkv.head_size": (0, 65_536),
    "token_shift_count": (0, 256), "shortconv.l_cache": (0, 65_536), "kda.head_dim": (0, 65_536),
    "num_loops": (0, 1024), "hrm.h_cycles": (0, 1024), "hrm.l_cycles": (0, 1024), "hrm.layers_per_stack": (0, LAYERS),
    "hyper_connection.sinkhorn_iterations": (0, 1024), "hyper_connection.count": (0, 256),
}  # fmt: skip
REQUIRED = ("context_length", "embedding_length", "block_count")
PER_LAYER = ("expert_used_count", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
ACTIVATIONS = ("gelu", "silu", "tanh")


def check_dimensions(facts: Facts) -> None:
    for name in REQUIRED:
        if not facts.has(facts.own(name)):
            facts.fail(f"{facts.own(name)} is missing")
    for name, (low, high) in BOUNDS.items():
        _check_bounds(facts, facts.own(name), low, high, per_layer=name in PER_LAYER)
    _check_other_numbers(facts)
    _check_words(facts)
    _check_experts(facts)
    _check_rotation(facts)
    _check_state(facts)
    layers, extra = facts.number(facts.own("block_count")), facts.number(facts.own("nextn_predict_layers"))
    if extra > layers:
        facts.fail(f"{extra:,} of its {layers:,} layers are said to predict further tokens")


def _check_bounds(facts: Facts, key: str, low: int, high: int, per_layer: bool) -> None:
    for value in facts.numbers(key) if per_layer else [facts.number(key, default=low)]:
        if not low <= value <= high:
            facts.fail(f"{key} is {value:,}, it must be from {low:,} to {high:,}")


def _check_other_numbers(facts: Facts) -> None:
    """Any number of this architecture that a signed 32-bit number cannot hold, and any epsilon under a square root."""
    prefix = facts.own("")
    for key, value in facts.header.metadata.items():
        if not key.startswith(prefix):
            continue
        if facts.header.types[key] is ValueType.UINT32 and isinstance(value, int) and value > INTEGER:
            facts.fail(f"{key} is {value:,}, over the limit of {INTEGER:,}")
        if isinstance(value, float) and key.endswith("epsilon") and not 0 <= value < math.inf:
            facts.fail(f"{key} is {value}, it must be zero or more")


def _check_words(facts: Facts) -> None:
    for name, words in (("rope.scaling.type", ROPE_SCALINGS), ("classifier.activation", ACTIVATIONS)):
        word = facts.text(facts.own(name))
        if word is not None and word not in words:
            facts.fail(f"{facts.own(name)} is {word[:32]!r}, it must be one of {', '.join(words)}")


def _check_experts(facts: Facts) -> None:
    count, groups = facts.number(facts.own("expert_count")), facts.number(facts.own("expert_group_count"))
    used = max(facts.numbers(facts.own("expert_used_count")), default=0)
    if count <= 1 and facts.architecture in ("hunyuan-vl", "hunyuan-dense"):
        return  # dense models that were converted with the numbers of their mixture-of-experts relatives
    if used > count or (count > 0 and used == 0):
        facts.fail(f"{used:,} of {count:,} experts are said to be used for a token")
    if groups and (groups >= count or count % groups):
        facts.fail(f"{count:,} experts are said to be in {groups:,} groups")
    if groups > 1 and not 0 < facts.number(facts.own("expert_group_used_count")) < groups:
        facts.fail(f"{facts.own('expert_group_used_count')} is not between 0 and the {groups:,} groups")


def _check_rotation(facts: Facts) -> None:
    """Rotary positions: with an odd number of dimensions llama.cpp aborts, with none it never ends."""
    heads = facts.numbers(facts.own("attention.head_count"))
    if not heads or heads[0] == 0:
        return
    width = facts.number(facts.own("attention.key_length"), facts.number(facts.own("embedding_length")) // heads[0])
    local = facts.number(facts.own("attention.key_length_swa"), width)
    for name, room in (("rope.dimension_count", width), ("rope.dimension_count_swa", local)):
        rotated = facts.number(facts.own(name))
        if rotated % 2 or rotated > room:
            facts.fail(f"{facts.own(name)} is {rotated:,}, it must be even and the heads have {room:,} dimensions")
    sections = facts.numbers(facts.own("rope.dimension_sections"))
    if sections and (len(sections) > 4 or min(sections) < 0 or not 0 < sum(sections) <= width):
        facts.fail(
            f"{facts.own('rope.dimension_sections')} is {sections[:8]}, which does not divide heads of {width:,}"
        )


def _check_state(facts: Facts) -> None:
    """The state of recurrent layers: its size, and for gated delta nets that it is as wide as it is high."""
    inner, state = facts.number(facts.own("ssm.inner_size")), facts.number(facts.own("ssm.state_size"))
    groups, kernel = facts.number(facts.own("ssm.group_count")), facts.number(facts.own("ssm.conv_kernel"))
    elements = max(inner * state, kernel * (inner + 2 * groups * state))
    if elements > STATE:
        facts.fail(f"the recurrent state of one layer would have {elements:,} elements, the limit is {STATE:,}")
    heads = facts.number(facts.own("ssm.time_step_rank"))
    if facts.architecture in DELTA_NETS and (inner != heads * state or not groups or heads % groups):
        facts.fail(
            f"{heads:,} heads in {groups:,} groups with states of {state:,} do not make an inner size of {inner:,}"
        )
