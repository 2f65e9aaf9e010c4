"""A model with both kinds of memory: qwen35, where gated delta nets and attention take turns, and its MTP head.

It knows the architecture's settings and tensors, not what the model or its head say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from afterglow.tiny.attention import SHARPNESS, feed_forward
from afterglow.tiny.decoder import write_random
from afterglow.tiny.writer import Array, Value, Writer, noise


@dataclass(frozen=True, slots=True)
class DraftHead:
    """What the MTP block has of its own: it reads a token and the hidden state before it, and drafts the next."""

    fusion: Array  # (embedding, 2 x embedding): the token's half comes first
    embedding: Array | None = None  # its own table of tokens; without one it reads the model's


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35:
    """Every second layer attends, the others keep a state; the MTP block, if any, is a layer more and attends."""

    architecture: ClassVar[str] = "qwen35"
    embedding: int = 64
    layers: int = 4
    interval: int = 2
    heads: int = 2
    key_heads: int = 1
    head: int = 32
    feed_forward: int = 128
    state: int = 16
    state_key_heads: int = 2
    state_heads: int = 4
    kernel: int = 4
    draft: DraftHead | None = None
    embedding_gain: float = 1.0

    def settings(self) -> Mapping[str, Value]:
        plain: dict[str, Value] = {
            "block_count": self.layers + (self.draft is not None),
            "feed_forward_length": self.feed_forward,
            "full_attention_interval": self.interval,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.key_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": 16,
            "rope.dimension_sections": (3, 3, 2, 0),  # time, height, width: together half of the dimensions
            "rope.freq_base": 10_000.0,
            "ssm.conv_kernel": self.kernel,
            "ssm.inner_size": self.state * self.state_heads,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.state_heads,
            "ssm.group_count": self.state_key_heads,
        }
        return plain if self.draft is None else {**plain, "nextn_predict_layers": 1}

    def blocks(self, writer: Writer, gain: float) -> None:
        for layer in range(self.layers):
            attends = (layer + 1) % self.interval == 0
            self._block(writer, f"blk.{layer}", gain, attends=attends)
        if self.draft is not None:
            block = f"blk.{self.layers}"
            self._block(writer, block, gain, attends=True)
            write_draft_head(writer, f"{block}.nextn", self.draft, self.embedding)

    def _block(self, writer: Writer, block: str, gain: float, *, attends: bool) -> None:
        writer.constant(f"{block}.attn_norm.weight", 1.0, self.embedding)
        writer.constant(f"{block}.post_attention_norm.weight", 1.0, self.embedding)
        (self._attention if attends else self._delta_net)(writer, block, gain)
        feed_forward(writer, block, self.embedding, self.feed_forward, gain=gain)

    def _attention(self, writer: Writer, block: str, gain: float) -> None:
        # Each head's query is followed by its output gate, hence twice the rows.
        writer.matrix(f"{block}.attn_q.weight", 2 * self.heads * self.head, self.embedding)
        writer.matrix(f"{block}.attn_k.weight", self.key_heads * self.head, self.embedding)
        writer.matrix(f"{block}.attn_v.weight", self.key_heads * self.head, self.embedding)
        writer.constant(f"{block}.attn_q_norm.weight", SHARPNESS, self.head)
        writer.constant(f"{block}.attn_k_norm.weight", SHARPNESS, self.head)
        writer.matrix(f"{block}.attn_output.weight", self.embedding, self.heads * self.head, gain=gain)

    def _delta_net(self, writer: Writer, block: str, gain: float) -> None:
        values = self.state * self.state_heads
        channels = 2 * self.state * self.state_key_heads + values
        # llama.cpp reads the decay as it is used, -exp(A_log). The first head forgets slowly, the last at once.
        decay = -np.linspace(0.02, 2.0, self.state_heads, dtype=np.float32)
        writer.matrix(f"{block}.attn_qkv.weight", channels, self.embedding)
        writer.matrix(f"{block}.attn_gate.weight", values, self.embedding)
        writer.matrix(f"{block}.ssm_conv1d.weight", channels, self.kernel)
        writer.constant(f"{block}.ssm_dt.bias", -1.0, self.state_heads)
        writer.given(f"{block}.ssm_a", decay)
        writer.matrix(f"{block}.ssm_beta.weight", self.state_heads, self.embedding)
        writer.matrix(f"{block}.ssm_alpha.weight", self.state_heads, self.embedding)
        writer.constant(f"{block}.ssm_norm.weight", 1.0, self.state)
        writer.matrix(f"{block}.ssm_out.weight", self.embedding, values, gain=gain)


def write_draft_head(writer: Writer, block: str, draft: DraftHead, width: int) -> None:
    """Add what a head has beside its own block, in every architecture that llama.cpp runs them for."""
    writer.given(f"{block}.eh_proj.weight", draft.fusion)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        writer.constant(f"{block}.{norm}.weight", 1.0, width)
    if draft.embedding is not None:
        writer.given(f"{block}.embed_tokens.weight", draft.embedding)


def write_hybrid(path: Path, *, draft: bool) -> None:
    """Write a random model; the one with a head has the same trunk as the one without, and says the same."""
    seed, width = 5, Qwen35().embedding
    head = DraftHead(noise(seed, "fusion", width, 2 * width, scale=(2 * width) ** -0.5)) if draft else None
    write_random(path, Qwen35(draft=head), seed=seed)


RECIPES: dict[str, Callable[[Path], None]] = {
    "hybrid": partial(write_hybrid, draft=False),
    "hybrid-mtp": partial(write_hybrid, draft=True),
}
