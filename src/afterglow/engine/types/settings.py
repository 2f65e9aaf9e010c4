"""What an engine may be told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_float, check_integer

MAX_DRAFT_TOKENS = 16  # guesses behind one token; hardly anything is right so far out, and each needs an output


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """How often, and how many. `max_checkpoints` 0 turns them off."""

    max_checkpoints: int = 8  # along one path
    every_n_tokens: int = 8192  # 0: none
    min_tokens: int = 64  # none before this many, except at the ends of messages
    min_gap: int = 64  # none closer than this to another, except at the ends of messages
    max_bytes: int = 512 * 1024 * 1024  # of all together

    def __post_init__(self) -> None:
        for name in ("max_checkpoints", "every_n_tokens", "min_tokens", "min_gap", "max_bytes"):
            check_integer(name, getattr(self, name), 0, 2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine may be told.

    >>> EngineSettings(gap=0.05, deterministic=True).grid
    64
    """

    max_token_gap: float = (
        0.2  # seconds between tokens of running answers that prompts should not exceed: people read so fast
    )
    deterministic: bool = False
    grid: int = 64  # entries in a chunk, in deterministic mode
    swap_bytes: int = 1024**3  # for sequences of jobs that had to make room
    ram_cache_bytes: int | None = None  # for all that is kept in RAM; None: a quarter of what is free, 2 GiB at most
    disk_cache_directory: Path | None = None  # where to keep what should outlive this process; None: nowhere
    disk_cache_label: str = ""  # the model's file or name, shown with what is kept of it
    disk_cache_bytes: int = 10 * 1024**3  # of all files there, whichever model's
    encoder_cache_bytes: int = 256 * 1024**2  # of encoded pictures that are kept in RAM, for when they come again
    block_size: int = 64  # entries in one stored segment
    pin_system_prompts: bool = False  # never let go of the system prompts of requests, within half of what may be kept
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    # Guess ahead as far as it pays, never, or always so many tokens; and who may guess: all there are, or these.
    speculation: Literal["auto", "off"] | int = "auto"
    drafters: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_float("max_token_gap", self.max_token_gap, 0)
        check_integer("grid", self.grid, 1, 65_536)
        check_integer("swap_bytes", self.swap_bytes, 0, 2**62)
        check_integer("block_size", self.block_size, 1, 65_536)
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
        if self.drafters is not None and not isinstance(self.drafters, tuple):
            raise InvalidArgument("drafters", f"must be a tuple of names, not {self.drafters!r}")

    @property
    def ram_cache_limit(self) -> int:
        """Bytes that may be kept in RAM outside of memory, as things stand now."""
        if self.ram_cache_bytes is not None:
            return self.ram_cache_bytes
        return int(min(2 * 1024**3, psutil.virtual_memory().available // 4))
