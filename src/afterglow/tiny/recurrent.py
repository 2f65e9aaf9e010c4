"""A model whose memory is one state per layer and no cells: mamba.

It knows the architecture's settings and tensors, not what the model says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from afterglow.tiny.decoder import write_random
from afterglow.tiny.writer import Value, Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Selective state space: the past is folded into a state of fixed size."""

    architecture: ClassVar[str] = "mamba"
    embedding: int = 64
    layers: int = 3
    state: int = 16
    step_rank: int = 4
    kernel: int = 4
    embedding_gain: float = 1.0

    @property
    def inner(self) -> int:
        return 2 * self.embedding  # llama.cpp accepts no other factor

    def settings(self) -> Mapping[str, Value]:
        return {
            "block_count": self.layers,
            # Both keys are required even where there is neither attention nor a feed-forward network.
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "ssm.conv_kernel": self.kernel,
            "ssm.inner_size": self.inner,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.step_rank,
        }

    def blocks(self, writer: Writer, gain: float) -> None:
        decay = -np.tile(np.arange(1, self.state + 1, dtype=np.float32), (self.inner, 1))
        # Channels with long steps hold the last tokens, those with short steps hundreds. A short step also writes
        # little into the state, which the large gain of what is written and read (ssm_x) makes up for.
        step = np.linspace(-6.0, -1.0, self.inner, dtype=np.float32)
        for layer in range(self.layers):
            block = f"blk.{layer}"
            writer.constant(f"{block}.attn_norm.weight", 1.0, self.embedding)
            writer.matrix(f"{block}.ssm_in.weight", 2 * self.inner, self.embedding)
            writer.matrix(f"{block}.ssm_conv1d.weight", self.inner, self.kernel)
            writer.constant(f"{block}.ssm_conv1d.bias", 0.0, self.inner)
            writer.matrix(f"{block}.ssm_x.weight", self.step_rank + 2 * self.state, self.inner, gain=8.0)
            writer.matrix(f"{block}.ssm_dt.weight", self.inner, self.step_rank, gain=0.25)
            writer.given(f"{block}.ssm_dt.bias", step)
            writer.given(f"{block}.ssm_a", decay)
            writer.constant(f"{block}.ssm_d", 1.0, self.inner)
            writer.matrix(f"{block}.ssm_out.weight", self.embedding, self.inner, gain=gain)


RECIPES: dict[str, Callable[[Path], None]] = {"recurrent": partial(write_random, decoder=Mamba(), seed=4)}
