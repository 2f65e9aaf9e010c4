"""What the recorded answers are made of: tools, calls of them, and the form of a record."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.chat.tools import Tool, parse_tools

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
