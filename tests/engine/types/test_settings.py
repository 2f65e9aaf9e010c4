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
