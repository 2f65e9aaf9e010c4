"""Calls of one function with one argument, written as the models of every tool family write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from support.tool_outputs_json import (
    BEGIN,
    COHERE_CALL,
    END,
    FUNCTION_CALL_ROLE,
    SECTION,
    fenced_call,
    kimi_call,
    named_call,
)
from support.tool_outputs_text import (
    dsml_block,
    dsml_call,
    element,
    gemma_call,
    gemma_quote,
    glm_call,
    kimi_k3_block,
    kimi_k3_call,
    minicpm_call,
    minimax_m3_block,
    minimax_m3_call,
    xml_call,
)
from support.tool_records import json_call, tagged_call

NAME, KEY = "f", "x"  # of the function and of its argument
JSON_TYPES = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object", type(None): "null"}


class JsonText(str):
    """JSON text in place of a value in the notation of the family."""


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_bare(value: Any) -> str:
    return value if isinstance(value, str) else write_json(value)


def write_python(value: Any) -> str:
    return str(value) if value is None or isinstance(value, bool) else write_json(value)


def write_gemma(value: Any, quote: Callable[[str], str] = gemma_quote) -> str:
    match value:
        case JsonText():
            return value
        case str():
            return quote(value)
        case list():
            return f"[{','.join(write_gemma(item, quote) for item in value)}]"
        case dict():
            return f"{{{','.join(f'{key}:{write_gemma(item, quote)}' for key, item in value.items())}}}"
    return write_json(value)


def write_function_gemma(value: Any) -> str:
    written = write_gemma(value, lambda text: f"<escape>{text}<escape>")
    return f"<start_function_call>call:{NAME}{{{KEY}:{written}}}<end_function_call>"


def write_elements(value: Any) -> str:
    """Write a list as elements. The elements of a free object would have free names: it is JSON."""
    return (
        "".join(element("item", write_bare(item)) for item in value) if isinstance(value, list) else write_bare(value)
    )


def write_dsml(value: Any, block: str) -> str:
    is_string = "true" if isinstance(value, str) else "false"
    return dsml_block(dsml_call(NAME, (KEY, is_string, write_bare(value))), block=block)


def write_kimi_k3(value: Any) -> str:
    return kimi_k3_block(kimi_k3_call(NAME, (KEY, JSON_TYPES.get(type(value), "string"), write_bare(value))))


WITH_JSON_ARGUMENTS: dict[str, Callable[[tuple[str, str]], str]] = {
    "hermes": tagged_call,
    "generic": tagged_call,
    "llama": lambda call: json_call(call, "parameters"),
    "mistral": lambda call: f"[TOOL_CALLS][{json_call(call)}]",
    "mistral-named": lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{call[1]}",
    "mistral-ids": lambda call: f"[TOOL_CALLS]{call[0]}[CALL_ID]abcdef123[ARGS]{call[1]}",
    "granite": lambda call: f"<|tool_call|>[{json_call(call)}]",
    "nemotron": lambda call: f"<TOOLCALL>[{json_call(call)}]</TOOLCALL>",
    "apriel": lambda call: f"<tool_calls>[{json_call(call)}]</tool_calls>",
    "cohere": lambda call: f"<|START_ACTION|>[\n    {COHERE_CALL.format('0', *call)}\n]<|END_ACTION|>",
    "gigachat": lambda call: f"<|function_call|>{json_call(call)}",
    "gigachat-role": lambda call: FUNCTION_CALL_ROLE + json_call(call),
    "firefunction": lambda call: f" functools[{json_call(call)}]",
    "functionary-tags": lambda call: f"<function={call[0]}>{call[1]}</function>",
    "functionary": lambda call: f"{call[0]}\n{call[1]}",
    "apertus": lambda call: f'<|tools_prefix|>[{{"{call[0]}": {call[1]}}}]<|tools_suffix|>',
    "deepseek": lambda call: f"{BEGIN}{fenced_call(call)}{END}",
    "deepseek-named": lambda call: f"{BEGIN}{named_call(call)}{END}",
    "kimi": lambda call: f"{SECTION[0]}{kimi_call(call)}{SECTION[1]}",
    "harmony": lambda call: (
        f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{call[1]}<|call|>"
    ),
}
WITH_OTHER_ARGUMENTS: dict[str, Callable[[Any], str]] = {
    "qwen-coder": lambda value: xml_call(NAME, **{KEY: write_bare(value)}),
    "seed": lambda value: xml_call(NAME, **{KEY: write_bare(value)}).replace("tool_call>", "seed:tool_call>"),
    "minimax": lambda value: (
        f'<minimax:tool_call>\n<invoke name="{NAME}">\n<parameter name="{KEY}">{write_bare(value)}</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    ),
    "glm": lambda value: glm_call(NAME, **{KEY: write_bare(value)}),
    "minicpm": lambda value: minicpm_call(NAME, **{KEY: write_bare(value)}),
    "deepseek-dsml": lambda value: write_dsml(value, "function_calls"),
    "deepseek-dsml-calls": lambda value: write_dsml(value, "tool_calls"),
    "kimi-k3": write_kimi_k3,
    "minimax-m3": lambda value: minimax_m3_block(minimax_m3_call(NAME, element(KEY, write_elements(value)))),
    "gemma": lambda value: gemma_call(f"{NAME}{{{KEY}:{write_gemma(value)}}}"),
    "function-gemma": write_function_gemma,
    "pythonic": lambda value: f"[{NAME}({KEY}={write_python(value)})]",
    "lfm": lambda value: f"<|tool_call_start|>[{NAME}({KEY}={write_python(value)})]<|tool_call_end|>",
    "tool-code": lambda value: f"```tool_code\n{NAME}({KEY}={write_python(value)})\n```",
}


def write_call(family: str, value: Any) -> str:
    """Write a call of the function `f` with this value of the argument `x`."""
    if family in WITH_JSON_ARGUMENTS:
        return WITH_JSON_ARGUMENTS[family]((NAME, write_json({KEY: value})))
    return WITH_OTHER_ARGUMENTS[family](value)
