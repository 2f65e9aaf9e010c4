"""Projector files, for pictures and sound, and adapters: llama.cpp reads their values without asking how they are
stored, and aborts when it is otherwise. Shapes are not checked, there or here: only a trial with the model tells.
"""

from __future__ import annotations

import math

from afterglow.llama.inspection.facts import Facts

FLAGS = ("has_vision_encoder", "has_audio_encoder", "has_gen_audio_encoder", "use_gelu", "use_silu")
WORDS = ("projector_type", "mm_patch_merge_type", "image_resize_algo", "model_variant")
REALS = ("layer_norm_epsilon", "swiglu_clamp")
# The lowest and highest value of each number that llama.cpp reads. Zero is taken for "none" by some of them.
NUMBERS = {
    "embedding_length": (0, 2**20), "feed_forward_length": (0, 2**20), "block_count": (0, 1024),
    "projection_dim": (0, 2**20), "head_count": (0, 4096), "head_count_kv": (0, 4096), "head_dim": (0, 65_536),
    "image_size": (0, 8192), "image_min_pixels": (1, 2**28), "image_max_pixels": (1, 2**28),
    "preproc_min_tiles": (0, 4096), "preproc_max_tiles": (0, 4096), "preproc_image_size": (0, 65_536),
    "patch_size": (1, 128), "scale_factor": (1, 64), "query_side": (0, 4096), "window_side": (0, 4096),
    "spatial_merge_size": (1, 64), "n_wa_pattern": (0, 1024), "window_size": (0, 65_536),
    "minicpmv_query_num": (0, 65_536), "expert_used_count": (0, 1024), "num_mel_bins": (0, 4096),
    "stack_factor": (0, 4096), "chunk_size": (0, 65_536), "conv_kernel_size": (0, 4096), "max_pos_emb": (0, 2**20),
    "downsample_rate": (0, 4096), "num_quantizers": (0, 1024), "local_block_count": (0, 1024),
    "local_group_size": (0, 4096), "subsampling_factor": (0, 4096),
}  # fmt: skip
MERGED_PATCH = 128  # pixels on a side; llama.cpp tries 46 of them on a side when it starts


def check_projector(facts: Facts) -> None:
    facts.text("general.name")
    facts.text("general.description")
    for key in facts.header.metadata:
        if key.startswith("clip."):
            _check_key(facts, key)
    for encoder in ("clip.vision", "clip.audio"):
        width, heads = facts.number(f"{encoder}.embedding_length"), facts.number(f"{encoder}.attention.head_count")
        if heads and width % heads and not facts.has(f"{encoder}.attention.head_dim"):
            facts.fail(f"{encoder}.embedding_length is {width:,}, which is not divided by its {heads:,} heads")
    patch, merged = facts.number("clip.vision.patch_size"), facts.number("clip.vision.spatial_merge_size")
    side = patch * max(merged, facts.number("clip.vision.projector.scale_factor"))
    if side > MERGED_PATCH:
        facts.fail(
            f"one token would stand for {side:,} by {side:,} pixels, the limit is {MERGED_PATCH} by {MERGED_PATCH}"
        )


def check_adapter(facts: Facts) -> None:
    facts.text("adapter.type")
    facts.real("adapter.lora.alpha")


def _check_key(facts: Facts, key: str) -> None:
    name = key.rpartition(".")[2]
    if name in FLAGS:
        facts.flag(key, False)
    elif name in WORDS:
        facts.text(key)
    elif name in REALS:
        value = facts.real(key)
        if value is not None and not 0 <= value < math.inf:
            facts.fail(f"{key} is {value}, it must be zero or more")
    elif name in NUMBERS:
        (low, high), number = NUMBERS[name], facts.number(key)
        if not low <= number <= high:
            facts.fail(f"{key} is {number:,}, it must be from {low:,} to {high:,}")
