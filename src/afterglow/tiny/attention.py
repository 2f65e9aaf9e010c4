"""Models whose memory is keys and values: llama, and gemma3 with a sliding window.

It knows the two architectures' settings and tensors, not what the models say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from afterglow.tiny.decoder import write_random
from afterglow.tiny.writer import Value, Writer

# Scores of unit variance would average over a long past until nothing of it is left.
SHARPNESS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """Plain attention: every token stays in memory."""

    architecture: ClassVar[str] = "llama"
    embedding: int = 64
    layers: int = 3
    heads: int = 4
    key_heads: int = 2
    feed_forward: int = 128
    embedding_gain: float = 1.0

    @property
    def head(self) -> int:
        return self.embedding // self.heads

    def settings(self) -> Mapping[str, Value]:
        return {
            "block_count": self.layers,
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.key_heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.head,
            "rope.freq_base": 10_000.0,
        }

    def blocks(self, writer: Writer, gain: float) -> None:
        for layer in range(self.layers):
            block = f"blk.{layer}"
            writer.constant(f"{block}.attn_norm.weight", 1.0, self.embedding)
            writer.constant(f"{block}.ffn_norm.weight", 1.0, self.embedding)
            writer.matrix(f"{block}.attn_q.weight", self.heads * self.head, self.embedding, gain=SHARPNESS)
            writer.matrix(f"{block}.attn_k.weight", self.key_heads * self.head, self.embedding, gain=SHARPNESS)
            writer.matrix(f"{block}.attn_v.weight", self.key_heads * self.head, self.embedding)
            writer.matrix(f"{block}.attn_output.weight", self.embedding, self.heads * self.head, gain=gain)
            feed_forward(writer, block, self.embedding, self.feed_forward, gain=gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3:
    """Sliding-window attention: five layers of six forget what is older than the window."""

    architecture: ClassVar[str] = "gemma3"
    embedding: int = 64
    layers: int = 6
    heads: int = 4
    key_heads: int = 2
    head: int = 16
    feed_forward: int = 128
    window: int = 32

    @property
    def embedding_gain(self) -> float:
        return math.sqrt(self.embedding)

    def settings(self) -> Mapping[str, Value]:
        return {
            "block_count": self.layers,
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.key_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": self.window,
            "rope.freq_base": 1_000_000.0,
        }

    def blocks(self, writer: Writer, gain: float) -> None:
        for layer in range(self.layers):
            block = f"blk.{layer}"
            writer.constant(f"{block}.attn_norm.weight", 1.0, self.embedding)
            writer.constant(f"{block}.ffn_norm.weight", 1.0, self.embedding)
            # What a block adds is normalized first, so only the norm can make it louder or silent.
            writer.constant(f"{block}.post_attention_norm.weight", gain, self.embedding)
            writer.constant(f"{block}.post_ffw_norm.weight", gain, self.embedding)
            writer.constant(f"{block}.attn_q_norm.weight", SHARPNESS, self.head)
            writer.constant(f"{block}.attn_k_norm.weight", SHARPNESS, self.head)
            writer.matrix(f"{block}.attn_q.weight", self.heads * self.head, self.embedding)
            writer.matrix(f"{block}.attn_k.weight", self.key_heads * self.head, self.embedding)
            writer.matrix(f"{block}.attn_v.weight", self.key_heads * self.head, self.embedding)
            writer.matrix(f"{block}.attn_output.weight", self.embedding, self.heads * self.head)
            feed_forward(writer, block, self.embedding, self.feed_forward, gain=1.0)


def feed_forward(writer: Writer, block: str, width: int, inner: int, *, gain: float) -> None:
    """Add the gated feed-forward network of one block."""
    writer.matrix(f"{block}.ffn_gate.weight", inner, width)
    writer.matrix(f"{block}.ffn_up.weight", inner, width)
    writer.matrix(f"{block}.ffn_down.weight", width, inner, gain=gain)


RECIPES: dict[str, Callable[[Path], None]] = {
    "attention": partial(write_random, decoder=Llama(), seed=1),
    "draft": partial(
        write_random, decoder=Llama(embedding=32, layers=1, heads=2, key_heads=1, feed_forward=64), seed=2
    ),
    "window": partial(write_random, decoder=Gemma3(), seed=3),
}
