"""Detection of the tool family from the chat template."""

from __future__ import annotations

import pytest

from afterglow.chat.tools.detection import detect_family

TEMPLATES = [
    ("{{ messages[0].content }}", "generic"),
    ("{{ 'I have no tools but <tool_call>' }}", "generic"),
    ("{% if tools %}Call them somehow.{% endif %}", "generic"),
    ("{% for call in message.tool_calls %}<tool_call>{% endfor %}", "generic"),  # it never lists the tools
    ('{% if tools %}<tool_call>{"name": …, "arguments": …}</tool_call>', "hermes"),
    ("{% if tools %}<tool_call>\n<function=f>\n<parameter=x>", "qwen-coder"),
    ("{% if tools %}<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>", "glm"),
    ('{% if tools %}{"name": function name, "parameters": dictionary of arguments}', "llama"),
    ("{% if tools %}[func_name1(params_name1=params_value1)]", "pythonic"),
    ("{% if tools %}[TOOL_CALLS][", "mistral"),
    ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]", "mistral-named"),
    ("{% if tools %}[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]", "mistral-ids"),
    ("{% set available_tools = tools %}<|tool_call|>", "granite"),
    ("{% if tools %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json", "deepseek"),  # noqa: RUF001
    ("{% if tools %}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "deepseek-named"),  # noqa: RUF001
    ("{% if tools %}<|tool_call>call:f{", "gemma"),
    ("{% if tools %}<start_function_call>call:f{", "function-gemma"),
    ("{% if tools %}```tool_code", "tool-code"),
    ("{% if tools %}<|channel|>commentary to=functions.f<|message|>", "harmony"),
    ("{% if tools %}<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi"),
    ("{% if tools %}<seed:tool_call><function=f>", "seed"),
    ('{% if tools %}<minimax:tool_call><invoke name="f">', "minimax"),
    ("{% if tools %}<TOOLCALL>[", "nemotron"),
    ("{% if tools %}<tool_calls>[", "apriel"),
    ("{% if tools %}<|tool_call_start|>[", "lfm"),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_template_determines_the_family(template: str, name: str) -> None:
    assert detect_family(template).name == name


def test_without_a_template_the_family_is_generic() -> None:
    assert detect_family(None).name == "generic"
