"""Answers of the families that write arguments in tags, as Python, or in a notation of their own."""

from __future__ import annotations

from support.tool_records import NESTED_PLAIN, NOW, PARIS, PARIS_2, ZURICH, Recorded


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
TEXT: list[Recorded] = [*QWEN_CODER, *SEED, *MINIMAX, *GLM, *PYTHONIC, *LFM, *TOOL_CODE, *GEMMA]
