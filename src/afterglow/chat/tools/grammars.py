"""Grammars in llguidance's dialect of Lark, put together rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from afterglow.chat.grammar import JSON_STYLE
from afterglow.chat.keywords import enforceable
from afterglow.chat.tools.tool import Tool

Literal: TypeAlias = Callable[[str], str]
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
DATA = frozenset({"enum", "const", "default", "examples"})  # keywords whose values are no schemas


class Grammar:
    """Rules that are added one by one. `literal` writes a text as a terminal: quoted, or as a control token.

    >>> grammar = Grammar(json.dumps)
    >>> grammar.lark(grammar.text("yes"))
    'start: "yes"\\nSPACE: /[ \\\\t\\\\n]{1,4}/\\n'
    """

    def __init__(self, literal: Literal) -> None:
        self._literal = literal
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """This text."""
        return self._literal(text)

    def texts(self, *texts: str) -> str:
        """These texts, one after the other."""
        return " ".join(self._literal(text) for text in texts if text)

    def rule(self, expression: str, attributes: str = "") -> str:
        """A new rule's name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """A JSON value of this schema."""
        strict = enforceable(schema, "tools")
        styled = {**strict, "x-guidance": JSON_STYLE} if isinstance(strict, Mapping) else strict
        return self.rule(f"%json {json.dumps(styled)}")

    def json_call(self, tool: Tool, *, arguments: str = "arguments", more: Mapping[str, Any] | None = None) -> str:
        """A call of this tool as a JSON object; `more` are other members that may follow."""
        inside = moved(dict(tool.parameters), f"#/properties/{arguments}")
        properties = {"name": {"const": tool.name}, arguments: inside, **(more or {})}
        schema = {
            "type": "object",
            "properties": properties,
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        return self.json(schema)

    def free(self, ending: str, *, shortest: int = 0, longest: int | None = None) -> str:
        """Any text up to and including `ending`, which it does not contain."""
        written = self._literal(ending)
        text = f"/(?s:.{{{shortest},{'' if longest is None else longest}}})/"
        if QUOTED.fullmatch(written):
            return self.rule(text, f"[suffix={written}]")
        return self.rule(f"{text} {written}")  # a control token: no text contains it

    def lark(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, "SPACE: /[ \\t\\n]{1,4}/", ""])


def one_of(expressions: Iterable[str]) -> str:
    """A choice."""
    return "( " + " | ".join(expressions) + " )"


def moved(schema: Any, place: str) -> Any:
    """A schema as it reads at another place of a document: its references begin there."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_member(key, value, place) for key, value in schema.items()}


def _moved_member(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    return value if key in DATA else moved(value, place)
