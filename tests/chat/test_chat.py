"""Plans of chat requests: constraints and output parsers follow the format that the template really has."""

from __future__ import annotations

import json

import pytest

import afterglow
from afterglow.chat.output.parts import ParsedOutput, join_parts
from afterglow.testing import models

pytestmark = pytest.mark.native

# Turns of Phi-3 and Phi-4-mini, Apriel and Solar-Open, which end with `<|end|>` like those of gpt-oss.
END_TEMPLATES = {
    "phi": "{% for m in messages %}{{ '<|' + m.role + '|>' }}\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n",
    "apriel": (
        "{% for m in messages %}<|begin_{{ m.role }}|>\n{{ m.content }}\n<|end|>\n{% endfor %}"
        "<|begin_assistant|>\nHere are my reasoning steps:\n{# [BEGIN FINAL RESPONSE] #}"
    ),
    "solar": (
        "{% for m in messages %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}"
        "<|begin|>assistant{# <|think|> #}"
    ),
}
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% endfor %}<|start|>assistant{# to= #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def load(template: str) -> afterglow.Model:
    return afterglow.load(models.get_path("attention"), context=512, chat_template=template)


def parse(plan, text: str) -> ParsedOutput:
    parser = plan.create_parser()
    return join_parts(parser.feed(text) + parser.finish())


@pytest.mark.parametrize("name", END_TEMPLATES)
def test_a_response_format_is_enforced_if_turns_end_with_end(name):
    with load(END_TEMPLATES[name]) as model:
        response = model.chat("Where?", response_format=RESPONSE_FORMAT, reasoning=False, max_tokens=100)
    assert response.parsed == json.loads(response.text)
    assert response.parsed["city"] in ("Bern", "Rome")


def test_harmony_has_no_calls_that_nobody_offered():
    call = '<|channel|>commentary to=functions.weather<|message|>{"city": "Bern"}<|call|>'
    with load(HARMONY) as model:
        offered = parse(model.plan_chat("Where?", tools=[WEATHER]), call)
        without_tools = parse(model.plan_chat("Where?"), call)
        not_allowed = parse(model.plan_chat("Where?", tools=[WEATHER], tool_choice="none"), call)
    assert [(call.name, call.arguments) for call in offered.tool_calls] == [("weather", '{"city": "Bern"}')]
    assert without_tools == not_allowed == ParsedOutput(text='{"city": "Bern"}')
