"""What an engine may be told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from afterglow.engine.checkpoint import CheckpointSettings
from afterglow.engine.speculation import LONGEST
from afterglow.errors import InvalidArgument
from afterglow.llama.arguments import integer, real


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine may be told.

    >>> EngineSettings(gap=0.05, deterministic=True).grid
    64
    """

    gap: float = 0.1  # seconds between the tokens of running answers that long prompts should not exceed
    deterministic: bool = False
    grid: int = 64  # entries in a chunk, in deterministic mode
    parked_bytes: int = 1024**3  # for sequences of jobs that had to make room
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    # Guess ahead as far as it pays, never, or always so many tokens; and who may guess: all there are, or these.
    speculation: Literal["auto", "off"] | int = "auto"
    drafters: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        real("gap", self.gap, 0)
        integer("grid", self.grid, 1, 65_536)
        integer("parked_bytes", self.parked_bytes, 0, 2**62)
        if not isinstance(self.checkpoints, CheckpointSettings):
            raise InvalidArgument("checkpoints", f"must be CheckpointSettings, not {self.checkpoints!r}")
        if self.speculation not in ("auto", "off"):
            if isinstance(self.speculation, str | bool):
                raise InvalidArgument("speculation", f'must be "auto", "off" or a number, not {self.speculation!r}')
            integer("speculation", self.speculation, 1, LONGEST)
        if self.drafters is not None and not isinstance(self.drafters, tuple):
            raise InvalidArgument("drafters", f"must be a tuple of names, not {self.drafters!r}")
