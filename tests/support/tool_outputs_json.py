"""Answers of the families that write arguments as JSON."""

from __future__ import annotations

from support.tool_records import NESTED, NOW, PARIS, ZURICH, Recorded, item, tag


def hermes(family: str) -> list[Recorded]:
    return [*hermes_calls(family), *hermes_forms(family), *hermes_mistakes(family)]


def hermes_calls(family: str) -> list[Recorded]:
    """Calls as the template asks for them, and words around them."""
    return [
        Recorded(family, "one call", tag(PARIS), calls=(PARIS,), enforced=True),
        Recorded(family, "several", f"{tag(PARIS)}\n{tag(NESTED)}\n", calls=(PARIS, NESTED), enforced=False),
        Recorded(family, "words before", f"Let me look.\n\n{tag(ZURICH)}", text="Let me look.", calls=(ZURICH,)),
        Recorded(
            family, "words around", f"One.\n\n{tag(PARIS)}\n{tag(NOW)}\nTwo. ", text="One.\n\nTwo. ", calls=(PARIS, NOW)
        ),
        Recorded(
            family,
            "on one line",
            '<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>',
            calls=(("get_weather", '{"city":"Paris"}'),),
            enforced=True,
        ),
        Recorded(
            family,
            "tags inside arguments",
            tag(("get_weather", '{"city": "</tool_call> {\\"x\\": 1} <tool_call>"}')),
            calls=(("get_weather", '{"city": "</tool_call> {\\"x\\": 1} <tool_call>"}'),),
            enforced=True,
        ),
        Recorded(
            family,
            "prose about tags",
            "Use <tool_call> tags, <tool_call>{}</tool_call>, a < b and <tool_c",
            text="Use <tool_call> tags, <tool_call>{}</tool_call>, a < b and <tool_c",
        ),
        Recorded(family, "only words", " Hello, \n\n world! \n", text=" Hello, \n\n world! \n"),
    ]


def hermes_forms(family: str) -> list[Recorded]:
    """Other ways to write the same."""
    return [
        Recorded(
            family,
            "arguments as text",
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
            calls=(PARIS,),
        ),
        Recorded(
            family,
            "arguments first",
            '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
            calls=(PARIS,),
        ),
        Recorded(family, "no arguments", '<tool_call>{"name": "now"}</tool_call>', calls=(NOW,)),
        Recorded(family, "null for arguments", tag(("now", "null")), calls=(NOW,)),
        Recorded(family, "empty text for arguments", tag(("now", '""')), calls=(NOW,)),
        Recorded(
            family,
            "as OpenAI writes it",
            f'<tool_call>{{"type": "function", "function": {item(PARIS)}}}</tool_call>',
            calls=(PARIS,),
        ),
    ]


def hermes_mistakes(family: str) -> list[Recorded]:
    """What models get wrong."""
    return [
        Recorded(family, "a tool nobody has", tag(("dance", "{}")), calls=(("dance", "{}"),)),
        Recorded(family, "a brace forgotten", tag(PARIS).replace("}}", "}"), calls=(PARIS,)),
        Recorded(family, "a brace too many", tag(PARIS).replace("}}", "}}}"), calls=(PARIS,)),
        Recorded(family, "no closing", f"{tag(PARIS).removesuffix('</tool_call>')}{tag(NOW)}", calls=(PARIS, NOW)),
        Recorded(
            family,
            "broken off",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
            calls=(("get_weather", '{"city": "Par'),),
        ),
        Recorded(family, "broken off in the name", 'Yes. <tool_call>\n{"name": "get_wea', text="Yes. "),
        Recorded(
            family,
            "not JSON inside",
            '<tool_call>{"name": "now", "arguments": {\'a\': 1}}</tool_call> Done.',
            text="Done.",
            calls=(("now", "{'a': 1}}"),),
        ),
    ]


LLAMA = [
    Recorded("llama", "one call", item(PARIS, "parameters"), calls=(PARIS,), enforced=True),
    Recorded("llama", "behind the tag", f"<|python_tag|>{item(PARIS, 'parameters')}", calls=(PARIS,)),
    Recorded(
        "llama",
        "several",
        f"{item(PARIS, 'parameters')}; {item(NESTED, 'parameters')}",
        calls=(PARIS, NESTED),
        enforced=False,
    ),
    Recorded("llama", "on lines", f"{item(PARIS)}\n{item(NOW)}", calls=(PARIS, NOW)),
    Recorded(
        "llama", "words before", f"I will look:\n{item(ZURICH, 'parameters')}", text="I will look:", calls=(ZURICH,)
    ),
    Recorded(
        "llama",
        "with a type",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=(PARIS,),
    ),
    Recorded("llama", "its own tools", '<|python_tag|>get_weather.call(city="Paris")', calls=(PARIS,)),
    Recorded(
        "llama",
        "fenced",
        f"Sure:\n```json\n{item(PARIS, 'parameters')}\n```\nWait.",
        text="Sure:\nWait.",
        calls=(PARIS,),
    ),
    Recorded(
        "llama", "other fences", '```json\n{"a": 1}\n```\n```py\nx\n```', text='```json\n{"a": 1}\n```\n```py\nx\n```'
    ),
    Recorded("llama", "code", "<|python_tag|>print(1)", text="print(1)"),
    Recorded(
        "llama", "a tool nobody has", item(("dance", "{}"), "parameters"), text=item(("dance", "{}"), "parameters")
    ),
    Recorded(
        "llama",
        "JSON that is no call",
        '{"name": "get_weather", "kind": [1]}',
        text='{"name": "get_weather", "kind": [1]}',
    ),
    Recorded("llama", "JSON", '{\n  "a": {"b": 1}\n}\n', text='{\n  "a": {"b": 1}\n}\n'),
    Recorded("llama", "prose", "a {x} and {\n}", text="a {x} and {\n}"),
    Recorded(
        "llama",
        "broken off",
        '{"name": "get_weather", "parameters": {"city": "P',
        calls=(("get_weather", '{"city": "P'),),
    ),
    Recorded("llama", "broken off in the name", '{"name": "get_w', text='{"name": "get_w'),
]
MISTRAL = [
    Recorded("mistral", "one call", f"[TOOL_CALLS][{item(PARIS)}]", calls=(PARIS,), enforced=True),
    Recorded("mistral", "several", f"[TOOL_CALLS][{item(PARIS)}, {item(NESTED)}]", calls=(PARIS, NESTED)),
    Recorded(
        "mistral",
        "with its id",
        f'[TOOL_CALLS] [{item(PARIS)[:-1]}, "id": "abcdef123"}}]',
        calls=(PARIS,),
        enforced=True,
    ),
    Recorded("mistral", "words before", f"Ok [x].\n[TOOL_CALLS][{item(ZURICH)}]", text="Ok [x].", calls=(ZURICH,)),
    Recorded("mistral", "words after", f"[TOOL_CALLS][{item(PARIS)}] Done.", text="Done.", calls=(PARIS,)),
    Recorded("mistral", "broken off", '[TOOL_CALLS][{"name": "now", "arguments": {"a": [', calls=(("now", '{"a": ['),)),
    Recorded("mistral", "prose", "a[0] and [TOOL", text="a[0] and [TOOL"),
]
NAMED = [
    Recorded(
        "mistral-named", "one call", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', calls=(PARIS,), enforced=True
    ),
    Recorded(
        "mistral-named",
        "several",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        calls=(PARIS, NOW),
    ),
    Recorded("mistral-named", "as a list", f"[TOOL_CALLS][{item(PARIS)}]", calls=(PARIS,)),
    Recorded("mistral-named", "without a marker", '[TOOL_CALLS]get_weather{"city": "Paris"}', calls=(PARIS,)),
    Recorded(
        "mistral-named", "unicode", '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich ☀️"}', calls=(ZURICH,), enforced=True
    ),
    Recorded("mistral-named", "broken off", '[TOOL_CALLS]get_weather[ARGS]{"ci', calls=(("get_weather", '{"ci'),)),
    Recorded("mistral-named", "broken off in the marker", "[TOOL_CALLS]get_weather[AR", text=""),
    Recorded("mistral-ids", "one call", "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}", calls=(NOW,), enforced=True),
]
GRANITE = [
    Recorded("granite", "one call", f"<|tool_call|>[{item(PARIS)}]", calls=(PARIS,), enforced=True),
    Recorded("granite", "several", f"<|tool_call|> [{item(PARIS)}, {item(NESTED)}]", calls=(PARIS, NESTED)),
    Recorded("granite", "the other tag", f"<tool_call>[{item(ZURICH)}]", calls=(ZURICH,)),
    Recorded("granite", "one object", f"Hm. <|tool_call|>{item(NOW)}", text="Hm.", calls=(NOW,)),
    Recorded("granite", "broken off", '<|tool_call|>[{"name": "now", "arguments": {', calls=(("now", "{"),)),
    Recorded("granite", "prose", "<|tool_call|> is a token, [1]", text="<|tool_call|> is a token, [1]"),
    Recorded("nemotron", "several", f"<TOOLCALL>[{item(PARIS)}, {item(NOW)}]</TOOLCALL>", calls=(PARIS, NOW)),
    Recorded("nemotron", "one call", f"<TOOLCALL>[{item(PARIS)}]</TOOLCALL>", calls=(PARIS,), enforced=True),
    Recorded("nemotron", "none", "Ok.<TOOLCALL>[]</TOOLCALL>", text="Ok."),
    Recorded("apriel", "one call", f"<tool_calls>[{item(PARIS)}]</tool_calls>", calls=(PARIS,), enforced=True),
]
BEGIN, CALL, SEPARATOR, CALL_END, END = (
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "<｜tool▁sep｜>",  # noqa: RUF001
    "<｜tool▁call▁end｜>",  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
)


def fenced(call: tuple[str, str]) -> str:
    return f"{CALL}function{SEPARATOR}{call[0]}\n```json\n{call[1]}\n```{CALL_END}"


def named(call: tuple[str, str]) -> str:
    return f"{CALL}{call[0]}{SEPARATOR}{call[1]}{CALL_END}"


DEEPSEEK = [
    Recorded("deepseek", "one call", f"{BEGIN}{fenced(PARIS)}{END}", calls=(PARIS,), enforced=True),
    Recorded(
        "deepseek",
        "several",
        f"Ok.\n\n{BEGIN}{fenced(PARIS)}\n{fenced(NESTED)}{END}",
        text="Ok.",
        calls=(PARIS, NESTED),
    ),
    Recorded("deepseek", "without the outer marker", f"{fenced(ZURICH)}", calls=(ZURICH,)),
    Recorded("deepseek", "as V3.1 writes it", f"{BEGIN}{named(PARIS)}{END}", calls=(PARIS,)),
    Recorded("deepseek", "broken off", f'{BEGIN}{CALL}function{SEPARATOR}now\n```json\n{{"a', calls=(("now", '{"a'),)),
    Recorded("deepseek", "broken off in the name", f"Ok.{BEGIN}{CALL}function{SEPARATOR}get_w", text="Ok."),
    Recorded("deepseek", "prose", "<｜tool｜> a < b", text="<｜tool｜> a < b"),  # noqa: RUF001
    Recorded("deepseek-named", "one call", f"{BEGIN}{named(PARIS)}{END}", calls=(PARIS,), enforced=True),
    Recorded("deepseek-named", "several", f"{BEGIN}{named(PARIS)}{named(NOW)}{END}", calls=(PARIS, NOW)),
    Recorded("deepseek-named", "no arguments", f"{BEGIN}{CALL}now{SEPARATOR}{CALL_END}{END}", calls=(NOW,)),
    Recorded("deepseek-named", "broken off", f"{BEGIN}{CALL}now{SEPARATOR}{{", calls=(("now", "{"),)),
]


def kimi(call: tuple[str, str], number: int = 0) -> str:
    return f"<|tool_call_begin|>functions.{call[0]}:{number}<|tool_call_argument_begin|>{call[1]}<|tool_call_end|>"


SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI = [
    Recorded("kimi", "one call", f"{SECTION[0]}{kimi(PARIS)}{SECTION[1]}", calls=(PARIS,), enforced=True),
    Recorded("kimi", "several", f"{SECTION[0]}{kimi(PARIS)}{kimi(NESTED, 1)}{SECTION[1]}", calls=(PARIS, NESTED)),
    Recorded("kimi", "words before", f"Hm.{SECTION[0]}{kimi(ZURICH)}{SECTION[1]}", text="Hm.", calls=(ZURICH,)),
    Recorded("kimi", "broken off", f"{SECTION[0]}{kimi(PARIS)[:-21]}", calls=(("get_weather", '{"city": "Par'),)),
]
THOUGHT = "<|channel|>analysis<|message|>Hm, <b>.<|end|>"
COMMENTARY = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
HARMONY = [
    Recorded(
        "harmony",
        "an answer",
        f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Hi <x",
        text="Hi <x",
        reasoning="Hm, <b>.",
    ),
    Recorded(
        "harmony",
        "one call",
        f'{THOUGHT}<|start|>assistant{COMMENTARY}{{"city": "Paris"}}<|call|>'.replace(
            "assistant<|channel|>", "assistant<|channel|>"
        ),
        reasoning="Hm, <b>.",
        calls=(PARIS,),
        enforced=True,
    ),
    Recorded("harmony", "a call at once", f'{COMMENTARY}{{"city": "Paris"}}<|call|>', calls=(PARIS,), enforced=True),
    Recorded(
        "harmony",
        "the recipient first",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Zürich ☀️"}<|call|>',
        calls=(ZURICH,),
        enforced=True,
    ),
    Recorded(
        "harmony",
        "several",
        f'{COMMENTARY}{{"city": "Paris"}}<|call|><|start|>assistant'
        "<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        calls=(PARIS, NOW),
    ),
    Recorded(
        "harmony",
        "words before a call",
        f'<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{COMMENTARY}{{"city": "Paris"}}',
        text="I look.",
        calls=(PARIS,),
    ),
    Recorded(
        "harmony",
        "two thoughts and two messages",
        f"{THOUGHT}<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>One.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Two.<|return|>",
        text="One.\n\nTwo.",
        reasoning="Hm, <b>.\n\nHm, <b>.",
    ),
    Recorded("harmony", "broken off", f'{COMMENTARY}{{"city": "Par', calls=(("get_weather", '{"city": "Par'),)),
    Recorded(
        "harmony",
        "ends forgotten",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi.<|channel|>analysis<|message|>Oh.",
        text="Hi.",
        reasoning="Hm.\n\nOh.",
    ),
    Recorded("harmony", "broken off in the header", "<|channel|>commentary to=fun"),
    Recorded(
        "harmony", "a prompt that began the message", "Just words to=functions.x <", text="Just words to=functions.x <"
    ),
]
JSON: list[Recorded] = [
    *hermes("hermes"),
    *hermes("generic"),
    *LLAMA,
    *MISTRAL,
    *NAMED,
    *GRANITE,
    *DEEPSEEK,
    *KIMI,
    *HARMONY,
]
