"""Recorded outputs of the families that write arguments in tags, as Python, or in their own notation."""

from __future__ import annotations

from support.tool_records import NESTED, NESTED_PLAIN, NOW, PARIS, PARIS_2, ZURICH, RecordedOutput


def xml_call(name: str, **arguments: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


FILTERS = '{"limit": 3, "tags": ["a", "bc"]}'
QWEN_CODER = [
    RecordedOutput("qwen-coder", "one call", xml_call("get_weather", city="Paris"), calls=(PARIS,), enforced=True),
    RecordedOutput(
        "qwen-coder", "number", xml_call("get_weather", city="Paris", days="2"), calls=(PARIS_2,), enforced=True
    ),
    RecordedOutput(
        "qwen-coder",
        "string of digits",
        xml_call("get_weather", city="12"),
        calls=(("get_weather", '{"city": "12"}'),),
        enforced=True,
    ),
    RecordedOutput(
        "qwen-coder",
        "Python constants",
        xml_call("get_weather", city="Paris", detailed="True"),
        calls=(("get_weather", '{"city": "Paris", "detailed": true}'),),
        enforced=True,
    ),
    RecordedOutput(
        "qwen-coder",
        "empty text",
        xml_call("get_weather", city=""),
        calls=(("get_weather", '{"city": ""}'),),
        enforced=True,
    ),
    RecordedOutput(
        "qwen-coder", "several calls", f"{xml_call('get_weather', city='Paris')}\n{xml_call('now')}", calls=(PARIS, NOW)
    ),
    RecordedOutput(
        "qwen-coder", "nested", xml_call("search", filters=FILTERS, query="x"), calls=(NESTED_PLAIN,), enforced=True
    ),
    RecordedOutput(
        "qwen-coder", "unicode", f"Sure.\n{xml_call('get_weather', city='Zürich ☀️')}", text="Sure.", calls=(ZURICH,)
    ),
    RecordedOutput(
        "qwen-coder",
        "lines and tags in a value",
        xml_call("get_weather", city='a\n\n  "b" </param>\n'),
        calls=(("get_weather", '{"city": "a\\n\\n  \\"b\\" </param>\\n"}'),),
        enforced=True,
    ),
    RecordedOutput(
        "qwen-coder",
        "on one line",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        calls=(PARIS,),
        enforced=True,
    ),
    RecordedOutput(
        "qwen-coder",
        "without the opening",
        "Now:\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        text="Now:",
        calls=(PARIS,),
    ),
    RecordedOutput(
        "qwen-coder",
        "unknown parameter and unknown tool",
        xml_call("dance", steps="[1, 2]", kind="waltz"),
        calls=(("dance", '{"steps": [1, 2], "kind": "waltz"}'),),
    ),
    RecordedOutput(
        "qwen-coder",
        "truncated",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        calls=(("get_weather", '{"city": "Par'),),
    ),
    RecordedOutput(
        "qwen-coder",
        "truncated in a number",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n1",
        calls=(("get_weather", '{"city": "Paris", "days": 1'),),
    ),
    RecordedOutput(
        "qwen-coder", "missing ends", xml_call("get_weather", city="Paris").replace("</function>\n", ""), calls=(PARIS,)
    ),
    RecordedOutput(
        "qwen-coder",
        "prose",
        "In <tool_call> and <function=> tags, a<b",
        text="In <tool_call> and <function=> tags, a<b",
    ),
]
SEED = [
    RecordedOutput(
        "seed",
        "last newline of a value",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Bern\nRome\n</parameter>\n</function>\n</seed:tool_call>",
        calls=(("get_weather", '{"city": "Bern\\nRome\\n"}'),),
        enforced=True,
    ),
    RecordedOutput(
        "seed",
        "one call",
        xml_call("get_weather", city="Paris").replace("tool_call>", "seed:tool_call>"),
        calls=(PARIS,),
        enforced=True,
    ),
    RecordedOutput(
        "seed",
        "several calls in one block",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n"
        "<function=now>\n</function>\n</seed:tool_call>",
        calls=(PARIS, NOW),
    ),
    RecordedOutput("seed", "truncated", "<seed:tool_call>\n<function=now>", calls=(("now", ""),)),
    RecordedOutput("seed", "prose", "a <seed: b", text="a <seed: b"),
]
MINIMAX = [
    RecordedOutput(
        "minimax",
        "one call",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        calls=(PARIS_2,),
        enforced=True,
    ),
    RecordedOutput(
        "minimax",
        "several calls",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        calls=(PARIS, NOW),
    ),
    RecordedOutput("minimax", "truncated", '<minimax:tool_call>\n<invoke name="no', text=""),
    RecordedOutput("minimax", "prose", "<minimax:tool_call> is a tag", text="<minimax:tool_call> is a tag"),
]


def glm_call(name: str, *, newline: str = "\n", **arguments: str) -> str:
    body = "".join(
        f"<arg_key>{key}</arg_key>{newline}<arg_value>{value}</arg_value>{newline}" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{newline}{body}</tool_call>"


GLM = [
    RecordedOutput("glm", "one call", glm_call("get_weather", city="Paris", days="2"), calls=(PARIS_2,), enforced=True),
    RecordedOutput(
        "glm", "without newlines", glm_call("get_weather", newline="", city="Paris"), calls=(PARIS,), enforced=True
    ),
    RecordedOutput(
        "glm",
        "several calls",
        f"Ok.\n{glm_call('get_weather', city='Paris')}\n{glm_call('now')}",
        text="Ok.",
        calls=(PARIS, NOW),
    ),
    RecordedOutput(
        "glm", "empty text", glm_call("get_weather", city=""), calls=(("get_weather", '{"city": ""}'),), enforced=True
    ),
    RecordedOutput("glm", "no arguments", "<tool_call>now</tool_call>", calls=(NOW,), enforced=True),
    RecordedOutput("glm", "unicode", glm_call("get_weather", city="Zürich ☀️"), calls=(ZURICH,), enforced=True),
    RecordedOutput(
        "glm", "nested", glm_call("search", filters=FILTERS, query="x"), calls=(NESTED_PLAIN,), enforced=True
    ),
    RecordedOutput(
        "glm",
        "newlines are preserved",
        glm_call("get_weather", city="\na\n"),
        calls=(("get_weather", '{"city": "\\na\\n"}'),),
        enforced=True,
    ),
    RecordedOutput(
        "glm",
        "truncated",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        calls=(("get_weather", '{"city": "Par'),),
    ),
    RecordedOutput("glm", "prose", "<tool_call> begins a call", text="<tool_call> begins a call"),
]
PYTHONIC = [
    RecordedOutput("pythonic", "one call", '[get_weather(city="Paris")]', calls=(PARIS,), enforced=True),
    RecordedOutput("pythonic", "several calls", '[get_weather(city="Paris", days=2), now()]', calls=(PARIS_2, NOW)),
    RecordedOutput("pythonic", "no arguments", "[now()]", calls=(NOW,), enforced=True),
    RecordedOutput(
        "pythonic",
        "nested",
        '[search(filters={"limit": 3, "tags": ["a", "bc"]}, query="x")]',
        calls=(NESTED_PLAIN,),
        enforced=True,
    ),
    RecordedOutput(
        "pythonic",
        "Python literals",
        "[get_weather(city='it\\'s, (ok)', detailed=True)]",
        calls=(("get_weather", '{"city": "it\'s, (ok)", "detailed": true}'),),
        enforced=True,
    ),
    RecordedOutput("pythonic", "unicode", "Yes:\n[get_weather(city='Zürich ☀️')]", text="Yes:", calls=(ZURICH,)),
    RecordedOutput("pythonic", "fenced", '```python\n[get_weather(city="Paris")]\n```', calls=(PARIS,)),
    RecordedOutput("pythonic", "other fences", "```\n[1]\n```", text="```\n[1]\n```"),
    RecordedOutput("pythonic", "unquoted word", "[get_weather(city=Paris)]", calls=(PARIS,)),
    RecordedOutput(
        "pythonic", "string of digits", "[get_weather(city=12)]", calls=(("get_weather", '{"city": "12"}'),)
    ),
    RecordedOutput("pythonic", "unknown tool", "[dance(a=1)]", text="[dance(a=1)]"),
    RecordedOutput(
        "pythonic",
        "prose",
        "[1, 2]\n[get_weather] [x]\n[get_weather(there)]",
        text="[1, 2]\n[get_weather] [x]\n[get_weather(there)]",
    ),
    RecordedOutput("pythonic", "truncated", '[get_weather(city="Par', calls=(("get_weather", '{"city": "Par'),)),
    RecordedOutput("pythonic", "truncated in the name", "[get_wea", text="[get_wea"),
]
LFM = [
    RecordedOutput(
        "lfm",
        "one call",
        '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
        calls=(PARIS,),
        enforced=True,
    ),
    RecordedOutput(
        "lfm",
        "several calls",
        '<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>Wait.',
        text="Wait.",
        calls=(PARIS, NOW),
    ),
    RecordedOutput(
        "lfm", "unknown tool", "<|tool_call_start|>[dance(a=1)]<|tool_call_end|>", calls=(("dance", '{"a": 1}'),)
    ),
    RecordedOutput("lfm", "truncated", "<|tool_call_start|>[dance(a=[1", calls=(("dance", '{"a": [1'),)),
]
TOOL_CODE = [
    RecordedOutput(
        "tool-code", "one call", '```tool_code\nget_weather(city="Paris")\n```', calls=(PARIS,), enforced=True
    ),
    RecordedOutput("tool-code", "printed", '```tool_code\nprint(get_weather(city="Paris"))\n```', calls=(PARIS,)),
    RecordedOutput(
        "tool-code",
        "several calls",
        'So:\n```tool_code\nget_weather(city="Paris")\nnow()\n```',
        text="So:",
        calls=(PARIS, NOW),
    ),
    RecordedOutput(
        "tool-code",
        "other code",
        "```tool_code\nx = 1\n```\n```python\n1\n```",
        text="```tool_code\nx = 1\n```\n```python\n1\n```",
    ),
    RecordedOutput(
        "tool-code", "truncated", "```tool_code\nget_weather(city='P", calls=(("get_weather", '{"city": \'P'),)
    ),
]


def gemma_call(body: str) -> str:
    return f"<|tool_call>call:{body}<tool_call|>"


def gemma_quote(text: str) -> str:
    return f'<|"|>{text}<|"|>'


GEMMA = [
    RecordedOutput(
        "gemma", "one call", gemma_call(f"get_weather{{city:{gemma_quote('Paris')}}}"), calls=(PARIS,), enforced=True
    ),
    RecordedOutput(
        "gemma",
        "several calls",
        gemma_call(f"get_weather{{city:{gemma_quote('Paris')},days:2}}") + gemma_call("now{}"),
        calls=(PARIS_2, NOW),
    ),
    RecordedOutput(
        "gemma",
        "empty text",
        gemma_call(f"get_weather{{city:{gemma_quote('')}}}"),
        calls=(("get_weather", '{"city": ""}'),),
        enforced=True,
    ),
    RecordedOutput("gemma", "no arguments", gemma_call("now{}"), calls=(NOW,), enforced=True),
    RecordedOutput(
        "gemma",
        "nested",
        gemma_call(
            f"search{{filters:{{limit:3,tags:[{gemma_quote('a')},{gemma_quote('bc')}]}},query:{gemma_quote('x')}}}"
        ),
        calls=(NESTED_PLAIN,),
        enforced=True,
    ),
    RecordedOutput(
        "gemma",
        "unicode",
        "Hm. " + gemma_call(f"get_weather{{city:{gemma_quote('Zürich ☀️')}}}"),
        text="Hm.",
        calls=(ZURICH,),
    ),
    RecordedOutput(
        "gemma",
        "quotes and braces in text",
        gemma_call(f"get_weather{{city:{gemma_quote(chr(34) + '}, [' + chr(10))}}}"),
        calls=(("get_weather", '{"city": "\\"}, [\\n"}'),),
        enforced=True,
    ),
    RecordedOutput(
        "gemma",
        "unquoted word",
        gemma_call("get_weather{city:Paris,detailed:true}"),
        calls=(("get_weather", '{"city": "Paris", "detailed": true}'),),
    ),
    RecordedOutput(
        "gemma", "truncated", '<|tool_call>call:get_weather{city:<|"|>Par', calls=(("get_weather", '{"city": "Par'),)
    ),
    RecordedOutput("gemma", "quoted keys", gemma_call('get_weather{"city":<|"|>Paris<|"|>}'), calls=(PARIS,)),
    RecordedOutput("gemma", "prose", "a <|tool_call> b", text="a <|tool_call> b"),
    RecordedOutput(
        "function-gemma",
        "one call",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
        calls=(PARIS_2,),
        enforced=True,
    ),
    RecordedOutput(
        "function-gemma",
        "no arguments",
        "<start_function_call>call:now{}<end_function_call>",
        calls=(NOW,),
        enforced=True,
    ),
    RecordedOutput(
        "function-gemma",
        "truncated",
        "<start_function_call>call:now{a:<escape>b<esc",
        calls=(("now", '{"a": "b<esc'),),
    ),
    RecordedOutput("function-gemma", "prose", "<start_of <escape>", text="<start_of <escape>"),
]
DSML = "｜DSML｜"  # noqa: RUF001


def dsml_call(name: str, *arguments: tuple[str, str, str]) -> str:
    """Write a call; arguments are (name, whether it is a string, value)."""
    written = "".join(
        f'<{DSML}parameter name="{key}" string="{is_string}">{value}</{DSML}parameter>\n'
        for key, is_string, value in arguments
    )
    return f'<{DSML}invoke name="{name}">\n{written}</{DSML}invoke>\n'


def dsml_block(*calls: str, block: str = "function_calls") -> str:
    return f"<{DSML}{block}>\n{''.join(calls)}</{DSML}{block}>"


NESTED_FILTERS = '{"limit": 3, "tags": ["a", "b\\"c"]}'
DEEPSEEK_DSML = [
    RecordedOutput(
        "deepseek-dsml",
        "one call",
        dsml_block(dsml_call("get_weather", ("city", "true", "Paris"), ("days", "false", "2"))),
        calls=(PARIS_2,),
        enforced=True,
    ),
    RecordedOutput(
        "deepseek-dsml",
        "several calls",
        "Ok.\n\n"
        + dsml_block(
            dsml_call("get_weather", ("city", "true", "Paris")),
            dsml_call("search", ("filters", "false", NESTED_FILTERS), ("query", "true", "x")),
        ),
        text="Ok.",
        calls=(PARIS, NESTED),
    ),
    RecordedOutput(
        "deepseek-dsml",
        "number as a string",
        dsml_block(dsml_call("get_weather", ("city", "true", "12"), ("days", "true", "2"))),
        calls=(("get_weather", '{"city": "12", "days": 2}'),),
    ),
    RecordedOutput("deepseek-dsml", "no arguments", dsml_block(dsml_call("now")), calls=(NOW,), enforced=True),
    RecordedOutput(
        "deepseek-dsml",
        "truncated",
        f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" string="true">Par',
        calls=(("get_weather", '{"city": "Par'),),
    ),
    RecordedOutput("deepseek-dsml", "prose", f"<{DSML} is a token", text=f"<{DSML} is a token"),
    RecordedOutput(
        "deepseek-dsml-calls",
        "one call",
        "\n\n" + dsml_block(dsml_call("get_weather", ("city", "true", "Zürich ☀️")), block="tool_calls"),
        calls=(ZURICH,),
    ),
    RecordedOutput(
        "deepseek-dsml-calls",
        "call of another type",
        dsml_block(
            dsml_call("get_weather", ("city", "true", "Paris"), ("detailed", "false", "true")), block="tool_calls"
        ),
        calls=(("get_weather", '{"city": "Paris", "detailed": true}'),),
        enforced=True,
    ),
]


def kimi_k3_call(name: str, *arguments: tuple[str, str, str], index: int = 1) -> str:
    """Write a call; arguments are (name, type, value)."""
    written = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    )
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{written}<|close|>call<|sep|>'


def kimi_k3_block(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


KIMI_K3 = [
    RecordedOutput(
        "kimi-k3",
        "one call",
        kimi_k3_block(kimi_k3_call("get_weather", ("city", "string", "Paris"), ("days", "number", "2"))),
        calls=(PARIS_2,),
        enforced=True,
    ),
    RecordedOutput(
        "kimi-k3",
        "several calls",
        "Ok."
        + kimi_k3_block(
            kimi_k3_call("now"),
            kimi_k3_call("search", ("filters", "object", NESTED_FILTERS), ("query", "string", "x"), index=2),
        ),
        text="Ok.",
        calls=(NOW, NESTED),
    ),
    RecordedOutput(
        "kimi-k3",
        "truncated",
        kimi_k3_block(kimi_k3_call("get_weather", ("city", "string", "Par"))).partition("<|close|>")[0],
        calls=(("get_weather", '{"city": "Par'),),
    ),
    RecordedOutput("kimi-k3", "prose", "an <|open|> call", text="an <|open|> call"),
]


def minicpm_call(name: str, **arguments: str) -> str:
    written = "".join(f'<param name="{key}">{value}</param>' for key, value in arguments.items())
    return f'<function name="{name}">{written}</function>'


MINICPM = [
    RecordedOutput(
        "minicpm", "one call", minicpm_call("get_weather", city="Paris", days="2"), calls=(PARIS_2,), enforced=True
    ),
    RecordedOutput(
        "minicpm",
        "several calls",
        f"Ok.\n{minicpm_call('get_weather', city='Paris')}\n{minicpm_call('now')}",
        text="Ok.",
        calls=(PARIS, NOW),
    ),
    RecordedOutput(
        "minicpm",
        "CDATA section",
        minicpm_call("get_weather", city="<![CDATA[<b>Paris</param>\n]]>", days="<![CDATA[2]]>"),
        calls=(("get_weather", '{"city": "<b>Paris</param>\\n", "days": 2}'),),
    ),
    RecordedOutput("minicpm", "truncated", '<function name="now"><param name="a">b', calls=(("now", '{"a": b'),)),
    RecordedOutput("minicpm", "prose", 'a <function name="b"c>', text='a <function name="b"c>'),
]
MM = "]<]minimax[>["


def minimax_m3_block(*calls: str) -> str:
    return f"{MM}<tool_call>\n{''.join(calls)}{MM}</tool_call>"


def element(key: str, value: str) -> str:
    return f"{MM}<{key}>{value}{MM}</{key}>"


def minimax_m3_call(name: str, *elements: str) -> str:
    return f'{MM}<invoke name="{name}">{"".join(elements)}{MM}</invoke>\n'


MINIMAX_M3 = [
    RecordedOutput(
        "minimax-m3",
        "one call",
        minimax_m3_block(minimax_m3_call("get_weather", element("city", "Paris"), element("days", "2"))),
        calls=(PARIS_2,),
        enforced=True,
    ),
    RecordedOutput(
        "minimax-m3",
        "nested",
        minimax_m3_block(
            minimax_m3_call(
                "search",
                element(
                    "filters", element("limit", "3") + element("tags", element("item", "a") + element("item", 'b"c'))
                ),
                element("query", "x"),
            )
        ),
        calls=(NESTED,),
        enforced=True,
    ),
    RecordedOutput(
        "minimax-m3",
        "several calls",
        "Ok." + minimax_m3_block(minimax_m3_call("get_weather", element("city", "Zürich ☀️")), minimax_m3_call("now")),
        text="Ok.",
        calls=(ZURICH, NOW),
    ),
    RecordedOutput(
        "minimax-m3",
        "elements in a string",
        minimax_m3_block(minimax_m3_call("get_weather", element("city", element("b", "Paris")))),
        calls=(("get_weather", f'{{"city": "{element("b", "Paris")}"}}'),),
    ),
    RecordedOutput(
        "minimax-m3",
        "unknown tool",
        minimax_m3_block(minimax_m3_call("dance", element("steps", element("item", "1") + element("item", "b")))),
        calls=(("dance", '{"steps": [1, "b"]}'),),
    ),
    RecordedOutput(
        "minimax-m3",
        "truncated",
        minimax_m3_block(minimax_m3_call("get_weather", f"{MM}<city>Par")).partition("Par")[0] + "Par",
        calls=(("get_weather", '{"city": "Par'),),
    ),
    RecordedOutput("minimax-m3", "prose", f"{MM} is a token", text=f"{MM} is a token"),
]
TEXT_OUTPUTS: list[RecordedOutput] = [
    *QWEN_CODER,
    *SEED,
    *MINIMAX,
    *GLM,
    *PYTHONIC,
    *LFM,
    *TOOL_CODE,
    *GEMMA,
    *DEEPSEEK_DSML,
    *KIMI_K3,
    *MINICPM,
    *MINIMAX_M3,
]
