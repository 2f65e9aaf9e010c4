"""What models of each family write, and what it means. Shared by the tests of readers and grammars."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.chat.tools import Tool, tools

TOOLS: tuple[Tool, ...] = tools(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather of a place.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                        "detailed": {"type": "boolean"},
                    },
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": "search",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "filters": {
                            "type": "object",
                            "properties": {
                                "limit": {"type": "integer"},
                                "tags": {"type": "array", "items": {"type": "string"}},
                            },
                            "required": ["tags"],
                            "additionalProperties": False,
                        },
                        "query": {"type": "string"},
                    },
                    "required": ["query"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]
)


@dataclass(frozen=True)
class Recorded:
    """An answer as it came, and what it means. `calls` are names and arguments; `enforced`: a grammar accepts it."""

    family: str
    what: str
    raw: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    enforced: bool = False

    def __str__(self) -> str:
        return f"{self.family}: {self.what}"


PARIS = ("get_weather", '{"city": "Paris"}')
PARIS_2 = ("get_weather", '{"city": "Paris", "days": 2}')
ZURICH = ("get_weather", '{"city": "Zürich ☀️"}')
NESTED = ("search", '{"filters": {"limit": 3, "tags": ["a", "b\\"c"]}, "query": "x"}')
NESTED_PLAIN = ("search", '{"filters": {"limit": 3, "tags": ["a", "bc"]}, "query": "x"}')
NOW = ("now", "{}")


def tag(call: tuple[str, str], arguments: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "{call[0]}", "{arguments}": {call[1]}}}\n</tool_call>'


def item(call: tuple[str, str], arguments: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{arguments}": {call[1]}}}'


def hermes(family: str) -> list[Recorded]:
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
            "tags inside arguments",
            tag(("get_weather", '{"city": "</tool_call> {\\"x\\": 1} <tool_call>"}')),
            calls=(("get_weather", '{"city": "</tool_call> {\\"x\\": 1} <tool_call>"}'),),
            enforced=True,
        ),
        Recorded(
            family,
            "as OpenAI writes it",
            f'<tool_call>{{"type": "function", "function": {item(PARIS)}}}</tool_call>',
            calls=(PARIS,),
        ),
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
        Recorded(
            family,
            "prose about tags",
            "Use <tool_call> tags, <tool_call>{}</tool_call>, a < b and <tool_c",
            text="Use <tool_call> tags, <tool_call>{}</tool_call>, a < b and <tool_c",
        ),
        Recorded(family, "only words", " Hello, \n\n world! \n", text=" Hello, \n\n world! \n"),
    ]


def xml(name: str, **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


FILTERS = '{"limit": 3, "tags": ["a", "bc"]}'
QWEN_CODER = [
    Recorded("qwen-coder", "one call", xml("get_weather", city="Paris"), calls=(PARIS,), enforced=True),
    Recorded("qwen-coder", "a number", xml("get_weather", city="Paris", days="2"), calls=(PARIS_2,), enforced=True),
    Recorded(
        "qwen-coder",
        "a string of digits",
        xml("get_weather", city="12"),
        calls=(("get_weather", '{"city": "12"}'),),
        enforced=True,
    ),
    Recorded(
        "qwen-coder",
        "Python's words",
        xml("get_weather", city="Paris", detailed="True"),
        calls=(("get_weather", '{"city": "Paris", "detailed": true}'),),
        enforced=True,
    ),
    Recorded(
        "qwen-coder",
        "empty text",
        xml("get_weather", city=""),
        calls=(("get_weather", '{"city": ""}'),),
        enforced=True,
    ),
    Recorded("qwen-coder", "several", f"{xml('get_weather', city='Paris')}\n{xml('now')}", calls=(PARIS, NOW)),
    Recorded("qwen-coder", "nested", xml("search", filters=FILTERS, query="x"), calls=(NESTED_PLAIN,), enforced=True),
    Recorded("qwen-coder", "unicode", f"Sure.\n{xml('get_weather', city='Zürich ☀️')}", text="Sure.", calls=(ZURICH,)),
    Recorded(
        "qwen-coder",
        "lines and tags in a value",
        xml("get_weather", city='a\n\n  "b" </param>\n'),
        calls=(("get_weather", '{"city": "a\\n\\n  \\"b\\" </param>\\n"}'),),
        enforced=True,
    ),
    Recorded(
        "qwen-coder",
        "on one line",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        calls=(PARIS,),
        enforced=True,
    ),
    Recorded(
        "qwen-coder",
        "without the opening",
        "Now:\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        text="Now:",
        calls=(PARIS,),
    ),
    Recorded(
        "qwen-coder",
        "a parameter and a tool nobody has",
        xml("dance", steps="[1, 2]", kind="waltz"),
        calls=(("dance", '{"steps": [1, 2], "kind": "waltz"}'),),
    ),
    Recorded(
        "qwen-coder",
        "broken off",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        calls=(("get_weather", '{"city": "Par'),),
    ),
    Recorded(
        "qwen-coder",
        "broken off in a number",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n1",
        calls=(("get_weather", '{"city": "Paris", "days": 1'),),
    ),
    Recorded("qwen-coder", "no ends", xml("get_weather", city="Paris").replace("</function>\n", ""), calls=(PARIS,)),
    Recorded(
        "qwen-coder",
        "prose",
        "In <tool_call> and <function=> tags, a<b",
        text="In <tool_call> and <function=> tags, a<b",
    ),
]
SEED = [
    Recorded(
        "seed",
        "one call",
        xml("get_weather", city="Paris").replace("tool_call>", "seed:tool_call>"),
        calls=(PARIS,),
        enforced=True,
    ),
    Recorded(
        "seed",
        "several in one block",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n"
        "<function=now>\n</function>\n</seed:tool_call>",
        calls=(PARIS, NOW),
    ),
    Recorded("seed", "broken off", "<seed:tool_call>\n<function=now>", calls=(("now", ""),)),
    Recorded("seed", "prose", "a <seed: b", text="a <seed: b"),
]
MINIMAX = [
    Recorded(
        "minimax",
        "one call",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        calls=(PARIS_2,),
        enforced=True,
    ),
    Recorded(
        "minimax",
        "several",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        calls=(PARIS, NOW),
    ),
    Recorded("minimax", "broken off", '<minimax:tool_call>\n<invoke name="no', text=""),
    Recorded("minimax", "prose", "<minimax:tool_call> is a tag", text="<minimax:tool_call> is a tag"),
]


def glm(name: str, *, newline: str = "\n", **arguments: str) -> str:
    inside = "".join(
        f"<arg_key>{key}</arg_key>{newline}<arg_value>{value}</arg_value>{newline}" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{newline}{inside}</tool_call>"


GLM = [
    Recorded("glm", "one call", glm("get_weather", city="Paris", days="2"), calls=(PARIS_2,), enforced=True),
    Recorded("glm", "without newlines", glm("get_weather", newline="", city="Paris"), calls=(PARIS,), enforced=True),
    Recorded(
        "glm", "several", f"Ok.\n{glm('get_weather', city='Paris')}\n{glm('now')}", text="Ok.", calls=(PARIS, NOW)
    ),
    Recorded("glm", "empty text", glm("get_weather", city=""), calls=(("get_weather", '{"city": ""}'),), enforced=True),
    Recorded("glm", "no arguments", "<tool_call>now</tool_call>", calls=(NOW,), enforced=True),
    Recorded("glm", "unicode", glm("get_weather", city="Zürich ☀️"), calls=(ZURICH,), enforced=True),
    Recorded("glm", "nested", glm("search", filters=FILTERS, query="x"), calls=(NESTED_PLAIN,), enforced=True),
    Recorded(
        "glm",
        "lines stay",
        glm("get_weather", city="\na\n"),
        calls=(("get_weather", '{"city": "\\na\\n"}'),),
        enforced=True,
    ),
    Recorded(
        "glm",
        "broken off",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        calls=(("get_weather", '{"city": "Par'),),
    ),
    Recorded("glm", "prose", "<tool_call> begins a call", text="<tool_call> begins a call"),
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
PYTHONIC = [
    Recorded("pythonic", "one call", '[get_weather(city="Paris")]', calls=(PARIS,), enforced=True),
    Recorded("pythonic", "several", '[get_weather(city="Paris", days=2), now()]', calls=(PARIS_2, NOW)),
    Recorded("pythonic", "no arguments", "[now()]", calls=(NOW,), enforced=True),
    Recorded(
        "pythonic",
        "nested",
        '[search(filters={"limit": 3, "tags": ["a", "bc"]}, query="x")]',
        calls=(NESTED_PLAIN,),
        enforced=True,
    ),
    Recorded(
        "pythonic",
        "Python's own literals",
        "[get_weather(city='it\\'s, (ok)', detailed=True)]",
        calls=(("get_weather", '{"city": "it\'s, (ok)", "detailed": true}'),),
        enforced=True,
    ),
    Recorded("pythonic", "unicode", "Yes:\n[get_weather(city='Zürich ☀️')]", text="Yes:", calls=(ZURICH,)),
    Recorded("pythonic", "fenced", '```python\n[get_weather(city="Paris")]\n```', calls=(PARIS,)),
    Recorded("pythonic", "other fences", "```\n[1]\n```", text="```\n[1]\n```"),
    Recorded("pythonic", "a bare word", "[get_weather(city=Paris)]", calls=(PARIS,)),
    Recorded("pythonic", "a string of digits", "[get_weather(city=12)]", calls=(("get_weather", '{"city": "12"}'),)),
    Recorded("pythonic", "a tool nobody has", "[dance(a=1)]", text="[dance(a=1)]"),
    Recorded(
        "pythonic",
        "prose",
        "[1, 2]\n[get_weather] [x]\n[get_weather(there)]",
        text="[1, 2]\n[get_weather] [x]\n[get_weather(there)]",
    ),
    Recorded("pythonic", "broken off", '[get_weather(city="Par', calls=(("get_weather", '{"city": "Par'),)),
    Recorded("pythonic", "broken off in the name", "[get_wea", text="[get_wea"),
]
LFM = [
    Recorded(
        "lfm",
        "one call",
        '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
        calls=(PARIS,),
        enforced=True,
    ),
    Recorded(
        "lfm",
        "several",
        '<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>Wait.',
        text="Wait.",
        calls=(PARIS, NOW),
    ),
    Recorded(
        "lfm", "a tool nobody has", "<|tool_call_start|>[dance(a=1)]<|tool_call_end|>", calls=(("dance", '{"a": 1}'),)
    ),
    Recorded("lfm", "broken off", "<|tool_call_start|>[dance(a=[1", calls=(("dance", '{"a": [1'),)),
]
TOOL_CODE = [
    Recorded("tool-code", "one call", '```tool_code\nget_weather(city="Paris")\n```', calls=(PARIS,), enforced=True),
    Recorded("tool-code", "printed", '```tool_code\nprint(get_weather(city="Paris"))\n```', calls=(PARIS,)),
    Recorded(
        "tool-code",
        "several",
        'So:\n```tool_code\nget_weather(city="Paris")\nnow()\n```',
        text="So:",
        calls=(PARIS, NOW),
    ),
    Recorded(
        "tool-code",
        "other code",
        "```tool_code\nx = 1\n```\n```python\n1\n```",
        text="```tool_code\nx = 1\n```\n```python\n1\n```",
    ),
    Recorded("tool-code", "broken off", "```tool_code\nget_weather(city='P", calls=(("get_weather", '{"city": \'P'),)),
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


def gemma(body: str) -> str:
    return f"<|tool_call>call:{body}<tool_call|>"


def quotes(text: str) -> str:
    return f'<|"|>{text}<|"|>'


GEMMA = [
    Recorded("gemma", "one call", gemma(f"get_weather{{city:{quotes('Paris')}}}"), calls=(PARIS,), enforced=True),
    Recorded(
        "gemma",
        "several",
        gemma(f"get_weather{{city:{quotes('Paris')},days:2}}") + gemma("now{}"),
        calls=(PARIS_2, NOW),
    ),
    Recorded(
        "gemma",
        "empty text",
        gemma(f"get_weather{{city:{quotes('')}}}"),
        calls=(("get_weather", '{"city": ""}'),),
        enforced=True,
    ),
    Recorded("gemma", "no arguments", gemma("now{}"), calls=(NOW,), enforced=True),
    Recorded(
        "gemma",
        "nested",
        gemma(f"search{{filters:{{limit:3,tags:[{quotes('a')},{quotes('bc')}]}},query:{quotes('x')}}}"),
        calls=(NESTED_PLAIN,),
        enforced=True,
    ),
    Recorded(
        "gemma", "unicode", "Hm. " + gemma(f"get_weather{{city:{quotes('Zürich ☀️')}}}"), text="Hm.", calls=(ZURICH,)
    ),
    Recorded(
        "gemma",
        "quotes and braces in text",
        gemma(f"get_weather{{city:{quotes(chr(34) + '}, [' + chr(10))}}}"),
        calls=(("get_weather", '{"city": "\\"}, [\\n"}'),),
        enforced=True,
    ),
    Recorded(
        "gemma",
        "a bare word",
        gemma("get_weather{city:Paris,detailed:true}"),
        calls=(("get_weather", '{"city": "Paris", "detailed": true}'),),
    ),
    Recorded(
        "gemma", "broken off", '<|tool_call>call:get_weather{city:<|"|>Par', calls=(("get_weather", '{"city": "Par'),)
    ),
    Recorded("gemma", "prose", "a <|tool_call> b", text="a <|tool_call> b"),
    Recorded(
        "function-gemma",
        "one call",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
        calls=(PARIS_2,),
        enforced=True,
    ),
    Recorded(
        "function-gemma",
        "no arguments",
        "<start_function_call>call:now{}<end_function_call>",
        calls=(NOW,),
        enforced=True,
    ),
    Recorded(
        "function-gemma",
        "broken off",
        "<start_function_call>call:now{a:<escape>b<esc",
        calls=(("now", '{"a": "b<esc'),),
    ),
    Recorded("function-gemma", "prose", "<start_of <escape>", text="<start_of <escape>"),
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
RECORDED: list[Recorded] = [
    *hermes("hermes"),
    *hermes("generic"),
    *QWEN_CODER,
    *SEED,
    *MINIMAX,
    *GLM,
    *LLAMA,
    *PYTHONIC,
    *LFM,
    *TOOL_CODE,
    *MISTRAL,
    *NAMED,
    *GRANITE,
    *DEEPSEEK,
    *KIMI,
    *GEMMA,
    *HARMONY,
]
