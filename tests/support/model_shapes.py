"""Headers of well-known model shapes, without files: enough of them to plan their memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from afterglow.llama.gguf.header import GGUFHeader, MetadataValue, TensorInfo

GIB = 1024**3
Q4_BITS = 4.89  # average bits per weight of Q4_K_M


def build_header(
    architecture: str,
    numbers: dict[str, MetadataValue],
    *,
    layer_parameters: int,
    expert_parameters: int = 0,
    bits: float = Q4_BITS,
    tied: bool = False,
) -> GGUFHeader:
    """Return the header of a model with so many parameters in each layer, those of experts apart."""
    metadata: dict[str, MetadataValue] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{name}": value for name, value in numbers.items()}
    vocabulary = int(numbers["vocab_size"]) * int(numbers["embedding_length"])  # type: ignore[arg-type]
    sizes = {"token_embd.weight": vocabulary} | ({} if tied else {"output.weight": vocabulary})
    for layer in range(int(numbers["block_count"])):  # type: ignore[arg-type]
        sizes[f"blk.{layer}.attn_q.weight"] = layer_parameters
        if expert_parameters:
            sizes[f"blk.{layer}.ffn_up_exps.weight"] = expert_parameters
    tensors = tuple(TensorInfo(name, (count,), "Q4_K", 0, int(count * bits / 8)) for name, count in sizes.items())
    return GGUFHeader(Path("model.gguf"), 3, 32, metadata, {}, tensors, 0, 0)


def build_dense(
    layers: int, kv_heads: int, head: int, width: int, inner: int, vocabulary: int, context: int, *, tied: bool = False
) -> GGUFHeader:
    """Return the header of a dense model: layers, KV heads, head width, embedding and feed-forward length, …"""
    numbers: dict[str, MetadataValue] = {
        "block_count": layers, "attention.head_count": width // head, "attention.head_count_kv": kv_heads,
        "attention.key_length": head, "attention.value_length": head, "embedding_length": width,
        "feed_forward_length": inner, "vocab_size": vocabulary, "context_length": context,
    }  # fmt: skip
    parameters = 2 * width * width + 2 * width * kv_heads * head + 3 * width * inner
    return build_header("llama", numbers, layer_parameters=parameters, tied=tied)


def build_shapes() -> dict[str, GGUFHeader]:
    """Return twelve headers by name."""
    attention = {"attention.key_length": 128, "attention.value_length": 128}
    moe = build_header(
        "qwen3moe",
        {
            "block_count": 48, "attention.head_count": 32, "attention.head_count_kv": 4, **attention,
            "embedding_length": 2048, "feed_forward_length": 6144, "expert_count": 128, "expert_used_count": 8,
            "expert_feed_forward_length": 768, "vocab_size": 151_936, "context_length": 262_144,
        },
        layer_parameters=19_000_000,
        expert_parameters=128 * 3 * 2048 * 768,
    )  # fmt: skip
    window = build_header(
        "gpt-oss",
        {
            "block_count": 24, "attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 64,
            "attention.value_length": 64, "attention.sliding_window": 128, "embedding_length": 2880,
            "feed_forward_length": 2880, "expert_count": 32, "expert_used_count": 4,
            "expert_feed_forward_length": 2880, "vocab_size": 201_088, "context_length": 131_072,
        },
        layer_parameters=30_000_000,
        expert_parameters=32 * 3 * 2880 * 2880,
        bits=4.5,
    )  # fmt: skip
    hybrid = build_header(
        "qwen3next",
        {
            "block_count": 48, "attention.head_count": 16, "attention.head_count_kv": 2, "attention.key_length": 256,
            "attention.value_length": 256, "full_attention_interval": 4, "embedding_length": 2048,
            "feed_forward_length": 5120, "expert_count": 512, "expert_used_count": 10,
            "expert_feed_forward_length": 512, "ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128,
            "ssm.group_count": 16, "ssm.time_step_rank": 32, "vocab_size": 151_936, "context_length": 262_144,
        },
        layer_parameters=30_000_000,
        expert_parameters=512 * 3 * 2048 * 512,
    )  # fmt: skip
    mamba = build_header(
        "mamba",
        {
            "block_count": 64, "attention.head_count": 0, "embedding_length": 2560, "feed_forward_length": 0,
            "ssm.conv_kernel": 4, "ssm.inner_size": 5120, "ssm.state_size": 16, "ssm.time_step_rank": 160,
            "vocab_size": 50_280, "context_length": 1_048_576,
        },
        layer_parameters=41_000_000,
        tied=True,
    )  # fmt: skip
    gemma = build_header(
        "gemma3",
        {
            "block_count": 34, "attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 256,
            "attention.value_length": 256, "attention.sliding_window": 1024, "embedding_length": 2560,
            "feed_forward_length": 10_240, "vocab_size": 262_208, "context_length": 131_072,
            "attention.sliding_window_pattern": np.array([(layer + 1) % 6 != 0 for layer in range(34)]),
        },
        layer_parameters=95_000_000,
        tied=True,
    )  # fmt: skip
    return {
        "dense 0.5B": build_dense(24, 2, 64, 896, 4864, 151_936, 32_768, tied=True),
        "dense 1B": build_dense(16, 8, 64, 2048, 8192, 128_256, 131_072, tied=True),
        "dense 3B": build_dense(28, 8, 128, 3072, 8192, 128_256, 131_072, tied=True),
        "dense 8B": build_dense(32, 8, 128, 4096, 14_336, 128_256, 131_072),
        "dense 14B": build_dense(40, 8, 128, 5120, 17_408, 151_936, 40_960),
        "dense 32B": build_dense(64, 8, 128, 5120, 25_600, 151_936, 40_960),
        "dense 70B": build_dense(80, 8, 128, 8192, 28_672, 128_256, 131_072),
        "MoE 30B-A3B": moe,
        "MoE with windows 20B": window,
        "hybrid 80B-A3B": hybrid,
        "recurrent 2.8B": mamba,
        "multimodal with windows 4B": gemma,
    }


PROJECTOR_BYTES = {"multimodal with windows 4B": 850_000_000}
# Free RAM, and free memory of each GPU.
MEMORY_SIZES: dict[str, tuple[int, tuple[int, ...]]] = {
    "8 GiB": (8 * GIB, ()),
    "16 GiB": (16 * GIB, ()),
    "64 GiB": (64 * GIB, ()),
    "16 GiB, GPU 8 GiB": (16 * GIB, (8 * GIB,)),
    "32 GiB, GPU 24 GiB": (32 * GIB, (24 * GIB,)),
    "64 GiB, GPU 80 GiB": (64 * GIB, (80 * GIB,)),
}
