"""Checks the metadata of projectors (image, audio) and LoRA adapters.

llama.cpp reads their values without checking the stored type and aborts on a mismatch. Neither llama.cpp nor this
module checks shapes: only a trial load with the model does.
"""

from __future__ import annotations

import math

from afterglow.llama.gguf.inspection.metadata import MetadataReader

BOOL_KEYS = ("has_vision_encoder", "has_audio_encoder", "has_gen_audio_encoder", "use_gelu", "use_silu")
STRING_KEYS = ("projector_type", "mm_patch_merge_type", "image_resize_algo", "model_variant")
FLOAT_KEYS = ("layer_norm_epsilon", "swiglu_clamp")
# Lowest and highest value of each number that llama.cpp reads. Zero means "none" for some of them.
INTEGER_KEY_BOUNDS = {
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
MAX_MERGED_PATCH_PIXELS = 128  # per side; llama.cpp's warm-up uses 46 merged patches per side


def check_projector(metadata: MetadataReader) -> None:
    metadata.get_string("general.name")
    metadata.get_string("general.description")
    for key in metadata.header.metadata:
        if key.startswith("clip."):
            _check_key(metadata, key)
    for encoder in ("clip.vision", "clip.audio"):
        width = metadata.get_uint32(f"{encoder}.embedding_length")
        heads = metadata.get_uint32(f"{encoder}.attention.head_count")
        if heads and width % heads and not metadata.has_key(f"{encoder}.attention.head_dim"):
            metadata.fail(f"{encoder}.embedding_length is {width:,}, which is not a multiple of its {heads:,} heads")
    patch = metadata.get_uint32("clip.vision.patch_size")
    merge_size = metadata.get_uint32("clip.vision.spatial_merge_size")
    side = patch * max(merge_size, metadata.get_uint32("clip.vision.projector.scale_factor"))
    if side > MAX_MERGED_PATCH_PIXELS:
        limit = f"{MAX_MERGED_PATCH_PIXELS} by {MAX_MERGED_PATCH_PIXELS}"
        metadata.fail(f"one token would cover {side:,} by {side:,} pixels, the limit is {limit}")


def check_adapter(metadata: MetadataReader) -> None:
    metadata.get_string("adapter.type")
    metadata.get_float32("adapter.lora.alpha")


def _check_key(metadata: MetadataReader, key: str) -> None:
    name = key.rpartition(".")[2]
    if name in BOOL_KEYS:
        metadata.get_bool(key, False)
    elif name in STRING_KEYS:
        metadata.get_string(key)
    elif name in FLOAT_KEYS:
        value = metadata.get_float32(key)
        if value is not None and not 0 <= value < math.inf:
            metadata.fail(f"{key} is {value}, it must be zero or more")
    elif name in INTEGER_KEY_BOUNDS:
        (low, high), number = INTEGER_KEY_BOUNDS[name], metadata.get_uint32(key)
        if not low <= number <= high:
            metadata.fail(f"{key} is {number:,}, it must be from {low:,} to {high:,}")
