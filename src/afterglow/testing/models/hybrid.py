"""Hybrid model: qwen35, with alternating gated delta nets and attention, and its MTP head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from afterglow.testing.models.attention import ATTENTION_GAIN, write_feed_forward
from afterglow.testing.models.decoder import write_random_model
from afterglow.testing.models.writer import FloatArray, MetadataInput, ModelWriter, draw_noise


@dataclass(frozen=True, slots=True)
class MTPHead:
    """Weights of an MTP head, which drafts the next token from a token and the hidden state before it."""

    fusion: FloatArray  # (embedding, 2 x embedding): the token's half comes first
    token_embedding: FloatArray | None = None  # None: the model's


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35:
    """Every second layer is attention, the others are recurrent; an MTP head is an additional attention layer."""

    architecture: ClassVar[str] = "qwen35"
    embedding_length: int = 64
    layers: int = 4
    full_attention_interval: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_size: int = 32
    feed_forward_length: int = 128
    state_size: int = 16
    state_key_heads: int = 2
    state_heads: int = 4
    conv_kernel: int = 4
    mtp_head: MTPHead | None = None
    embedding_gain: float = 1.0

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        plain: dict[str, MetadataInput] = {
            "block_count": self.layers + (self.mtp_head is not None),
            "feed_forward_length": self.feed_forward_length,
            "full_attention_interval": self.full_attention_interval,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": 16,
            "rope.dimension_sections": (3, 3, 2, 0),  # time, height, width: together half of the dimensions
            "rope.freq_base": 10_000.0,
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.inner_size": self.state_size * self.state_heads,
            "ssm.state_size": self.state_size,
            "ssm.time_step_rank": self.state_heads,
            "ssm.group_count": self.state_key_heads,
        }
        return plain if self.mtp_head is None else {**plain, "nextn_predict_layers": 1}

    def write_blocks(self, writer: ModelWriter, gain: float) -> None:
        for layer in range(self.layers):
            attends = (layer + 1) % self.full_attention_interval == 0
            self._write_block(writer, f"blk.{layer}", gain, attends=attends)
        if self.mtp_head is not None:
            block = f"blk.{self.layers}"
            self._write_block(writer, block, gain, attends=True)
            write_mtp_head(writer, f"{block}.nextn", self.mtp_head, self.embedding_length)

    def _write_block(self, writer: ModelWriter, block: str, gain: float, *, attends: bool) -> None:
        writer.add_constant(f"{block}.attn_norm.weight", 1.0, self.embedding_length)
        writer.add_constant(f"{block}.post_attention_norm.weight", 1.0, self.embedding_length)
        (self._write_attention if attends else self._write_delta_net)(writer, block, gain)
        write_feed_forward(writer, block, self.embedding_length, self.feed_forward_length, gain=gain)

    def _write_attention(self, writer: ModelWriter, block: str, gain: float) -> None:
        # Each head's query is followed by its output gate, hence twice the rows.
        writer.add_matrix(f"{block}.attn_q.weight", 2 * self.heads * self.head_size, self.embedding_length)
        writer.add_matrix(f"{block}.attn_k.weight", self.kv_heads * self.head_size, self.embedding_length)
        writer.add_matrix(f"{block}.attn_v.weight", self.kv_heads * self.head_size, self.embedding_length)
        writer.add_constant(f"{block}.attn_q_norm.weight", ATTENTION_GAIN, self.head_size)
        writer.add_constant(f"{block}.attn_k_norm.weight", ATTENTION_GAIN, self.head_size)
        writer.add_matrix(f"{block}.attn_output.weight", self.embedding_length, self.heads * self.head_size, gain=gain)

    def _write_delta_net(self, writer: ModelWriter, block: str, gain: float) -> None:
        values = self.state_size * self.state_heads
        channels = 2 * self.state_size * self.state_key_heads + values
        # llama.cpp reads the decay as -exp(A_log). The first head decays slowly, the last immediately.
        decay = -np.linspace(0.02, 2.0, self.state_heads, dtype=np.float32)
        writer.add_matrix(f"{block}.attn_qkv.weight", channels, self.embedding_length)
        writer.add_matrix(f"{block}.attn_gate.weight", values, self.embedding_length)
        writer.add_matrix(f"{block}.ssm_conv1d.weight", channels, self.conv_kernel)
        writer.add_constant(f"{block}.ssm_dt.bias", -1.0, self.state_heads)
        writer.add_tensor(f"{block}.ssm_a", decay)
        writer.add_matrix(f"{block}.ssm_beta.weight", self.state_heads, self.embedding_length)
        writer.add_matrix(f"{block}.ssm_alpha.weight", self.state_heads, self.embedding_length)
        writer.add_constant(f"{block}.ssm_norm.weight", 1.0, self.state_size)
        writer.add_matrix(f"{block}.ssm_out.weight", self.embedding_length, values, gain=gain)


def write_mtp_head(writer: ModelWriter, block: str, head: MTPHead, width: int) -> None:
    """Add the tensors of an MTP head outside its block, equal in every architecture that llama.cpp supports."""
    writer.add_tensor(f"{block}.eh_proj.weight", head.fusion)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        writer.add_constant(f"{block}.{norm}.weight", 1.0, width)
    if head.token_embedding is not None:
        writer.add_tensor(f"{block}.embed_tokens.weight", head.token_embedding)


def write_hybrid(path: Path, *, mtp: bool) -> None:
    """Write a random model. With and without a head, the trunk and the output are the same."""
    seed, width = 5, Qwen35().embedding_length
    head = MTPHead(draw_noise(seed, "fusion", width, 2 * width, scale=(2 * width) ** -0.5)) if mtp else None
    write_random_model(path, Qwen35(mtp_head=head), seed=seed)
