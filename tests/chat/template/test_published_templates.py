"""Published templates render as recorded: like llama.cpp's engine, except for noted differences."""

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
from support.conversations import CONVERSATIONS, SPECIAL_TOKENS, TEMPLATE_KWARGS, TOOLS

pytestmark = pytest.mark.native

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "templates.json").read_text(encoding="utf-8"))
TEMPLATES = RECORDED["templates"]
NOW = datetime.datetime.fromisoformat(RECORDED["now"])

# Texts that must be rendered: templates may drop reasoning, and nothing else.
REQUIRED_TEXTS = {conversation: ["What's the weather"] for conversation in CONVERSATIONS} | {
    "several turns": ["Be brief.", "What's the weather", "It is dry.", "And tomorrow?"],
    "a call and its result": ["weather", "Zürich", "clear"],
    "two calls and then a turn": ["weather", "remember", "Zürich", "clear", "kept", "It is dry.", "And tomorrow?"],
}


def test_every_published_template_is_recorded():
    assert set(fetched.fetch_chat_templates()) == set(TEMPLATES)
    assert len(TEMPLATES) == 73


def test_nearly_all_renderings_agree_with_llama_cpp():
    cases = [case for cases in TEMPLATES.values() for case in cases.values()]
    assert sum("note" not in case for case in cases) >= 470
    assert len({name for name, cases in TEMPLATES.items() if any("note" in case for case in cases.values())}) <= 12


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_published_template_renders_as_recorded(name):
    source = fetched.fetch_chat_templates()[name].read_text(encoding="utf-8")
    with ChatTemplate(source, SPECIAL_TOKENS, clock=lambda: NOW) as template:
        for conversation, expected in TEMPLATES[name].items():
            messages, uses_tools = CONVERSATIONS[conversation]
            tools = TOOLS if uses_tools else ()
            try:
                text = template.render(parse_messages(messages), tools=tools, chat_template_kwargs=TEMPLATE_KWARGS)
            except InvalidTemplate:
                assert expected.get("refused"), conversation
                continue
            assert (len(text), text[-40:]) == (expected["length"], expected["end"]), conversation
            assert hashlib.sha256(text.encode()).hexdigest() == expected["sha256"], conversation
            assert [words for words in REQUIRED_TEXTS[conversation] if words not in text] == [], conversation
