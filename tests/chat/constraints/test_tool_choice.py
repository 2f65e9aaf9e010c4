"""`tool_choice` is enforced for every tool family, on a model with random weights, which would generate anything."""

from __future__ import annotations

import datetime
import json
import uuid

import jsonschema
import pytest

import afterglow
from afterglow.chat.constraints.tool_choice import parse_tool_choice
from afterglow.chat.tools.detection import TEMPLATE_MARKERS, detect_family
from afterglow.chat.tools.grammar.lark import MAX_PARALLEL_CALLS
from afterglow.chat.tools.tool import parse_tools
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


def build_template(markers: tuple[str, ...]) -> str:
    """Build a template with the markers of a family."""
    text = " ".join(markers).replace("'", "\\'")
    lines = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    return "{% set markers = '" + text + "' %}{% if tools %}{{ tools | tojson }}{% endif %}" + lines


TEMPLATES = {detect_family(build_template(markers)).name: build_template(markers) for markers, _ in TEMPLATE_MARKERS}


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request):
    with afterglow.load(
        models.get_path("attention"), context=2048, sequences=2, chat_template=TEMPLATES[request.param]
    ) as model:
        yield model


def generate_responses(model, **options):
    for seed in range(3):
        yield model.chat("Hello", tools=TOOLS, temperature=1.0, seed=seed, max_tokens=600, **options)


def check_arguments(call) -> None:
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_there_are_templates_of_many_families():
    assert len(TEMPLATES) >= 18


@pytest.mark.native
def test_required_generates_a_call_of_one_of_the_tools(model):
    for response in generate_responses(model, tool_choice="required", parallel_tool_calls=False, reasoning=False):
        assert response.finish_reason == "tool_calls"
        assert response.text == ""
        (call,) = response.tool_calls
        check_arguments(call)


@pytest.mark.native
def test_parallel_tool_calls_are_allowed(model):
    for response in generate_responses(model, tool_choice="required", reasoning=False):
        assert response.tool_calls
        for call in response.tool_calls if response.finish_reason == "tool_calls" else response.tool_calls[:-1]:
            check_arguments(call)


@pytest.mark.native
def test_required_ends_before_max_tokens():
    """A model with random weights almost never ends by itself."""
    template = TEMPLATES["hermes"]
    with afterglow.load(models.get_path("attention"), context=4096, chat_template=template) as model:
        response = model.chat("Hello", tools=TOOLS, tool_choice="required", reasoning=False, seed=1, max_tokens=2500)
    assert response.finish_reason == "tool_calls"
    assert 1 <= len(response.tool_calls) <= MAX_PARALLEL_CALLS
    assert not response.text
    for call in response.tool_calls:
        check_arguments(call)


@pytest.mark.native
def test_a_named_function_is_called(model):
    for response in generate_responses(
        model,
        tool_choice={"type": "function", "function": {"name": "paint"}},
        parallel_tool_calls=False,
        reasoning=False,
    ):
        (call,) = response.tool_calls
        assert call.name == "paint"
        check_arguments(call)


@pytest.mark.native
def test_none_generates_no_call(model):
    for response in generate_responses(model, tool_choice="none"):
        assert not response.tool_calls
        assert response.text or response.reasoning


@pytest.mark.native
def test_auto_enforces_a_call_once_it_begins(model):
    plan = model.plan_chat("Hello", tools=TOOLS)
    family = detect_family(model.chat_template)
    named = {family.tool_trigger.format(tool["function"]["name"]) for tool in TOOLS} - {""}
    if triggers := {*family.triggers} | named:
        assert {trigger.decode() for trigger, _ in plan.constraint.triggers} == triggers
        assert not plan.constraint.stop_after_first
        assert model.plan_chat("Hello", tools=TOOLS, parallel_tool_calls=False).constraint.stop_after_first
    else:
        assert plan.constraint.grammar  # a tool call, or text that does not begin like one


LIST_SCHEMA = {"type": "object", "properties": {"all": {"type": "array", "contains": {"type": "string"}}}}


def build_list_tool(**options: object) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": "list", "parameters": LIST_SCHEMA, **options}}]


@pytest.mark.native
def test_a_strict_tool_with_an_unsupported_keyword_is_rejected(model):
    with pytest.raises(UnsupportedOption, match=r"contains"):
        model.plan_chat("Hello", tools=build_list_tool(strict=True))
    with pytest.raises(UnsupportedOption, match=r"contains"):
        model.plan_chat("Hello", tools=build_list_tool(strict=True), tool_choice="required")


@pytest.mark.native
def test_other_tools_with_an_unsupported_keyword_are_named(model):
    plan = model.plan_chat("Hello", tools=build_list_tool())
    assert [tool.name for tool in plan.unenforced_tools] == ["list"]
    assert plan.constraint is None or "contains" not in repr(plan.constraint)
    for choice in ("required", {"type": "function", "function": {"name": "list"}}):
        plan = model.plan_chat("Hello", tools=build_list_tool(), tool_choice=choice)
        assert [tool.name for tool in plan.unenforced_tools] == ["list"]
        assert plan.constraint.grammar
    assert model.plan_chat("Hello", tools=TOOLS).unenforced_tools == ()


BOOK = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "key": {"type": "string", "format": "uuid"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
    },
    "required": ["day", "key", "code"],
    "additionalProperties": False,
}
NESTED = {
    "seats": {"type": "object", "additionalProperties": {"type": "integer"}},
    "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "place": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "string"}]},
    "note": {},
}


@pytest.mark.native
@pytest.mark.parametrize("mode", ["required", "named", "strict"])
def test_formats_patterns_maps_and_sets_are_enforced(model, mode):
    choice = {"required": "required", "named": {"type": "function", "function": {"name": "book"}}}.get(mode)
    properties = BOOK["properties"]
    for parameters in (BOOK, {**BOOK, "properties": properties | NESTED}):
        function = {"name": "book", "parameters": parameters, **({"strict": True} if mode == "strict" else {})}
        options = {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "reasoning": False}
        plan = model.plan_chat("Hello", **options)
        assert plan.unenforced_tools == ()
        assert plan.constraint is not None
        if choice is not None and parameters is BOOK:
            response = model.chat(
                "Hello", temperature=1.0, seed=3, max_tokens=900, parallel_tool_calls=False, **options
            )
            (call,) = response.tool_calls
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, BOOK)
            datetime.date.fromisoformat(arguments["day"])
            uuid.UUID(arguments["key"])


@pytest.mark.native
def test_a_response_format_with_tools_allows_either(model):
    format = {"type": "choice", "choices": ["yes", "no"]}
    for response in generate_responses(model, response_format=format, parallel_tool_calls=False, reasoning=False):
        assert response.tool_calls or response.text in ("yes", "no")


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
def test_every_form_of_tool_choice_is_parsed(value, mode, names):
    choice = parse_tool_choice(value, parse_tools(TOOLS))
    assert (choice.mode, [tool.name for tool in choice.tools]) == (mode, names)


@pytest.mark.parametrize(
    "value",
    ["always", 7, {"type": "custom"}, {"type": "function", "function": {"name": "sing"}}, {"type": "allowed_tools"}],
)
def test_invalid_tool_choices_are_rejected(value):
    with pytest.raises(InvalidArgument, match="tool_choice"):
        parse_tool_choice(value, parse_tools(TOOLS))


def test_required_without_tools_is_rejected():
    with pytest.raises(InvalidArgument, match="without tools"):
        parse_tool_choice("required", ())
