"""Settings of an engine, fixed when it is created."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_float, check_integer

# Per draft. Tokens further ahead are hardly ever accepted, and each needs an output row.
MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Frequency and limits of checkpoints, for models whose state cannot be truncated at any entry.

    >>> CheckpointSettings(max_checkpoints=4).every_n_tokens
    8192
    """

    max_checkpoints: int = 8
    """Maximum checkpoints on one path of prompts. 0 disables checkpoints."""
    every_n_tokens: int = 8192
    """Interval of regular checkpoints. 0: only at message boundaries and near the end of a prompt."""
    min_tokens: int = 64
    """No checkpoint before this many entries, except at message boundaries."""
    min_gap: int = 64
    """No checkpoint closer than this to another one, except at message boundaries."""
    max_bytes: int = 512 * 1024 * 1024
    """Maximum bytes of all checkpoints in RAM."""

    def __post_init__(self) -> None:
        for name in ("max_checkpoints", "every_n_tokens", "min_tokens", "min_gap", "max_bytes"):
            check_integer(name, getattr(self, name), 0, 2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of scheduling, the prefix cache and speculative decoding of one engine. Checked when created.

    >>> EngineSettings(max_token_gap=0.05, deterministic=True).grid
    64
    """

    max_token_gap: float = 0.2
    """Target for the time between tokens of running requests, in seconds. Prefill is chunked so that it does not delay
    them longer. The default is about reading speed."""
    deterministic: bool = False
    """Bit-identical output regardless of load and cache contents. Slower with concurrent requests."""
    grid: int = 64
    """Entries per prefill chunk in deterministic mode."""
    swap_bytes: int = 1024**3
    """RAM for the sequences of preempted requests."""
    ram_cache_bytes: int | None = None
    """Budget of the RAM tier: blocks, checkpoints, last logits, their tables, swapped-out sequences, prefetched files
    and n-gram indexes. None: a quarter of the available RAM, at most 2 GiB. 0: nothing is stored, neither in RAM nor on
    disk."""
    disk_cache_directory: Path | None = None
    """Directory of the disk tier, which outlives the process and can be shared by processes. None disables the tier."""
    disk_cache_label: str = ""
    """Name or file of the model, shown in listings of the disk tier."""
    disk_cache_bytes: int = 10 * 1024**3
    """Budget of the disk tier: all files in the directory, of all models."""
    shared_cache: str | None = None
    """URL of an object store that engines on several machines share, or a directory. None: no store. Without a
    key, every process that can write to it is trusted."""
    shared_cache_key_file: Path | None = None
    """File with the key, 64 hexadecimal digits, with which objects in the store are encrypted and authenticated."""
    write_through: bool = False
    """Store a sequence in the slower tiers when its request ends, so that other processes find it at once. Otherwise it
    is stored when the engine is idle or the sequence is evicted."""
    encoder_cache_bytes: int = 256 * 1024**2
    """RAM for the embeddings of images and audio, so that repeated media are not encoded again."""
    block_size: int = 64
    """Entries per block of the RAM and disk tiers. In deterministic mode, a multiple of `grid`: a block then has
    complete chunks, whose sizes its entries determine."""
    pin_system_prompts: bool = False
    """Never evict the system prompts of requests, up to half of the budget of each tier."""
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    speculation: Literal["auto", "off"] | int = "auto"
    """Speculative decoding: "auto" drafts as many tokens as pays off, a number always drafts that many. Deterministic
    mode does not speculate."""
    drafters: tuple[str, ...] | None = None
    """Names of the drafters to use. None: all available ones."""

    def __post_init__(self) -> None:
        check_float("max_token_gap", self.max_token_gap, 0)
        check_integer("grid", self.grid, 1, 65_536)
        check_integer("swap_bytes", self.swap_bytes, 0, 2**62)
        check_integer("block_size", self.block_size, 1, 65_536)
        if self.deterministic and self.block_size % self.grid:
            reason = f"must be a multiple of the grid of {self.grid} in deterministic mode, not {self.block_size}"
            raise InvalidArgument("block_size", reason)
        check_integer("disk_cache_bytes", self.disk_cache_bytes, 0, 2**62)
        check_integer("encoder_cache_bytes", self.encoder_cache_bytes, 0, 2**62)
        if self.disk_cache_directory is not None and not isinstance(self.disk_cache_directory, Path):
            raise InvalidArgument("disk_cache_directory", f"must be a Path, not {self.disk_cache_directory!r}")
        if self.ram_cache_bytes is not None:
            check_integer("ram_cache_bytes", self.ram_cache_bytes, 0, 2**62)
        if not isinstance(self.checkpoints, CheckpointSettings):
            raise InvalidArgument("checkpoints", f"must be CheckpointSettings, not {self.checkpoints!r}")
        if self.speculation not in ("auto", "off"):
            if isinstance(self.speculation, str | bool):
                raise InvalidArgument("speculation", f'must be "auto", "off" or a number, not {self.speculation!r}')
            check_integer("speculation", self.speculation, 1, MAX_DRAFT_TOKENS)
            if self.deterministic:
                raise InvalidArgument(
                    "speculation",
                    f'is {self.speculation}, but deterministic mode does not speculate: use "auto" or "off"',
                )
        if self.drafters is not None and not isinstance(self.drafters, tuple):
            raise InvalidArgument("drafters", f"must be a tuple of names, not {self.drafters!r}")
        if self.drafters == () and isinstance(self.speculation, int):
            raise InvalidArgument("speculation", f"is {self.speculation}, but `drafters` is empty: nothing drafts")

    @property
    def ram_cache_limit(self) -> int:
        """Budget of the RAM tier in bytes, from the RAM that is available now if it is not set."""
        if self.ram_cache_bytes is not None:
            return self.ram_cache_bytes
        return int(min(2 * 1024**3, psutil.virtual_memory().available // 4))
