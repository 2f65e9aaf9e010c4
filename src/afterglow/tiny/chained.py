"""Models with MTP heads on plain attention (hy_v3), and with several on a sliding window (step35), which are asked one
after the other.

It knows the architectures' settings and tensors, not what the models or their heads say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from afterglow.tiny.attention import SHARPNESS, feed_forward
from afterglow.tiny.decoder import write_random
from afterglow.tiny.hybrid import DraftHead, write_draft_head
from afterglow.tiny.writer import Value, Writer, noise


@dataclass(frozen=True, slots=True, kw_only=True)
class HyV3:
    """Every layer sees everything; each of the heads is a layer more."""

    architecture: ClassVar[str] = "hy_v3"
    embedding: int = 64
    layers: int = 4
    heads: int = 4
    key_heads: int = 2
    head: int = 16
    feed_forward: int = 128
    drafts: tuple[DraftHead, ...] = ()
    embedding_gain: float = 1.0

    def settings(self) -> Mapping[str, Value]:
        return {
            "block_count": self.layers + len(self.drafts),
            "nextn_predict_layers": len(self.drafts),
            "feed_forward_length": self.feed_forward,
            "expert_feed_forward_length": self.feed_forward,  # asked for, also where there are no experts
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.key_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": self.head,
            "rope.freq_base": 10_000.0,
        }

    def blocks(self, writer: Writer, gain: float) -> None:
        for layer in range(self.layers):
            self._block(writer, f"blk.{layer}", gain)
        for number, draft in enumerate(self.drafts):
            block = f"blk.{self.layers + number}"
            self._block(writer, block, gain)
            write_draft_head(writer, f"{block}.nextn", draft, self.embedding)

    def _block(self, writer: Writer, block: str, gain: float) -> None:
        writer.constant(f"{block}.attn_norm.weight", 1.0, self.embedding)
        writer.constant(f"{block}.ffn_norm.weight", 1.0, self.embedding)
        writer.constant(f"{block}.attn_q_norm.weight", SHARPNESS, self.head)
        writer.constant(f"{block}.attn_k_norm.weight", SHARPNESS, self.head)
        writer.matrix(f"{block}.attn_q.weight", self.heads * self.head, self.embedding)
        writer.matrix(f"{block}.attn_k.weight", self.key_heads * self.head, self.embedding)
        writer.matrix(f"{block}.attn_v.weight", self.key_heads * self.head, self.embedding)
        writer.matrix(f"{block}.attn_output.weight", self.embedding, self.heads * self.head, gain=gain)
        feed_forward(writer, block, self.embedding, self.feed_forward, gain=gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step35(HyV3):
    """The same blocks, but every second layer sees only a window."""

    architecture: ClassVar[str] = "step35"
    window: int = 32
    drafts_windowed: bool = False  # or they see everything

    def settings(self) -> Mapping[str, Value]:
        pattern = [layer % 2 == 0 for layer in range(self.layers)] + [self.drafts_windowed] * len(self.drafts)
        windows: dict[str, Value] = {
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": tuple(pattern),
        }
        return {**HyV3.settings(self), **windows}


def write_headed(path: Path, decoder: HyV3, *, heads: int) -> None:
    """Write a random model with so many heads."""
    seed, width = 9, decoder.embedding
    drafts = [DraftHead(noise(seed, f"fusion {n}", width, 2 * width, scale=(2 * width) ** -0.5)) for n in range(heads)]
    write_random(path, replace(decoder, drafts=tuple(drafts)), seed=seed)


RECIPES: dict[str, Callable[[Path], None]] = {
    "attention-mtp": partial(write_headed, decoder=HyV3(), heads=1),
    "window-chained": partial(write_headed, decoder=Step35(), heads=2),
    "window-chained-short": partial(write_headed, decoder=Step35(drafts_windowed=True), heads=2),
}
