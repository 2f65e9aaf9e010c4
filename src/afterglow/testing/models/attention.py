"""Attention models: llama, also with experts, and gemma3 with a sliding window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from afterglow.testing.models.writer import MetadataInput, ModelWriter

# With scores of unit variance, attention would average over a long context until no token has an effect.
ATTENTION_GAIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """Full attention: every token stays in the KV cache."""

    architecture: ClassVar[str] = "llama"
    embedding_length: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    feed_forward_length: int = 128
    embedding_gain: float = 1.0
    head_size: int = 16

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        sizes = {"attention.key_length": self.head_size, "attention.value_length": self.head_size}
        return {
            **(sizes if self.heads * self.head_size != self.embedding_length else {}),
            "block_count": self.layers,
            "feed_forward_length": self.feed_forward_length,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": 10_000.0,
        }

    def write_blocks(self, writer: ModelWriter, gain: float) -> None:
        width, queries, keys = self.embedding_length, self.heads * self.head_size, self.kv_heads * self.head_size
        for layer in range(self.layers):
            block = f"blk.{layer}"
            writer.add_constant(f"{block}.attn_norm.weight", 1.0, width)
            writer.add_constant(f"{block}.ffn_norm.weight", 1.0, width)
            writer.add_matrix(f"{block}.attn_q.weight", queries, width, gain=ATTENTION_GAIN)
            writer.add_matrix(f"{block}.attn_k.weight", keys, width, gain=ATTENTION_GAIN)
            writer.add_matrix(f"{block}.attn_v.weight", keys, width)
            writer.add_matrix(f"{block}.attn_output.weight", width, queries, gain=gain)
            self.write_feed_forward(writer, block, gain)

    def write_feed_forward(self, writer: ModelWriter, block: str, gain: float) -> None:
        """Add the feed-forward network of one block."""
        write_feed_forward(writer, block, self.embedding_length, self.feed_forward_length, gain=gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts(Llama):
    """Full attention, and a feed-forward network of experts in every layer."""

    experts: int = 4
    experts_used: int = 2

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        counts = {"expert_count": self.experts, "expert_used_count": self.experts_used}
        return {**Llama.build_metadata(self), **counts}

    def write_feed_forward(self, writer: ModelWriter, block: str, gain: float) -> None:
        width, inner = self.embedding_length, self.feed_forward_length
        writer.add_matrix(f"{block}.ffn_gate_inp.weight", self.experts, width)
        for name in ("gate", "up"):
            writer.add_noise(f"{block}.ffn_{name}_exps.weight", self.experts, inner, width, scale=width**-0.5)
        writer.add_noise(f"{block}.ffn_down_exps.weight", self.experts, width, inner, scale=gain * inner**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3:
    """Sliding-window attention in five of six layers."""

    architecture: ClassVar[str] = "gemma3"
    embedding_length: int = 64
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    feed_forward_length: int = 128
    sliding_window: int = 32

    @property
    def embedding_gain(self) -> float:
        return math.sqrt(self.embedding_length)

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        return {
            "block_count": self.layers,
            "feed_forward_length": self.feed_forward_length,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": self.sliding_window,
            "rope.freq_base": 1_000_000.0,
        }

    def write_blocks(self, writer: ModelWriter, gain: float) -> None:
        for layer in range(self.layers):
            block = f"blk.{layer}"
            writer.add_constant(f"{block}.attn_norm.weight", 1.0, self.embedding_length)
            writer.add_constant(f"{block}.ffn_norm.weight", 1.0, self.embedding_length)
            # The output of a block is normalized, so only the norm can scale it.
            writer.add_constant(f"{block}.post_attention_norm.weight", gain, self.embedding_length)
            writer.add_constant(f"{block}.post_ffw_norm.weight", gain, self.embedding_length)
            writer.add_constant(f"{block}.attn_q_norm.weight", ATTENTION_GAIN, self.head_size)
            writer.add_constant(f"{block}.attn_k_norm.weight", ATTENTION_GAIN, self.head_size)
            writer.add_matrix(f"{block}.attn_q.weight", self.heads * self.head_size, self.embedding_length)
            writer.add_matrix(f"{block}.attn_k.weight", self.kv_heads * self.head_size, self.embedding_length)
            writer.add_matrix(f"{block}.attn_v.weight", self.kv_heads * self.head_size, self.embedding_length)
            writer.add_matrix(f"{block}.attn_output.weight", self.embedding_length, self.heads * self.head_size)
            write_feed_forward(writer, block, self.embedding_length, self.feed_forward_length, gain=1.0)


def write_feed_forward(writer: ModelWriter, block: str, width: int, feed_forward_length: int, *, gain: float) -> None:
    """Add the gated feed-forward network of one block."""
    writer.add_matrix(f"{block}.ffn_gate.weight", feed_forward_length, width)
    writer.add_matrix(f"{block}.ffn_up.weight", feed_forward_length, width)
    writer.add_matrix(f"{block}.ffn_down.weight", width, feed_forward_length, gain=gain)
