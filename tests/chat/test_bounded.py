"""Where messages end is found out only for memory that cannot go on anywhere."""

from __future__ import annotations

import pytest

import afterglow
from afterglow import tiny
from afterglow.engine.settings import EngineSettings

TALK = [("system", "Be brief."), ("user", "One?"), ("assistant", "Two."), ("user", "Three?")]


@pytest.mark.parametrize(
    ("name", "engine", "bounded"),
    [
        ("attention", EngineSettings(), False),
        ("attention", EngineSettings(pin_system=True), True),
        ("hybrid", EngineSettings(), True),
    ],
)
def test_prompts_have_boundaries_where_they_are_of_use(name, engine, bounded):
    with afterglow.load(tiny.path(name), context=512, disk=False, engine=engine) as model:
        assert bool(model.chat_prompt(TALK).boundaries) is bounded
