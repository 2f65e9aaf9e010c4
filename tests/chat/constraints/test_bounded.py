"""Where messages end is found out only for memory that cannot go on anywhere."""

from __future__ import annotations

import pytest

import afterglow
from afterglow.engine.types.settings import EngineSettings
from afterglow.testing import models

TALK = [("system", "Be brief."), ("user", "One?"), ("assistant", "Two."), ("user", "Three?")]


@pytest.mark.parametrize(
    ("name", "engine", "bounded"),
    [
        ("attention", EngineSettings(), False),
        ("attention", EngineSettings(pin_system_prompts=True), True),
        ("hybrid", EngineSettings(), True),
    ],
)
def test_prompts_have_boundaries_where_they_are_of_use(name, engine, bounded):
    with afterglow.load(models.get_path(name), context=512, disk_cache=False, engine=engine) as model:
        assert bool(model.apply_chat_template(TALK).boundaries) is bounded
