"""Recurrent model: mamba, with one state per layer and no cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from afterglow.testing.models.writer import MetadataInput, ModelWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Selective state space model: a recurrent state of fixed size."""

    architecture: ClassVar[str] = "mamba"
    embedding_length: int = 64
    layers: int = 3
    state_size: int = 16
    time_step_rank: int = 4
    conv_kernel: int = 4
    embedding_gain: float = 1.0

    @property
    def inner_size(self) -> int:
        return 2 * self.embedding_length  # the only factor that llama.cpp accepts

    def build_metadata(self) -> Mapping[str, MetadataInput]:
        return {
            "block_count": self.layers,
            # Both keys are required even without attention and feed-forward networks.
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.inner_size": self.inner_size,
            "ssm.state_size": self.state_size,
            "ssm.time_step_rank": self.time_step_rank,
        }

    def write_blocks(self, writer: ModelWriter, gain: float) -> None:
        decay = -np.tile(np.arange(1, self.state_size + 1, dtype=np.float32), (self.inner_size, 1))
        # Channels with long steps remember the last tokens, those with short steps hundreds. A short step also adds
        # little to the state; the large gain of ssm_x compensates for that.
        step = np.linspace(-6.0, -1.0, self.inner_size, dtype=np.float32)
        for layer in range(self.layers):
            block = f"blk.{layer}"
            writer.add_constant(f"{block}.attn_norm.weight", 1.0, self.embedding_length)
            writer.add_matrix(f"{block}.ssm_in.weight", 2 * self.inner_size, self.embedding_length)
            writer.add_matrix(f"{block}.ssm_conv1d.weight", self.inner_size, self.conv_kernel)
            writer.add_constant(f"{block}.ssm_conv1d.bias", 0.0, self.inner_size)
            writer.add_matrix(
                f"{block}.ssm_x.weight", self.time_step_rank + 2 * self.state_size, self.inner_size, gain=8.0
            )
            writer.add_matrix(f"{block}.ssm_dt.weight", self.inner_size, self.time_step_rank, gain=0.25)
            writer.add_tensor(f"{block}.ssm_dt.bias", step)
            writer.add_tensor(f"{block}.ssm_a", decay)
            writer.add_constant(f"{block}.ssm_d", 1.0, self.inner_size)
            writer.add_matrix(f"{block}.ssm_out.weight", self.embedding_length, self.inner_size, gain=gain)
