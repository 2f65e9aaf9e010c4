"""Recorded outputs of the families that write arguments as JSON."""

from __future__ import annotations

from support.tool_records import NESTED, NOW, PARIS, ZURICH, RecordedOutput, json_call, tagged_call


def hermes(family: str) -> list[RecordedOutput]:
    return [*hermes_calls(family), *hermes_forms(family), *hermes_mistakes(family)]


def hermes_calls(family: str) -> list[RecordedOutput]:
    """Calls in the format of the template, with and without text around them."""
    return [
        RecordedOutput(family, "one call", tagged_call(PARIS), calls=(PARIS,), enforced=True),
        RecordedOutput(
            family,
            "several calls",
            f"{tagged_call(PARIS)}\n{tagged_call(NESTED)}\n",
            calls=(PARIS, NESTED),
            enforced=False,
        ),
        RecordedOutput(
            family, "text before", f"Let me look.\n\n{tagged_call(ZURICH)}", text="Let me look.", calls=(ZURICH,)
        ),
        RecordedOutput(
            family,
            "text around",
            f"One.\n\n{tagged_call(PARIS)}\n{tagged_call(NOW)}\nTwo. ",
            text="One.\n\nTwo. ",
            calls=(PARIS, NOW),
        ),
        RecordedOutput(
            family,
            "on one line",
            '<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>',
            calls=(("get_weather", '{"city":"Paris"}'),),
            enforced=True,
        ),
        RecordedOutput(
            family,
            "tags inside arguments",
            tagged_call(("get_weather", '{"city": "</tool_call> {\\"x\\": 1} <tool_call>"}')),
            calls=(("get_weather", '{"city": "</tool_call> {\\"x\\": 1} <tool_call>"}'),),
            enforced=True,
        ),
        RecordedOutput(
            family,
            "prose with tags",
            "Use <tool_call> tags, <tool_call>{}</tool_call>, a < b and <tool_c",
            text="Use <tool_call> tags, <tool_call>{}</tool_call>, a < b and <tool_c",
        ),
        RecordedOutput(family, "only text", " Hello, \n\n world! \n", text=" Hello, \n\n world! \n"),
    ]


def hermes_forms(family: str) -> list[RecordedOutput]:
    """Other formats of the same calls."""
    return [
        RecordedOutput(
            family,
            "arguments as a string",
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
            calls=(PARIS,),
        ),
        RecordedOutput(
            family,
            "arguments first",
            '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
            calls=(PARIS,),
        ),
        RecordedOutput(family, "no arguments", '<tool_call>{"name": "now"}</tool_call>', calls=(NOW,)),
        RecordedOutput(family, "null arguments", tagged_call(("now", "null")), calls=(NOW,)),
        RecordedOutput(family, "empty string as arguments", tagged_call(("now", '""')), calls=(NOW,)),
        RecordedOutput(
            family,
            "OpenAI's format",
            f'<tool_call>{{"type": "function", "function": {json_call(PARIS)}}}</tool_call>',
            calls=(PARIS,),
        ),
    ]


def hermes_mistakes(family: str) -> list[RecordedOutput]:
    """Mistakes that models make."""
    return [
        RecordedOutput(family, "unknown tool", tagged_call(("dance", "{}")), calls=(("dance", "{}"),)),
        RecordedOutput(family, "missing brace", tagged_call(PARIS).replace("}}", "}"), calls=(PARIS,)),
        RecordedOutput(family, "surplus brace", tagged_call(PARIS).replace("}}", "}}}"), calls=(PARIS,)),
        RecordedOutput(
            family,
            "no closing",
            f"{tagged_call(PARIS).removesuffix('</tool_call>')}{tagged_call(NOW)}",
            calls=(PARIS, NOW),
        ),
        RecordedOutput(
            family,
            "truncated",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
            calls=(("get_weather", '{"city": "Par'),),
        ),
        RecordedOutput(family, "truncated in the name", 'Yes. <tool_call>\n{"name": "get_wea', text="Yes. "),
        RecordedOutput(
            family,
            "invalid JSON arguments",
            '<tool_call>{"name": "now", "arguments": {\'a\': 1}}</tool_call> Done.',
            text="Done.",
            calls=(("now", "{'a': 1}}"),),
        ),
    ]


LLAMA = [
    RecordedOutput("llama", "one call", json_call(PARIS, "parameters"), calls=(PARIS,), enforced=True),
    RecordedOutput("llama", "after the tag", f"<|python_tag|>{json_call(PARIS, 'parameters')}", calls=(PARIS,)),
    RecordedOutput(
        "llama",
        "several calls",
        f"{json_call(PARIS, 'parameters')}; {json_call(NESTED, 'parameters')}",
        calls=(PARIS, NESTED),
        enforced=False,
    ),
    RecordedOutput("llama", "one call per line", f"{json_call(PARIS)}\n{json_call(NOW)}", calls=(PARIS, NOW)),
    RecordedOutput(
        "llama", "text before", f"I will look:\n{json_call(ZURICH, 'parameters')}", text="I will look:", calls=(ZURICH,)
    ),
    RecordedOutput(
        "llama",
        "with a type",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=(PARIS,),
    ),
    RecordedOutput("llama", "built-in tool", '<|python_tag|>get_weather.call(city="Paris")', calls=(PARIS,)),
    RecordedOutput(
        "llama",
        "fenced",
        f"Sure:\n```json\n{json_call(PARIS, 'parameters')}\n```\nWait.",
        text="Sure:\nWait.",
        calls=(PARIS,),
    ),
    RecordedOutput(
        "llama", "other fences", '```json\n{"a": 1}\n```\n```py\nx\n```', text='```json\n{"a": 1}\n```\n```py\nx\n```'
    ),
    RecordedOutput("llama", "code", "<|python_tag|>print(1)", text="print(1)"),
    RecordedOutput(
        "llama", "unknown tool", json_call(("dance", "{}"), "parameters"), text=json_call(("dance", "{}"), "parameters")
    ),
    RecordedOutput(
        "llama",
        "JSON that is not a call",
        '{"name": "get_weather", "kind": [1]}',
        text='{"name": "get_weather", "kind": [1]}',
    ),
    RecordedOutput("llama", "JSON", '{\n  "a": {"b": 1}\n}\n', text='{\n  "a": {"b": 1}\n}\n'),
    RecordedOutput("llama", "prose", "a {x} and {\n}", text="a {x} and {\n}"),
    RecordedOutput(
        "llama",
        "truncated",
        '{"name": "get_weather", "parameters": {"city": "P',
        calls=(("get_weather", '{"city": "P'),),
    ),
    RecordedOutput("llama", "truncated in the name", '{"name": "get_w', text='{"name": "get_w'),
]
MISTRAL = [
    RecordedOutput("mistral", "one call", f"[TOOL_CALLS][{json_call(PARIS)}]", calls=(PARIS,), enforced=True),
    RecordedOutput(
        "mistral", "several calls", f"[TOOL_CALLS][{json_call(PARIS)}, {json_call(NESTED)}]", calls=(PARIS, NESTED)
    ),
    RecordedOutput(
        "mistral",
        "with its id",
        f'[TOOL_CALLS] [{json_call(PARIS)[:-1]}, "id": "abcdef123"}}]',
        calls=(PARIS,),
        enforced=True,
    ),
    RecordedOutput(
        "mistral", "text before", f"Ok [x].\n[TOOL_CALLS][{json_call(ZURICH)}]", text="Ok [x].", calls=(ZURICH,)
    ),
    RecordedOutput("mistral", "text after", f"[TOOL_CALLS][{json_call(PARIS)}] Done.", text="Done.", calls=(PARIS,)),
    RecordedOutput(
        "mistral", "truncated", '[TOOL_CALLS][{"name": "now", "arguments": {"a": [', calls=(("now", '{"a": ['),)
    ),
    RecordedOutput("mistral", "prose", "a[0] and [TOOL", text="a[0] and [TOOL"),
]
NAMED = [
    RecordedOutput(
        "mistral-named", "one call", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', calls=(PARIS,), enforced=True
    ),
    RecordedOutput(
        "mistral-named",
        "several calls",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        calls=(PARIS, NOW),
    ),
    RecordedOutput("mistral-named", "as a list", f"[TOOL_CALLS][{json_call(PARIS)}]", calls=(PARIS,)),
    RecordedOutput("mistral-named", "without a marker", '[TOOL_CALLS]get_weather{"city": "Paris"}', calls=(PARIS,)),
    RecordedOutput(
        "mistral-named", "unicode", '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich ☀️"}', calls=(ZURICH,), enforced=True
    ),
    RecordedOutput("mistral-named", "truncated", '[TOOL_CALLS]get_weather[ARGS]{"ci', calls=(("get_weather", '{"ci'),)),
    RecordedOutput("mistral-named", "truncated in the marker", "[TOOL_CALLS]get_weather[AR", text=""),
    RecordedOutput("mistral-ids", "one call", "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}", calls=(NOW,), enforced=True),
]
GRANITE = [
    RecordedOutput("granite", "one call", f"<|tool_call|>[{json_call(PARIS)}]", calls=(PARIS,), enforced=True),
    RecordedOutput(
        "granite", "several calls", f"<|tool_call|> [{json_call(PARIS)}, {json_call(NESTED)}]", calls=(PARIS, NESTED)
    ),
    RecordedOutput("granite", "alternative tag", f"<tool_call>[{json_call(ZURICH)}]", calls=(ZURICH,)),
    RecordedOutput("granite", "one object", f"Hm. <|tool_call|>{json_call(NOW)}", text="Hm.", calls=(NOW,)),
    RecordedOutput("granite", "truncated", '<|tool_call|>[{"name": "now", "arguments": {', calls=(("now", "{"),)),
    RecordedOutput("granite", "prose", "<|tool_call|> is a token, [1]", text="<|tool_call|> is a token, [1]"),
    RecordedOutput(
        "nemotron", "several calls", f"<TOOLCALL>[{json_call(PARIS)}, {json_call(NOW)}]</TOOLCALL>", calls=(PARIS, NOW)
    ),
    RecordedOutput("nemotron", "one call", f"<TOOLCALL>[{json_call(PARIS)}]</TOOLCALL>", calls=(PARIS,), enforced=True),
    RecordedOutput("nemotron", "empty list", "Ok.<TOOLCALL>[]</TOOLCALL>", text="Ok."),
    RecordedOutput(
        "apriel", "one call", f"<tool_calls>[{json_call(PARIS)}]</tool_calls>", calls=(PARIS,), enforced=True
    ),
]
COHERE_CALL = '{{"tool_call_id": "{}", "tool_name": "{}", "parameters": {}}}'
COHERE = [
    RecordedOutput(
        "cohere",
        "one call",
        f"<|START_ACTION|>[\n    {COHERE_CALL.format(0, *PARIS)}\n]<|END_ACTION|>",
        calls=(PARIS,),
        enforced=True,
    ),
    RecordedOutput(
        "cohere",
        "several calls",
        f"<|START_ACTION|>[\n    {COHERE_CALL.format(0, *PARIS)},\n    {COHERE_CALL.format(1, *NESTED)}\n]"
        "<|END_ACTION|>",
        calls=(PARIS, NESTED),
    ),
    RecordedOutput(
        "cohere",
        "truncated",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {"a',
        calls=(("now", '{"a'),),
    ),
    RecordedOutput("cohere", "prose", "I act: [1].", text="I act: [1]."),
]
FUNCTION_CALL_ROLE = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
GIGACHAT = [
    RecordedOutput("gigachat", "one call", f"<|function_call|>{json_call(PARIS)}", calls=(PARIS,), enforced=True),
    RecordedOutput("gigachat", "text before", f"Hm.<|function_call|>{json_call(NOW)}", text="Hm.", calls=(NOW,)),
    RecordedOutput(
        "gigachat-role", "one call", f"{FUNCTION_CALL_ROLE}{json_call(NESTED)}", calls=(NESTED,), enforced=True
    ),
    RecordedOutput(
        "gigachat-role", "text before", f"Hm.{FUNCTION_CALL_ROLE}{json_call(ZURICH)}", text="Hm.", calls=(ZURICH,)
    ),
    RecordedOutput("gigachat-role", "prose", "a function call\n{}", text="a function call\n{}"),
]
FIREFUNCTION = [
    RecordedOutput("firefunction", "one call", f" functools[{json_call(PARIS)}]", calls=(PARIS,), enforced=True),
    RecordedOutput(
        "firefunction", "several calls", f"functools[{json_call(PARIS)}, {json_call(NESTED)}]", calls=(PARIS, NESTED)
    ),
    RecordedOutput("firefunction", "text before", f"Ok. functools[{json_call(NOW)}]", text="Ok.", calls=(NOW,)),
    RecordedOutput(
        "firefunction",
        "prose",
        "import functools\nfunctools.cache()",
        text="import functools\nfunctools.cache()",
    ),
]
FUNCTIONARY = [
    RecordedOutput(
        "functionary-tags",
        "one call",
        '<function=get_weather>{"city": "Paris"}</function>',
        calls=(PARIS,),
        enforced=True,
    ),
    RecordedOutput(
        "functionary-tags",
        "several calls",
        f"Ok.<function=get_weather>{PARIS[1]}</function>\n<function=search>{NESTED[1]}</function>",
        text="Ok.",
        calls=(PARIS, NESTED),
    ),
    RecordedOutput("functionary-tags", "no arguments", "<function=now></function>", calls=(NOW,)),
    RecordedOutput("functionary-tags", "truncated", '<function=now>{"a', calls=(("now", '{"a'),)),
    RecordedOutput("functionary-tags", "prose", "a <function= b> <function>", text="a <function= b> <function>"),
    RecordedOutput("functionary", "one call", f"get_weather\n{PARIS[1]}", calls=(PARIS,), enforced=True),
    RecordedOutput(
        "functionary",
        "several calls",
        f"all\nLet me see.\n>>>get_weather\n{PARIS[1]}>>>search\n{NESTED[1]}",
        text="Let me see.",
        calls=(PARIS, NESTED),
    ),
    RecordedOutput("functionary", "only text", "all\nHello.\nAll is well.", text="Hello.\nAll is well."),
    RecordedOutput("functionary", "console", "all\n>>> print(1)\n1\n>>>x\n", text=">>> print(1)\n1\n>>>x\n"),
    RecordedOutput("functionary", "continued text", "and so on", text="and so on"),
    RecordedOutput("functionary", "truncated", 'get_weather\n{"ci', calls=(("get_weather", '{"ci'),)),
]
APERTUS = [
    RecordedOutput(
        "apertus",
        "one call",
        '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>',
        calls=(PARIS,),
        enforced=True,
    ),
    RecordedOutput(
        "apertus",
        "several calls",
        f'Ok.<|tools_prefix|>[{{"get_weather": {PARIS[1]}}}, {{"search": {NESTED[1]}}}]<|tools_suffix|>',
        text="Ok.",
        calls=(PARIS, NESTED),
    ),
    RecordedOutput("apertus", "no arguments", '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>', calls=(NOW,)),
    RecordedOutput("apertus", "truncated", '<|tools_prefix|>[{"now": {"a', calls=(("now", '{"a'),)),
    RecordedOutput("apertus", "truncated in the name", 'Ok.<|tools_prefix|>[{"no', text="Ok."),
    RecordedOutput("apertus", "prose", "<|tools_prefix|> is [1]", text="<|tools_prefix|> is [1]"),
]
BEGIN, CALL, SEPARATOR, CALL_END, END = (
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "<｜tool▁sep｜>",  # noqa: RUF001
    "<｜tool▁call▁end｜>",  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
)


def fenced_call(call: tuple[str, str]) -> str:
    return f"{CALL}function{SEPARATOR}{call[0]}\n```json\n{call[1]}\n```{CALL_END}"


def named_call(call: tuple[str, str]) -> str:
    return f"{CALL}{call[0]}{SEPARATOR}{call[1]}{CALL_END}"


DEEPSEEK = [
    RecordedOutput("deepseek", "one call", f"{BEGIN}{fenced_call(PARIS)}{END}", calls=(PARIS,), enforced=True),
    RecordedOutput(
        "deepseek",
        "several calls",
        f"Ok.\n\n{BEGIN}{fenced_call(PARIS)}\n{fenced_call(NESTED)}{END}",
        text="Ok.",
        calls=(PARIS, NESTED),
    ),
    RecordedOutput("deepseek", "without the outer marker", f"{fenced_call(ZURICH)}", calls=(ZURICH,)),
    RecordedOutput("deepseek", "V3.1's format", f"{BEGIN}{named_call(PARIS)}{END}", calls=(PARIS,)),
    RecordedOutput(
        "deepseek", "truncated", f'{BEGIN}{CALL}function{SEPARATOR}now\n```json\n{{"a', calls=(("now", '{"a'),)
    ),
    RecordedOutput("deepseek", "truncated in the name", f"Ok.{BEGIN}{CALL}function{SEPARATOR}get_w", text="Ok."),
    RecordedOutput("deepseek", "prose", "<｜tool｜> a < b", text="<｜tool｜> a < b"),  # noqa: RUF001
    RecordedOutput("deepseek-named", "one call", f"{BEGIN}{named_call(PARIS)}{END}", calls=(PARIS,), enforced=True),
    RecordedOutput(
        "deepseek-named", "several calls", f"{BEGIN}{named_call(PARIS)}{named_call(NOW)}{END}", calls=(PARIS, NOW)
    ),
    RecordedOutput("deepseek-named", "no arguments", f"{BEGIN}{CALL}now{SEPARATOR}{CALL_END}{END}", calls=(NOW,)),
    RecordedOutput("deepseek-named", "truncated", f"{BEGIN}{CALL}now{SEPARATOR}{{", calls=(("now", "{"),)),
]


def kimi_call(call: tuple[str, str], number: int = 0) -> str:
    return f"<|tool_call_begin|>functions.{call[0]}:{number}<|tool_call_argument_begin|>{call[1]}<|tool_call_end|>"


SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI = [
    RecordedOutput("kimi", "one call", f"{SECTION[0]}{kimi_call(PARIS)}{SECTION[1]}", calls=(PARIS,), enforced=True),
    RecordedOutput(
        "kimi",
        "several calls",
        f"{SECTION[0]}{kimi_call(PARIS)}{kimi_call(NESTED, 1)}{SECTION[1]}",
        calls=(PARIS, NESTED),
    ),
    RecordedOutput(
        "kimi", "text before", f"Hm.{SECTION[0]}{kimi_call(ZURICH)}{SECTION[1]}", text="Hm.", calls=(ZURICH,)
    ),
    RecordedOutput(
        "kimi",
        "without section and end markers",
        "".join(
            kimi_call(call, number).removesuffix("<|tool_call_end|>") for number, call in enumerate((PARIS, NESTED))
        ),
        calls=(PARIS, NESTED),
    ),
    RecordedOutput(
        "kimi",
        "whitespace between the markers",
        f"{SECTION[0]}\n<|tool_call_begin|> functions.now:0 <|tool_call_argument_begin|> {{}} <|tool_call_end|>\n"
        f"{SECTION[1]}",
        calls=(NOW,),
    ),
    RecordedOutput(
        "kimi", "truncated", f"{SECTION[0]}{kimi_call(PARIS)[:-21]}", calls=(("get_weather", '{"city": "Par'),)
    ),
]
REASONING_MESSAGE = "<|channel|>analysis<|message|>Hm, <b>.<|end|>"
COMMENTARY = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
HARMONY = [
    RecordedOutput(
        "harmony",
        "answer",
        f"{REASONING_MESSAGE}<|start|>assistant<|channel|>final<|message|>Hi <x",
        text="Hi <x",
        reasoning="Hm, <b>.",
    ),
    RecordedOutput(
        "harmony",
        "one call",
        f'{REASONING_MESSAGE}<|start|>assistant{COMMENTARY}{{"city": "Paris"}}<|call|>'.replace(
            "assistant<|channel|>", "assistant<|channel|>"
        ),
        reasoning="Hm, <b>.",
        calls=(PARIS,),
        enforced=True,
    ),
    RecordedOutput(
        "harmony", "call without reasoning", f'{COMMENTARY}{{"city": "Paris"}}<|call|>', calls=(PARIS,), enforced=True
    ),
    RecordedOutput(
        "harmony",
        "recipient before the channel",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Zürich ☀️"}<|call|>',
        calls=(ZURICH,),
        enforced=True,
    ),
    RecordedOutput(
        "harmony",
        "several calls",
        f'{COMMENTARY}{{"city": "Paris"}}<|call|><|start|>assistant'
        "<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        calls=(PARIS, NOW),
    ),
    RecordedOutput(
        "harmony",
        "text before a call",
        f'<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{COMMENTARY}{{"city": "Paris"}}',
        text="I look.",
        calls=(PARIS,),
    ),
    RecordedOutput(
        "harmony",
        "two reasoning messages and two answers",
        f"{REASONING_MESSAGE}<|start|>assistant{REASONING_MESSAGE}<|start|>assistant<|channel|>commentary<|message|>One.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Two.<|return|>",
        text="One.\n\nTwo.",
        reasoning="Hm, <b>.\n\nHm, <b>.",
    ),
    RecordedOutput("harmony", "truncated", f'{COMMENTARY}{{"city": "Par', calls=(("get_weather", '{"city": "Par'),)),
    RecordedOutput(
        "harmony",
        "missing ends",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi.<|channel|>analysis<|message|>Oh.",
        text="Hi.",
        reasoning="Hm.\n\nOh.",
    ),
    RecordedOutput("harmony", "truncated in the header", "<|channel|>commentary to=fun"),
    RecordedOutput(
        "harmony",
        "recipient before the analysis channel",
        ' to=functions.get_weather<|channel|>analysis<|message|>{"city": "Paris"}<|call|>',
        calls=(PARIS,),
    ),
    RecordedOutput(
        "harmony",
        "built-in tool",
        f"{REASONING_MESSAGE}<|start|>assistant<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        reasoning="Hm, <b>.\n\nprint(1)",
    ),
    RecordedOutput(
        "harmony",
        "addressed to itself",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary to=assistant<|channel|>final<|message|>Hi.",
        text="Hi.",
        reasoning="Hm.",
    ),
    RecordedOutput(
        "harmony",
        "space after markers",
        "<|channel|> analysis<|message|> Hm.<|end|><|start|> assistant to=functions.get_weather<|channel|> commentary "
        '<|constrain|>  json<|message|> {"city": "Paris"}<|end|><|start|> assistant<|channel|> final<|message|> Hi.',
        text="Hi.",
        reasoning="Hm.",
        calls=(PARIS,),
    ),
    RecordedOutput(
        "harmony", "prompt ends inside the message", "Just words to=functions.x <", text="Just words to=functions.x <"
    ),
]
JSON_OUTPUTS: list[RecordedOutput] = [
    *hermes("hermes"),
    *hermes("generic"),
    *COHERE,
    *GIGACHAT,
    *FIREFUNCTION,
    *FUNCTIONARY,
    *APERTUS,
    *LLAMA,
    *MISTRAL,
    *NAMED,
    *GRANITE,
    *DEEPSEEK,
    *KIMI,
    *HARMONY,
]
