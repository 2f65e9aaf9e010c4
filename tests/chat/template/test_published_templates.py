"""Templates of real models: what we write is what llama.cpp's own engine writes, or there is a reason."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path

import pytest

from afterglow.chat.messages import parse_messages
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.errors import InvalidTemplate
from support import fetched
from support.conversations import ARGUMENTS, CONVERSATIONS, TOKENS, TOOLS

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "templates.json").read_text(encoding="utf-8"))
TEMPLATES = RECORDED["templates"]
NOW = datetime.datetime.fromisoformat(RECORDED["now"])

# Templates may leave out reasoning, and nothing else.
SAID = {told: ["What's the weather"] for told in CONVERSATIONS} | {
    "several turns": ["Be brief.", "What's the weather", "It is dry.", "And tomorrow?"],
    "a call and its result": ["weather", "Zürich", "clear"],
    "two calls and then a turn": ["weather", "remember", "Zürich", "clear", "kept", "It is dry.", "And tomorrow?"],
}


def test_every_published_template_is_recorded():
    assert set(fetched.chat_templates()) == set(TEMPLATES)
    assert len(TEMPLATES) == 73


def test_nearly_all_renderings_are_those_of_an_independent_engine():
    cases = [case for recorded in TEMPLATES.values() for case in recorded.values()]
    assert sum("note" not in case for case in cases) >= 470
    assert len({name for name, recorded in TEMPLATES.items() if any("note" in c for c in recorded.values())}) <= 12


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_real_template_renders_as_recorded(name):
    source = fetched.chat_templates()[name].read_text(encoding="utf-8")
    with ChatTemplate(source, TOKENS, clock=lambda: NOW) as template:
        for told, expected in TEMPLATES[name].items():
            turns, tools = CONVERSATIONS[told]
            try:
                text = template.render(
                    parse_messages(turns), tools=TOOLS if tools else (), chat_template_kwargs=ARGUMENTS
                )
            except InvalidTemplate:
                assert expected.get("refused"), told
                continue
            assert (len(text), text[-40:]) == (expected["length"], expected["end"]), told
            assert hashlib.sha256(text.encode()).hexdigest() == expected["sha256"], told
            assert [words for words in SAID[told] if words not in text] == [], told
