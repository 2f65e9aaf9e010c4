"""Vision projectors of three types: llava (for llama), gemma3 (for gemma3) and qwen3vl_merger (for qwen35).

Contains the metadata and tensors that mtmd reads: a small image encoder and the projection to the text model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from afterglow.testing.models.writer import MetadataInput, ModelWriter

EMBEDDING_LENGTH, HEADS, PATCH_PIXELS = 32, 2, 8
# Must differ from EMBEDDING_LENGTH: mtmd detects old files with swapped ffn_up and ffn_down by their shapes.
FEED_FORWARD_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSize:
    """Sizes of a projector and of its text model."""

    embedding_length: int = EMBEDDING_LENGTH
    feed_forward_length: int = FEED_FORWARD_LENGTH
    heads: int = HEADS
    layers: int = 2
    image_pixels: int = 64  # per side
    text_embedding_length: int = 64


DEFAULT_SIZE = ProjectorSize()
SMALLEST_SIZE = ProjectorSize(layers=3, image_pixels=32)


def write_projector_metadata(
    writer: ModelWriter, projector_type: str, size: ProjectorSize, extra: Mapping[str, MetadataInput]
) -> None:
    """Add the metadata of a vision projector."""
    writer.add_metadata(
        "clip", {"has_vision_encoder": True, "projector_type": projector_type, "use_gelu": projector_type != "mlp"}
    )
    writer.add_metadata("clip.vision", {**build_vision_metadata(size), **extra})


def build_vision_metadata(size: ProjectorSize) -> dict[str, MetadataInput]:
    """Build the metadata common to all image encoders."""
    return {
        "embedding_length": size.embedding_length,
        "feed_forward_length": size.feed_forward_length,
        "block_count": size.layers,
        "projection_dim": size.text_embedding_length,
        "image_size": size.image_pixels,
        "patch_size": PATCH_PIXELS,
        "attention.head_count": size.heads,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    }


def _write_encoder(writer: ModelWriter, size: ProjectorSize, positions: int, *, fused_qkv: bool) -> None:
    """Add the image encoder; `fused_qkv` stores queries, keys and values as one matrix."""
    width = size.embedding_length
    _write_patch_embedding(writer, "v.patch_embd.weight", width)
    writer.add_noise("v.position_embd.weight", positions, width, scale=0.1)
    for layer in range(size.layers):
        block = f"v.blk.{layer}"
        for name in ("attn_qkv",) if fused_qkv else ("attn_q", "attn_k", "attn_v"):
            writer.add_linear(f"{block}.{name}", 3 * width if fused_qkv else width, width)
        writer.add_linear(f"{block}.attn_out", width, width)
        writer.add_linear(f"{block}.ffn_up", size.feed_forward_length, width)
        writer.add_linear(f"{block}.ffn_down", width, size.feed_forward_length)
        writer.add_norm(f"{block}.ln1", width)
        writer.add_norm(f"{block}.ln2", width)
    writer.add_norm("v.post_ln", width)


def _write_patch_embedding(writer: ModelWriter, name: str, width: int) -> None:
    # Large enough that the pixels of a patch outweigh its position.
    writer.add_noise(name, width, 3, PATCH_PIXELS, PATCH_PIXELS, scale=0.05, half=True)


def write_llava(path: Path, size: ProjectorSize = SMALLEST_SIZE) -> None:
    """Write a projector with a fixed number of tokens per image, one position each, causal.

    mtmd skips the last layer.
    """
    with ModelWriter(path, "clip", seed=8, kind="mmproj") as writer:
        write_projector_metadata(writer, "mlp", size, {})
        write_llava_tensors(writer, size)


def write_llava_tensors(writer: ModelWriter, size: ProjectorSize) -> None:
    """Add the tensors of llava's encoder and projection."""
    _write_encoder(writer, size, (size.image_pixels // PATCH_PIXELS) ** 2 + 1, fused_qkv=False)
    writer.add_noise("v.class_embd", size.embedding_length, scale=0.1)
    writer.add_norm("v.pre_ln", size.embedding_length)
    writer.add_linear("mm.0", size.text_embedding_length, size.embedding_length)
    writer.add_linear("mm.2", size.text_embedding_length, size.text_embedding_length)


def write_gemma3(path: Path, size: ProjectorSize = DEFAULT_SIZE) -> None:
    """Write a projector with a fixed number of tokens per image, which the text model decodes without a causal mask."""
    with ModelWriter(path, "clip", seed=9, kind="mmproj") as writer:
        write_projector_metadata(writer, "gemma3", size, {"projector.scale_factor": 2})
        _write_encoder(writer, size, (size.image_pixels // PATCH_PIXELS) ** 2, fused_qkv=False)
        writer.add_constant("v.patch_embd.bias", 0.0, size.embedding_length)
        writer.add_constant("mm.soft_emb_norm.weight", 1.0, size.embedding_length)
        # Stored transposed: mtmd transposes it.
        writer.add_noise(
            "mm.input_projection.weight",
            size.embedding_length,
            size.text_embedding_length,
            scale=size.embedding_length**-0.5,
        )


def write_qwen(path: Path, size: ProjectorSize = DEFAULT_SIZE, max_pixels: int = 128 * 128) -> None:
    """Write a projector whose tokens depend on the image size, with a grid of positions (M-RoPE).

    An image has fewer positions than tokens.
    """
    merged = 4 * size.embedding_length
    limits = {"spatial_merge_size": 2, "image_min_pixels": 32 * 32, "image_max_pixels": max_pixels}
    with ModelWriter(path, "clip", seed=10, kind="mmproj") as writer:
        write_projector_metadata(writer, "qwen3vl_merger", size, limits)
        _write_encoder(writer, size, (size.image_pixels // PATCH_PIXELS) ** 2, fused_qkv=True)
        # For the second frame of a pair; mtmd passes an image to both.
        _write_patch_embedding(writer, "v.patch_embd.weight.1", size.embedding_length)
        writer.add_constant("v.patch_embd.bias", 0.0, size.embedding_length)
        writer.add_linear("mm.0", merged, merged)
        writer.add_linear("mm.2", size.text_embedding_length, merged)
