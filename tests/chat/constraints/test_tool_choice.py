"""`tool_choice` is enforced, on any template: shown on a model with random weights, which would say anything."""

from __future__ import annotations

import json

import jsonschema
import pytest

import afterglow
from afterglow.chat.constraints.tool_choice import parse_tool_choice
from afterglow.chat.tools.detection import TEMPLATE_MARKERS, detect_family
from afterglow.chat.tools.tool import parse_tools as read_tools
from afterglow.errors import InvalidArgument, UnsupportedOption
from afterglow.testing import models

PAINT = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"paint": PAINT, "rest": NOTHING}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


def template(signs: tuple[str, ...]) -> str:
    """A template that mentions what tells its family."""
    marks = " ".join(signs).replace("'", "\\'")
    lines = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    return "{% set marks = '" + marks + "' %}{% if tools %}{{ tools | tojson }}{% endif %}" + lines


FAMILIES = {detect_family(template(signs)).name: template(signs) for signs, _ in TEMPLATE_MARKERS}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    with afterglow.load(
        models.get_path("attention"), context=2048, sequences=2, chat_template=FAMILIES[request.param]
    ) as model:
        yield model


def answers(model, **options):
    for seed in range(3):
        yield model.chat("Hello", tools=TOOLS, temperature=1.0, seed=seed, max_tokens=600, **options)


def assert_fits(call) -> None:
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_there_are_templates_of_many_families():
    assert len(FAMILIES) >= 18


def test_required_is_a_call_of_one_of_the_tools(model):
    for turn in answers(model, tool_choice="required", parallel_tool_calls=False, reasoning=False):
        assert turn.finish_reason == "tool_calls"
        assert turn.text == ""
        (call,) = turn.tool_calls
        assert_fits(call)


def test_several_calls_come_where_they_may(model):
    for turn in answers(model, tool_choice="required", reasoning=False):
        assert turn.tool_calls
        for call in turn.tool_calls if turn.finish_reason == "tool_calls" else turn.tool_calls[:-1]:
            assert_fits(call)


def test_a_named_function_is_the_one_that_is_called(model):
    for turn in answers(
        model,
        tool_choice={"type": "function", "function": {"name": "paint"}},
        parallel_tool_calls=False,
        reasoning=False,
    ):
        (call,) = turn.tool_calls
        assert call.name == "paint"
        assert_fits(call)


def test_none_is_no_call(model):
    for turn in answers(model, tool_choice="none"):
        assert not turn.tool_calls
        assert turn.text or turn.reasoning


def test_with_auto_calls_are_enforced_from_their_beginning_on(model):
    plan = model.plan_chat("Hello", tools=TOOLS)
    family = detect_family(model.get_chat_template)
    if family.triggers:
        assert {beginning.decode() for beginning, _ in plan.constraint.triggers} == set(family.triggers)
        assert not plan.constraint.stop_after_first
        assert model.plan_chat("Hello", tools=TOOLS, parallel_tool_calls=False).constraint.stop_after_first
    else:
        assert plan.constraint.grammar  # a call, or text that does not begin like one


LIST = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}


def listing(**options: object) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": "list", "parameters": LIST, **options}}]


def test_a_strict_tool_that_cannot_be_enforced_is_refused_by_its_keyword(model):
    with pytest.raises(UnsupportedOption, match=r"uniqueItems"):
        model.plan_chat("Hello", tools=listing(strict=True))
    with pytest.raises(UnsupportedOption, match=r"uniqueItems"):
        model.plan_chat("Hello", tools=listing(), tool_choice="required")


def test_other_tools_promise_nothing_and_are_not_refused(model):
    assert model.plan_chat("Hello", tools=listing()).constraint is None


def test_a_response_format_beside_tools_is_either_of_them(model):
    format = {"type": "choice", "choices": ["yes", "no"]}
    for turn in answers(model, response_format=format, parallel_tool_calls=False, reasoning=False):
        assert turn.tool_calls or turn.text in ("yes", "no")


@pytest.mark.parametrize(
    ("value", "mode", "names"),
    [
        (None, "auto", ["paint", "rest"]),
        ("none", "none", ["paint", "rest"]),
        ("required", "required", ["paint", "rest"]),
        ({"type": "function", "function": {"name": "rest"}}, "required", ["rest"]),
        ({"type": "function", "name": "rest"}, "required", ["rest"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "paint"}}]},
            },
            "required",
            ["paint"],
        ),
    ],
)
def test_every_way_to_choose_is_read(value, mode, names):
    choice = parse_tool_choice(value, read_tools(TOOLS))
    assert (choice.mode, [tool.name for tool in choice.tools]) == (mode, names)


@pytest.mark.parametrize(
    "value",
    ["always", 7, {"type": "custom"}, {"type": "function", "function": {"name": "sing"}}, {"type": "allowed_tools"}],
)
def test_other_choices_are_refused(value):
    with pytest.raises(InvalidArgument, match="tool_choice"):
        parse_tool_choice(value, read_tools(TOOLS))


def test_required_without_tools_is_refused():
    with pytest.raises(InvalidArgument, match="no tools are offered"):
        parse_tool_choice("required", ())
