"""Vision projectors: a small image encoder and the last step into a text model's embedding, in three dialects.

It knows what mtmd reads for llava (with llama), gemma3 (with gemma3) and qwen3vl_merger (with qwen35).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from afterglow.tiny.writer import Value, Writer

WIDTH, HEADS, PATCH = 32, 2, 8
INNER = 64  # must differ from WIDTH: mtmd tells old files with ffn_up and ffn_down swapped by their shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a projector is; `text` is the width of the model that it is for."""

    width: int = WIDTH
    inner: int = INNER
    heads: int = HEADS
    layers: int = 2
    image: int = 64  # pixels on a side
    text: int = 64


TINY = Size()
SMALLEST = Size(layers=3, image=32)


def describe_projector(writer: Writer, dialect: str, size: Size, more: Mapping[str, Value]) -> None:
    """Add what mtmd has to know of a projector."""
    writer.settings("clip", {"has_vision_encoder": True, "projector_type": dialect, "use_gelu": dialect != "mlp"})
    writer.settings("clip.vision", {**vision_settings(size), **more})


def vision_settings(size: Size) -> dict[str, Value]:
    """What is said of every image encoder."""
    return {
        "embedding_length": size.width,
        "feed_forward_length": size.inner,
        "block_count": size.layers,
        "projection_dim": size.text,
        "image_size": size.image,
        "patch_size": PATCH,
        "attention.head_count": size.heads,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    }


def _encoder(writer: Writer, size: Size, positions: int, *, joined: bool) -> None:
    """Add the image encoder; `joined` stores queries, keys and values as one matrix."""
    width = size.width
    _patches(writer, "v.patch_embd.weight", width)
    writer.noise("v.position_embd.weight", positions, width, scale=0.1)
    for layer in range(size.layers):
        block = f"v.blk.{layer}"
        for name in ("attn_qkv",) if joined else ("attn_q", "attn_k", "attn_v"):
            writer.linear(f"{block}.{name}", 3 * width if joined else width, width)
        writer.linear(f"{block}.attn_out", width, width)
        writer.linear(f"{block}.ffn_up", size.inner, width)
        writer.linear(f"{block}.ffn_down", width, size.inner)
        writer.norm(f"{block}.ln1", width)
        writer.norm(f"{block}.ln2", width)
    writer.norm("v.post_ln", width)


def _patches(writer: Writer, name: str, width: int) -> None:
    # Large enough that what a patch shows outweighs where it is.
    writer.noise(name, width, 3, PATCH, PATCH, scale=0.05, half=True)


def write_llava(path: Path, size: Size = SMALLEST) -> None:
    """A fixed number of tokens per image, one position each, attended causally. The last layer is skipped by mtmd."""
    with Writer(path, "clip", seed=8, kind="mmproj") as writer:
        describe_projector(writer, "mlp", size, {})
        add_llava(writer, size)


def add_llava(writer: Writer, size: Size) -> None:
    """Add the tensors of llava's encoder and its last step."""
    _encoder(writer, size, (size.image // PATCH) ** 2 + 1, joined=False)
    writer.noise("v.class_embd", size.width, scale=0.1)
    writer.norm("v.pre_ln", size.width)
    writer.linear("mm.0", size.text, size.width)
    writer.linear("mm.2", size.text, size.text)


def write_gemma3(path: Path, size: Size = TINY) -> None:
    """A fixed number of tokens per image, which see one another: the text model decodes them without a causal mask."""
    with Writer(path, "clip", seed=9, kind="mmproj") as writer:
        describe_projector(writer, "gemma3", size, {"projector.scale_factor": 2})
        _encoder(writer, size, (size.image // PATCH) ** 2, joined=False)
        writer.constant("v.patch_embd.bias", 0.0, size.width)
        writer.constant("mm.soft_emb_norm.weight", 1.0, size.width)
        # Stored the other way round than a linear map: mtmd transposes it.
        writer.noise("mm.input_projection.weight", size.width, size.text, scale=size.width**-0.5)


def write_qwen(path: Path, size: Size = TINY, pixels: int = 128 * 128) -> None:
    """As many tokens as the image is large, on a grid of positions: fewer positions pass than tokens (M-RoPE)."""
    merged = 4 * size.width
    limits = {"spatial_merge_size": 2, "image_min_pixels": 32 * 32, "image_max_pixels": pixels}
    with Writer(path, "clip", seed=10, kind="mmproj") as writer:
        describe_projector(writer, "qwen3vl_merger", size, limits)
        _encoder(writer, size, (size.image // PATCH) ** 2, joined=True)
        _patches(writer, "v.patch_embd.weight.1", size.width)  # for the second frame of a pair; it is shown to both
        writer.constant("v.patch_embd.bias", 0.0, size.width)
        writer.linear("mm.0", merged, merged)
        writer.linear("mm.2", size.text, merged)


RECIPES: dict[str, Callable[[Path], None]] = {
    "projector-llava": write_llava,
    "projector-gemma3": write_gemma3,
    "projector-qwen": write_qwen,
}
