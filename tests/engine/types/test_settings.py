"""EngineSettings: values that would have no effect are rejected."""

from __future__ import annotations

import pytest

from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument


def test_a_fixed_draft_length_in_deterministic_mode_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match=r"speculation.*is 4.*deterministic"):
        EngineSettings(speculation=4, deterministic=True)
    assert EngineSettings(speculation="auto", deterministic=True).deterministic
    assert EngineSettings(speculation="off", deterministic=True).deterministic


@pytest.mark.parametrize("block_size", [5, 8, 96])
def test_blocks_of_deterministic_mode_are_whole_chunks(block_size: int) -> None:
    """Otherwise prompts with different media after a block would share cells that were computed in other chunks."""
    with pytest.raises(InvalidArgument, match=f"multiple of the grid of 64 in deterministic mode, not {block_size}"):
        EngineSettings(deterministic=True, block_size=block_size)
    EngineSettings(deterministic=True, block_size=block_size, grid=block_size)
    EngineSettings(block_size=block_size)
