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
    ("{% for c in m.tool_calls %}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "deepseek-named"),  # noqa: RUF001 - V3.1: no tools
    ("{% if tools %}<' + '｜DSML｜' + 'function_calls>", "deepseek-dsml"),  # noqa: RUF001
    ("{% if tools %}<' + '｜DSML｜' + 'tool_calls>", "deepseek-dsml-calls"),  # noqa: RUF001
    ("{% if tools %}<|open|><|close|><|sep|><|end_of_msg|>", "kimi-k3"),
    ('{% if tools %}]<]minimax[>[<invoke name="f">', "minimax-m3"),
    ('{% if tools %}<|START_ACTION|>[{"tool_name": "f"}]', "cohere"),
    ('{% if tools %}<function name="f"><param name="k"><![CDATA[', "minicpm"),
    ("{% if tools %}<|function_call|>", "gigachat"),
    ("{% if tools %}<|message_sep|><|role_sep|>function call", "gigachat-role"),
    ("{% if tools %}<function=f>{}</function>", "functionary-tags"),
    ("{% if tools %}>>>${recipient} >>>all", "functionary"),
    ("{{ functions }} functools[", "firefunction"),
    ("{% if tools %}<|tools_prefix|>[<|tools_suffix|>", "apertus"),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_template_determines_the_family(template: str, name: str) -> None:
    assert detect_family(template).name == name


def test_without_a_template_the_family_is_generic() -> None:
    assert detect_family(None).name == "generic"
