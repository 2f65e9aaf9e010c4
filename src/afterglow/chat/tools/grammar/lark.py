"""Builder of grammars in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from afterglow.chat.constraints.grammar import JSON_GRAMMAR_OPTIONS, LiteralFormatter
from afterglow.chat.constraints.json_schema import to_enforceable_schema, to_llguidance_schema
from afterglow.chat.tools.tool import Tool

QUOTED_LITERAL_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"')
MAX_PARALLEL_CALLS = 16  # in one answer, if the grammar enforces calls
NON_SCHEMA_KEYWORDS = frozenset({"enum", "const", "default", "examples"})  # their values are not schemas


class LarkGrammar:
    """Collects rules. `write_literal` formats a text as a terminal: quoted, or as a control token.

    >>> grammar = LarkGrammar(json.dumps)
    >>> grammar.to_lark(grammar.literal("yes"))
    'start: "yes"\\nSPACE: /[ \\\\t\\\\n]{1,4}/\\n'
    """

    def __init__(self, write_literal: LiteralFormatter) -> None:
        self._write_literal = write_literal
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """Return the terminal of a text."""
        return self._write_literal(text)

    def literals(self, *texts: str) -> str:
        """Return the sequence of these texts; empty texts are skipped."""
        return " ".join(self._write_literal(text) for text in texts if text)

    def add_rule(self, expression: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def add_json_rule(self, schema: Mapping[str, Any] | bool) -> str:
        """Add a rule for a JSON value of this schema."""
        plain = to_llguidance_schema(to_enforceable_schema(schema, "tools"))
        if isinstance(plain, Mapping):
            plain = {**plain, "x-guidance": JSON_GRAMMAR_OPTIONS}
        return self.add_rule(f"%json {json.dumps(plain)}")

    def add_json_call_rule(
        self, tool: Tool, *, arguments_key: str = "arguments", extra_properties: Mapping[str, Any] | None = None
    ) -> str:
        """Add a rule for a call of this tool as a JSON object. `extra_properties` may follow the arguments."""
        arguments = rebase_references(dict(tool.parameters), f"#/properties/{arguments_key}")
        properties = {"name": {"const": tool.name}, arguments_key: arguments, **(extra_properties or {})}
        schema = {
            "type": "object",
            "properties": properties,
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        return self.add_json_rule(schema)

    def add_text_until_rule(self, ending: str, *, min_length: int = 0, max_length: int | None = None) -> str:
        """Add a rule for any text up to and including `ending`, which the text does not contain."""
        literal = self._write_literal(ending)
        text = f"/(?s:.{{{min_length},{'' if max_length is None else max_length}}})/"
        if QUOTED_LITERAL_PATTERN.fullmatch(literal):
            return self.add_rule(text, f"[suffix={literal}]")
        # No text contains a control token. Text before it in the ending must end the terminal of the text.
        head = QUOTED_LITERAL_PATTERN.match(literal)
        if head is None:
            return self.add_rule(f"{text} {literal}")
        escaped = re.escape(json.loads(head[0])).replace("/", "\\/")
        return self.add_rule(f"{text[:-1]}{escaped}/ {literal[head.end() :]}")

    def more_calls(self, expression: str) -> str:
        """Return an expression for the calls after the first one. Bounded, because a model may repeat calls forever."""
        return f"({expression}){{0,{MAX_PARALLEL_CALLS - 1}}}"

    def to_lark(self, start: str) -> str:
        """Return the complete grammar."""
        return "\n".join([f"start: {start}", *self._rules, "SPACE: /[ \\t\\n]{1,4}/", ""])


def join_alternatives(expressions: Iterable[str]) -> str:
    """Return an expression that matches one of these."""
    return "( " + " | ".join(expressions) + " )"


def rebase_references(schema: Any, base_pointer: str) -> Any:
    """Prefix the local references of a schema with `base_pointer`, so that it can be embedded there."""
    if isinstance(schema, list):
        return [rebase_references(item, base_pointer) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _rebase_member(key, value, base_pointer) for key, value in schema.items()}


def _rebase_member(key: str, value: Any, base_pointer: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return base_pointer + value[1:]
    return value if key in NON_SCHEMA_KEYWORDS else rebase_references(value, base_pointer)
