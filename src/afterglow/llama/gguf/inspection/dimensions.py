"""Checks the hyperparameters of a text model that llama.cpp asserts on, divides by, loops over or allocates by.

Does not check that they agree with the tensors' shapes: llama.cpp reports that itself as an ordinary error.
"""

from __future__ import annotations

import math

from afterglow.llama.gguf.formats import ValueType
from afterglow.llama.gguf.inspection.metadata import MetadataReader

MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_INT32 = 2**31 - 1  # much of llama.cpp stores these numbers as int32
MAX_WIDTH = 2**20
MAX_STATE_ELEMENTS = 2**28  # of one layer's recurrent state of one sequence

# Lowest and highest value of a key, or of each element if it has one per layer. Zero if it means "none". The keys at
# the end are loop counts: a graph is built that often.
KEY_BOUNDS = {
    "context_length": (1, MAX_INT32), "embedding_length": (1, MAX_WIDTH), "block_count": (1, MAX_LAYERS),
    "embedding_length_out": (0, MAX_WIDTH), "embedding_length_per_layer_input": (0, MAX_WIDTH),
    "features_length": (0, MAX_WIDTH), "target_hidden_size": (0, MAX_WIDTH), "vocab_size": (0, 2**24),
    "feed_forward_length": (0, 2**24), "expert_count": (0, MAX_EXPERTS), "expert_used_count": (0, MAX_EXPERTS),
    "expert_group_count": (0, MAX_EXPERTS), "experts_per_group": (1, MAX_EXPERTS),
    "nextn_predict_layers": (0, MAX_LAYERS), "n_deepstack_layers": (0, MAX_LAYERS),
    "decoder_block_count": (0, MAX_LAYERS), "full_attention_interval": (1, MAX_INT32), "pooling_type": (0, 4),
    "classifier.pooling_type": (0, 4), "attention.head_count": (0, 65_536), "attention.head_count_kv": (0, 65_536),
    "attention.key_length": (0, 65_536), "attention.value_length": (0, 65_536),
    "attention.key_length_swa": (0, 65_536), "attention.value_length_swa": (0, 65_536),
    "attention.sliding_window": (0, 2**28), "rope.dimension_count": (2, 65_536),
    "rope.dimension_count_swa": (2, 65_536), "rope.scaling.original_context_length": (0, MAX_INT32),
    "ssm.conv_kernel": (0, 256), "ssm.inner_size": (0, MAX_WIDTH), "ssm.state_size": (0, MAX_WIDTH),
    "ssm.time_step_rank": (0, MAX_WIDTH), "ssm.group_count": (0, 65_536), "wkv.head_size": (0, 65_536),
    "token_shift_count": (0, 256), "shortconv.l_cache": (0, 65_536), "kda.head_dim": (0, 65_536),
    "num_loops": (0, 1024), "hrm.h_cycles": (0, 1024), "hrm.l_cycles": (0, 1024),
    "hrm.layers_per_stack": (0, MAX_LAYERS), "hyper_connection.sinkhorn_iterations": (0, 1024),
    "hyper_connection.count": (0, 256),
}  # fmt: skip
REQUIRED_KEYS = ("context_length", "embedding_length", "block_count")
PER_LAYER_KEYS = ("expert_used_count", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
DELTA_NET_ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
ROPE_SCALING_TYPES = ("none", "linear", "yarn", "longrope")
ACTIVATIONS = ("gelu", "silu", "tanh")


def check_dimensions(metadata: MetadataReader) -> None:
    for name in REQUIRED_KEYS:
        if not metadata.has_key(metadata.build_key(name)):
            metadata.fail(f"{metadata.build_key(name)} is missing")
    for name, (low, high) in KEY_BOUNDS.items():
        key = metadata.build_key(name)
        for number in metadata.get_integers(key) if name in PER_LAYER_KEYS else [metadata.get_uint32(key, default=low)]:
            if not low <= number <= high:
                metadata.fail(f"{key} is {number:,}, it must be from {low:,} to {high:,}")
    _check_unlisted_numbers(metadata)
    for name, allowed in (("rope.scaling.type", ROPE_SCALING_TYPES), ("classifier.activation", ACTIVATIONS)):
        text = metadata.get_string(metadata.build_key(name))
        if text is not None and text not in allowed:
            metadata.fail(f"{metadata.build_key(name)} is {text[:32]!r}, it must be one of {', '.join(allowed)}")
    _check_experts(metadata)
    _check_rope(metadata)
    _check_recurrent_state(metadata)
    layers = metadata.get_uint32(metadata.build_key("block_count"))
    mtp_layers = metadata.get_uint32(metadata.build_key("nextn_predict_layers"))
    if mtp_layers > layers:
        metadata.fail(f"{metadata.build_key('nextn_predict_layers')} is {mtp_layers:,}, block_count only {layers:,}")


def _check_unlisted_numbers(metadata: MetadataReader) -> None:
    """Check that every number of this architecture fits an int32, and that every epsilon can be under a square root."""
    prefix = metadata.build_key("")
    for key, value in metadata.header.metadata.items():
        if not key.startswith(prefix):
            continue
        if metadata.header.value_types[key] is ValueType.UINT32 and isinstance(value, int) and value > MAX_INT32:
            metadata.fail(f"{key} is {value:,}, over the limit of {MAX_INT32:,}")
        if isinstance(value, float) and key.endswith("epsilon") and not 0 <= value < math.inf:
            metadata.fail(f"{key} is {value}, it must be zero or more")


def _check_experts(metadata: MetadataReader) -> None:
    count = metadata.get_uint32(metadata.build_key("expert_count"))
    groups = metadata.get_uint32(metadata.build_key("expert_group_count"))
    used = max(metadata.get_integers(metadata.build_key("expert_used_count")), default=0)
    if count <= 1 and metadata.architecture in ("hunyuan-vl", "hunyuan-dense"):
        return  # dense models that were converted with the numbers of the mixture-of-experts model
    if used > count or (count > 0 and used == 0):
        metadata.fail(f"it uses {used:,} of {count:,} experts per token")
    if groups and (groups >= count or count % groups):
        metadata.fail(f"{count:,} experts cannot form {groups:,} groups")
    if groups > 1 and not 0 < metadata.get_uint32(metadata.build_key("expert_group_used_count")) < groups:
        metadata.fail(f"{metadata.build_key('expert_group_used_count')} is not between 0 and the {groups:,} groups")


def _check_rope(metadata: MetadataReader) -> None:
    """Check the RoPE dimensions: with an odd number llama.cpp aborts, with none it loops forever."""
    heads = metadata.get_integers(metadata.build_key("attention.head_count"))
    if not heads or heads[0] == 0:
        return
    default = metadata.get_uint32(metadata.build_key("embedding_length")) // heads[0]
    width = metadata.get_uint32(metadata.build_key("attention.key_length"), default)
    swa_width = metadata.get_uint32(metadata.build_key("attention.key_length_swa"), width)
    for name, head_size in (("rope.dimension_count", width), ("rope.dimension_count_swa", swa_width)):
        rotated = metadata.get_uint32(metadata.build_key(name))
        if rotated % 2 or rotated > head_size:
            rule = f"it must be even and the heads have {head_size:,} dimensions"
            metadata.fail(f"{metadata.build_key(name)} is {rotated:,}, {rule}")
    sections = metadata.get_integers(metadata.build_key("rope.dimension_sections"))
    if sections and (len(sections) > 4 or min(sections) < 0 or not 0 < sum(sections) <= width):
        key = metadata.build_key("rope.dimension_sections")
        metadata.fail(f"{key} is {sections[:8]}, which does not divide heads of {width:,}")


def _check_recurrent_state(metadata: MetadataReader) -> None:
    """Check the size of the recurrent state, and for gated delta nets that it is square."""
    inner = metadata.get_uint32(metadata.build_key("ssm.inner_size"))
    state = metadata.get_uint32(metadata.build_key("ssm.state_size"))
    groups = metadata.get_uint32(metadata.build_key("ssm.group_count"))
    kernel = metadata.get_uint32(metadata.build_key("ssm.conv_kernel"))
    elements = max(inner * state, kernel * (inner + 2 * groups * state))
    if elements > MAX_STATE_ELEMENTS:
        limit = f"the limit is {MAX_STATE_ELEMENTS:,}"
        metadata.fail(f"the recurrent state of one layer would have {elements:,} elements, {limit}")
    heads = metadata.get_uint32(metadata.build_key("ssm.time_step_rank"))
    if metadata.architecture in DELTA_NET_ARCHITECTURES and (inner != heads * state or not groups or heads % groups):
        states = f"{heads:,} heads in {groups:,} groups with states of {state:,}"
        metadata.fail(f"{states} do not make an inner size of {inner:,}")
