"""Models with an MTP head on full attention (hy_v3), and with a chain of several on a sliding window (step35)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from afterglow.testing.models.attention import ATTENTION_GAIN, write_feed_forward
from afterglow.testing.models.decoder import write_random_model
from afterglow.testing.models.hybrid import MTPHead, write_mtp_head
from afterglow.testing.models.writer import MetadataInput, ModelWriter, draw_noise


@dataclass(frozen=True, slots=True, kw_only=True)
class HyV3:
    """Full attention in every layer; each MTP head is an additional layer."""

    architecture: ClassVar[str] = "hy_v3"
    embedding_length: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    feed_forward_length: int = 128
    mtp_heads: tuple[MTPHead, ...] = ()
    embedding_gain: float = 1.0

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        return {
            "block_count": self.layers + len(self.mtp_heads),
            "nextn_predict_layers": len(self.mtp_heads),
            "feed_forward_length": self.feed_forward_length,
            "expert_feed_forward_length": self.feed_forward_length,  # required even without experts
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": 10_000.0,
        }

    def write_blocks(self, writer: ModelWriter, gain: float) -> None:
        for layer in range(self.layers):
            self._write_block(writer, f"blk.{layer}", gain)
        for index, head in enumerate(self.mtp_heads):
            block = f"blk.{self.layers + index}"
            self._write_block(writer, block, gain)
            write_mtp_head(writer, f"{block}.nextn", head, self.embedding_length)

    def _write_block(self, writer: ModelWriter, block: str, gain: float) -> None:
        writer.add_constant(f"{block}.attn_norm.weight", 1.0, self.embedding_length)
        writer.add_constant(f"{block}.ffn_norm.weight", 1.0, self.embedding_length)
        writer.add_constant(f"{block}.attn_q_norm.weight", ATTENTION_GAIN, self.head_size)
        writer.add_constant(f"{block}.attn_k_norm.weight", ATTENTION_GAIN, self.head_size)
        writer.add_matrix(f"{block}.attn_q.weight", self.heads * self.head_size, self.embedding_length)
        writer.add_matrix(f"{block}.attn_k.weight", self.kv_heads * self.head_size, self.embedding_length)
        writer.add_matrix(f"{block}.attn_v.weight", self.kv_heads * self.head_size, self.embedding_length)
        writer.add_matrix(f"{block}.attn_output.weight", self.embedding_length, self.heads * self.head_size, gain=gain)
        write_feed_forward(writer, block, self.embedding_length, self.feed_forward_length, gain=gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step35(HyV3):
    """The same blocks, but every second layer has a sliding window."""

    architecture: ClassVar[str] = "step35"
    sliding_window: int = 32
    mtp_heads_windowed: bool = False

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        pattern = [layer % 2 == 0 for layer in range(self.layers)] + [self.mtp_heads_windowed] * len(self.mtp_heads)
        windows: dict[str, MetadataInput] = {
            "attention.sliding_window": self.sliding_window,
            "attention.sliding_window_pattern": tuple(pattern),
        }
        return {**HyV3.build_metadata(self), **windows}


def write_mtp_model(path: Path, decoder: HyV3, *, heads: int) -> None:
    """Write a random model with `heads` MTP heads."""
    seed, width = 9, decoder.embedding_length
    mtp_heads = [
        MTPHead(draw_noise(seed, f"fusion {n}", width, 2 * width, scale=(2 * width) ** -0.5)) for n in range(heads)
    ]
    write_random_model(path, replace(decoder, mtp_heads=tuple(mtp_heads)), seed=seed)
