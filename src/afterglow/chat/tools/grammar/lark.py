"""Grammars in llguidance's dialect of Lark, put together rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from afterglow.chat.constraints.grammar import JSON_GRAMMAR_OPTIONS
from afterglow.chat.constraints.json_schema import to_enforceable_schema
from afterglow.chat.tools.tool import Tool

LiteralWriter: TypeAlias = Callable[[str], str]
QUOTED_LITERAL_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"')
NON_SCHEMA_KEYWORDS = frozenset({"enum", "const", "default", "examples"})  # keywords whose values are no schemas


class LarkGrammar:
    """Rules that are added one by one. `literal` writes a text as a terminal: quoted, or as a control token.

    >>> grammar = Grammar(json.dumps)
    >>> grammar.lark(grammar.text("yes"))
    'start: "yes"\\nSPACE: /[ \\\\t\\\\n]{1,4}/\\n'
    """

    def __init__(self, write_literal: LiteralWriter) -> None:
        self._write_literal = write_literal
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """This text."""
        return self._write_literal(text)

    def literals(self, *texts: str) -> str:
        """These texts, one after the other."""
        return " ".join(self._write_literal(text) for text in texts if text)

    def add_rule(self, expression: str, attributes: str = "") -> str:
        """A new rule's name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def add_json_rule(self, schema: Mapping[str, Any] | bool) -> str:
        """A JSON value of this schema."""
        strict = to_enforceable_schema(schema, "tools")
        styled = {**strict, "x-guidance": JSON_GRAMMAR_OPTIONS} if isinstance(strict, Mapping) else strict
        return self.add_rule(f"%json {json.dumps(styled)}")

    def add_json_call_rule(
        self, tool: Tool, *, arguments_key: str = "arguments", extra_properties: Mapping[str, Any] | None = None
    ) -> str:
        """A call of this tool as a JSON object; `more` are other members that may follow."""
        inside = rebase_references(dict(tool.parameters), f"#/properties/{arguments_key}")
        properties = {"name": {"const": tool.name}, arguments_key: inside, **(extra_properties or {})}
        schema = {
            "type": "object",
            "properties": properties,
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        return self.add_json_rule(schema)

    def add_text_until_rule(self, ending: str, *, min_length: int = 0, max_length: int | None = None) -> str:
        """Any text up to and including `ending`, which it does not contain."""
        written = self._write_literal(ending)
        text = f"/(?s:.{{{min_length},{'' if max_length is None else max_length}}})/"
        if QUOTED_LITERAL_PATTERN.fullmatch(written):
            return self.add_rule(text, f"[suffix={written}]")
        return self.add_rule(f"{text} {written}")  # a control token: no text contains it

    def to_lark(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, "SPACE: /[ \\t\\n]{1,4}/", ""])


def join_alternatives(expressions: Iterable[str]) -> str:
    """A choice."""
    return "( " + " | ".join(expressions) + " )"


def rebase_references(schema: Any, base_pointer: str) -> Any:
    """A schema as it reads at another place of a document: its references begin there."""
    if isinstance(schema, list):
        return [rebase_references(item, base_pointer) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _rebase_member(key, value, base_pointer) for key, value in schema.items()}


def _rebase_member(key: str, value: Any, base_pointer: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return base_pointer + value[1:]
    return value if key in NON_SCHEMA_KEYWORDS else rebase_references(value, base_pointer)
