"""Tools, example calls and the record type of the recorded outputs."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.chat.tools.tool import Tool, parse_tools

TOOLS: tuple[Tool, ...] = parse_tools(
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
class RecordedOutput:
    """Raw output of a model and its expected parse.

    `calls` are pairs of name and arguments. `enforced`: the family's grammar accepts the output.
    """

    family: str
    case: str
    raw: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    enforced: bool = False

    def __str__(self) -> str:
        return f"{self.family}: {self.case}"


PARIS = ("get_weather", '{"city": "Paris"}')
PARIS_2 = ("get_weather", '{"city": "Paris", "days": 2}')
ZURICH = ("get_weather", '{"city": "Zürich ☀️"}')
NESTED = ("search", '{"filters": {"limit": 3, "tags": ["a", "b\\"c"]}, "query": "x"}')
NESTED_PLAIN = ("search", '{"filters": {"limit": 3, "tags": ["a", "bc"]}, "query": "x"}')
NOW = ("now", "{}")


def tagged_call(call: tuple[str, str], arguments: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "{call[0]}", "{arguments}": {call[1]}}}\n</tool_call>'


def json_call(call: tuple[str, str], arguments: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{arguments}": {call[1]}}}'
