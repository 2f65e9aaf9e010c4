"""Vision projectors: a small image encoder and the last step into a text model's embedding, in three dialects.

It knows what mtmd reads for llava (with llama), gemma3 (with gemma3) and qwen3vl_merger (with qwen35).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from afterglow.tiny.writer import Value, Writer

WIDTH, HEADS, PATCH = 32, 2, 8
INNER = 64  # must differ from WIDTH: mtmd tells old files with ffn_up and ffn_down swapped by their shapes
TEXT_WIDTH = 64


def describe_projector(writer: Writer, dialect: str, layers: int, image: int, more: Mapping[str, Value]) -> None:
    """Add what mtmd has to know of a projector."""
    writer.settings("clip", {"has_vision_encoder": True, "projector_type": dialect, "use_gelu": dialect != "mlp"})
    writer.settings(
        "clip.vision",
        {
            "embedding_length": WIDTH,
            "feed_forward_length": INNER,
            "block_count": layers,
            "projection_dim": TEXT_WIDTH,
            "image_size": image,
            "patch_size": PATCH,
            "attention.head_count": HEADS,
            "attention.layer_norm_epsilon": 1e-6,
            "image_mean": (0.5, 0.5, 0.5),
            "image_std": (0.5, 0.5, 0.5),
            **more,
        },
    )


def _encoder(writer: Writer, layers: int, positions: int, *, joined: bool) -> None:
    """Add the image encoder; `joined` stores queries, keys and values as one matrix."""
    _patches(writer, "v.patch_embd.weight")
    writer.noise("v.position_embd.weight", positions, WIDTH, scale=0.1)
    for layer in range(layers):
        block = f"v.blk.{layer}"
        for name in ("attn_qkv",) if joined else ("attn_q", "attn_k", "attn_v"):
            writer.linear(f"{block}.{name}", 3 * WIDTH if joined else WIDTH, WIDTH)
        writer.linear(f"{block}.attn_out", WIDTH, WIDTH)
        writer.linear(f"{block}.ffn_up", INNER, WIDTH)
        writer.linear(f"{block}.ffn_down", WIDTH, INNER)
        writer.norm(f"{block}.ln1", WIDTH)
        writer.norm(f"{block}.ln2", WIDTH)
    writer.norm("v.post_ln", WIDTH)


def _patches(writer: Writer, name: str) -> None:
    # Large enough that what a patch shows outweighs where it is.
    writer.noise(name, WIDTH, 3, PATCH, PATCH, scale=0.05, half=True)


def write_llava(path: Path) -> None:
    """A fixed number of tokens per image, one position each, attended causally."""
    layers, image = 3, 32  # mtmd skips the last layer of this dialect
    with Writer(path, "clip", seed=8, kind="mmproj") as writer:
        describe_projector(writer, "mlp", layers, image, {})
        _encoder(writer, layers, (image // PATCH) ** 2 + 1, joined=False)
        writer.noise("v.class_embd", WIDTH, scale=0.1)
        writer.norm("v.pre_ln", WIDTH)
        writer.linear("mm.0", TEXT_WIDTH, WIDTH)
        writer.linear("mm.2", TEXT_WIDTH, TEXT_WIDTH)


def write_gemma3(path: Path) -> None:
    """A fixed number of tokens per image, which see one another: the text model decodes them without a causal mask."""
    layers, image = 2, 64
    with Writer(path, "clip", seed=9, kind="mmproj") as writer:
        describe_projector(writer, "gemma3", layers, image, {"projector.scale_factor": 2})
        _encoder(writer, layers, (image // PATCH) ** 2, joined=False)
        writer.constant("v.patch_embd.bias", 0.0, WIDTH)
        writer.constant("mm.soft_emb_norm.weight", 1.0, WIDTH)
        # Stored the other way round than a linear map: mtmd transposes it.
        writer.noise("mm.input_projection.weight", WIDTH, TEXT_WIDTH, scale=WIDTH**-0.5)


def write_qwen(path: Path) -> None:
    """As many tokens as the image is large, on a grid of positions: fewer positions pass than tokens (M-RoPE)."""
    layers, image, merged = 2, 64, 4 * WIDTH
    limits = {"spatial_merge_size": 2, "image_min_pixels": 32 * 32, "image_max_pixels": 128 * 128}
    with Writer(path, "clip", seed=10, kind="mmproj") as writer:
        describe_projector(writer, "qwen3vl_merger", layers, image, limits)
        _encoder(writer, layers, (image // PATCH) ** 2, joined=True)
        _patches(writer, "v.patch_embd.weight.1")  # for the second frame of a pair; a picture is shown to both
        writer.constant("v.patch_embd.bias", 0.0, WIDTH)
        writer.linear("mm.0", merged, merged)
        writer.linear("mm.2", TEXT_WIDTH, merged)


RECIPES: dict[str, Callable[[Path], None]] = {
    "projector-llava": write_llava,
    "projector-gemma3": write_gemma3,
    "projector-qwen": write_qwen,
}
