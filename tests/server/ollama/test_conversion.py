"""Messages, tools and options of Ollama bodies as the server uses them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from afterglow.server.errors import APIError
from afterglow.server.ollama import conversion
from afterglow.server.ollama.created_models import CreatedModel
from afterglow.server.ollama.schema import OllamaChatRequest, OllamaMessage, OllamaOptions, OllamaTool

UNLIMITED = [{"num_predict": value} for value in (0, -1, -2)]


def build(*messages: dict[str, Any]) -> list[Any]:
    return conversion.build_messages([OllamaMessage.model_validate(message) for message in messages])


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def test_calls_without_ids_and_their_results_get_the_same_ids() -> None:
    calling, second, first = build(
        {"role": "assistant", "tool_calls": [call("add", a=1), call("subtract", b=2)]},
        {"role": "tool", "content": "-2", "tool_name": "subtract"},
        {"role": "tool", "content": "1", "tool_name": "add"},
    )
    add, subtract = calling.tool_calls
    assert (add.arguments, subtract.arguments) == ('{"a": 1}', '{"b": 2}')
    assert add.id != subtract.id
    assert (first.tool_call_id, second.tool_call_id) == (add.id, subtract.id)
    assert all(len(made.id) == 9 and made.id.isalnum() for made in calling.tool_calls)


def test_results_without_names_belong_to_the_calls_in_order() -> None:
    calling, *results = build(
        {"role": "assistant", "tool_calls": [call("add"), call("add")]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    )
    assert [result.tool_call_id for result in results] == [*(made.id for made in calling.tool_calls), ""]


def test_an_option_of_the_request_replaces_one_that_the_created_model_sets_by_its_other_name() -> None:
    created = CreatedModel(name="made:latest", source="tiny", parameters={"repetition_penalty": 1.5})
    merged = conversion.merge_options(created, OllamaOptions(repeat_penalty=1.25))
    assert conversion.list_sampling_values(merged) == {"repeat_penalty": 1.25}
    assert conversion.list_sampling_values(conversion.merge_options(created, None)) == {"repeat_penalty": 1.5}


def test_an_unlimited_request_is_not_one_without_a_limit() -> None:
    limits = [conversion.get_token_limit(OllamaOptions.model_validate(options)) for options in ({}, *UNLIMITED)]
    assert limits == [None, -1, -1, -1]


def test_ids_of_the_client_are_kept() -> None:
    calling, result = build(
        {"role": "assistant", "tool_calls": [{"id": "mine", **call("add")}]},
        {"role": "tool", "content": "1", "tool_call_id": "mine"},
    )
    assert calling.tool_calls[0].id == result.tool_call_id == "mine"


def test_the_same_conversation_has_the_same_ids() -> None:
    turn = {"role": "assistant", "tool_calls": [call("add")]}
    assert build(turn) == build(turn)
    first, second = build(turn, turn)
    assert first.tool_calls[0].id != second.tool_calls[0].id


def test_thinking_and_images_belong_to_their_messages() -> None:
    (own,) = build({"role": "assistant", "content": "yes", "thinking": "hm"})
    assert own.reasoning == "hm"
    (asked,) = build({"role": "USER", "content": "what?", "images": ["aGk=", "data:image/png;base64,aGk="]})
    assert [image.source for image in asked.attachments] == ["data:image/*;base64,aGk=", "data:image/png;base64,aGk="]
    assert (asked.role, asked.attachments[0].offset) == ("user", 0)


def test_options_of_the_request_replace_parameters_of_a_created_model() -> None:
    created = CreatedModel(name="a:latest", source="b", parameters={"temperature": 0.1, "top_k": 3})
    options = conversion.merge_options(created, OllamaOptions.model_validate({"top_k": 7}))
    assert (options.temperature, options.top_k, options.min_p) == (0.1, 7, None)


def test_adapters_of_the_request_are_options_like_others() -> None:
    options = conversion.merge_options(None, OllamaOptions.model_validate({"lora": [{"name": "style", "scale": 0.5}]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert options.model_dump(exclude_none=True) == {"lora": [{"name": "style", "scale": 0.5}]}


@pytest.mark.parametrize(("given", "tokens"), [(None, None), (-1, None), (-2, None), (0, None), (7, 7)])
def test_num_predict_is_the_limit_if_it_is_positive(given: int | None, tokens: int | None) -> None:
    assert conversion.get_max_tokens(OllamaOptions.model_validate({"num_predict": given})) == tokens


@pytest.mark.parametrize(
    ("format", "expected"),
    [("", None), (None, None), ("json", "json_object"), ({"type": "object"}, "json_schema")],
)
def test_formats(format: Any, expected: str | None) -> None:
    body = OllamaChatRequest.model_validate({"model": "m", "format": format})
    response_format = conversion.build_response_format(body)
    assert (response_format and response_format["type"]) == expected


@pytest.mark.parametrize(
    "template", ["{{ .Prompt }}", "{{- range .Messages }}{{ end }}", "{{ if .System }}x{{ end }}", "{{ $.Model }}"]
)
def test_templates_of_go_are_refused(template: str) -> None:
    with pytest.raises(APIError, match="Jinja"):
        conversion.check_template(template)


def test_templates_of_jinja_are_accepted() -> None:
    template = "{% for message in messages %}{{ message.content }}{{- '' }}{% endfor %}"
    assert conversion.check_template(template) == template


def test_null_keywords_of_tool_schemas_are_not_set() -> None:
    """Go writes null for lists and maps that are not set."""
    city = {"type": "string", "enum": None, "items": None, "default": None}
    parameters = {"type": "object", "required": None, "$defs": None, "properties": {"city": city, "unit": None}}
    tool = OllamaTool.model_validate({"type": "function", "function": {"name": "weather", "parameters": parameters}})
    (built,) = conversion.build_tools([tool])
    assert built.parameters == {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
    named = {"type": "object", "properties": {"default": {"type": "string", "enum": None}, "enum": {"items": None}}}
    (built,) = conversion.build_tools([OllamaTool.model_validate({"function": {"name": "f", "parameters": named}})])
    assert built.parameters["properties"] == {"default": {"type": "string"}, "enum": {}}
    nothing = OllamaTool.model_validate(
        {"function": {"name": "f", "parameters": {"type": "object", "properties": None}}}
    )
    assert conversion.build_tools([nothing])[0].parameters == {"type": "object", "properties": {}}
