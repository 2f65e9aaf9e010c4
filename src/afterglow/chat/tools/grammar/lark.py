"""Builder of grammars in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from afterglow.chat.constraints.grammar import JSON_GRAMMAR_OPTIONS, LiteralFormatter
from afterglow.chat.constraints.json_schema import to_llguidance_schema
from afterglow.chat.constraints.lark_regex import escape_regex
from afterglow.chat.tools.tool import Tool

QUOTED_LITERAL_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"')
UNESCAPED_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")
MAX_PARALLEL_CALLS = 16  # in one answer, if the grammar enforces calls


class LarkGrammar:
    """Collects rules. `write_literal` formats a text as a terminal: quoted, or as a control token.

    >>> grammar = LarkGrammar(json.dumps)
    >>> grammar.to_lark(grammar.literal("yes"))
    'start: "yes"\\nSPACE: /[ \\\\n]/\\n'
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

    def add_recursive_rule(self, build: Callable[[str], str]) -> str:
        """Add a rule whose expression contains its name, which `build` gets."""
        position, name = len(self._rules), self.add_rule("")
        self._rules[position] = f"{name}: {build(name)}"
        return name

    def add_json_rule(self, schema: Mapping[str, Any] | bool) -> str:
        """Add a rule for a JSON value of this enforceable schema."""
        plain = to_llguidance_schema(schema)
        if isinstance(plain, Mapping):
            plain = {**plain, "x-guidance": JSON_GRAMMAR_OPTIONS}
        return self.add_rule(f"%json {json.dumps(plain)}")

    def add_json_call_rule(
        self,
        tool: Tool,
        *,
        name_key: str = "name",
        arguments_key: str = "arguments",
        properties_before: Mapping[str, Any] | None = None,
        optional_properties: Mapping[str, Any] | None = None,
    ) -> str:
        """Add a rule for a call of this tool as a JSON object, with other properties before and after these two."""
        arguments = {key: value for key, value in tool.parameters.items() if key != "$defs"}
        required = {**(properties_before or {}), name_key: {"const": tool.name}, arguments_key: arguments}
        return self.add_json_rule(
            {
                "type": "object",
                "properties": {**required, **(optional_properties or {})},
                "required": list(required),
                "additionalProperties": False,
                "$defs": tool.parameters.get("$defs", {}),
            }
        )

    def add_text_until_rule(
        self, ending: str, *, min_length: int = 0, max_length: int | None = None, first: str = "."
    ) -> str:
        """Add a rule for any text up to and including `ending`, which the text does not contain.

        `first` is the class of its first character.
        """
        literal = self._write_literal(ending)
        text = f"/(?s:.{{{min_length},{'' if max_length is None else max_length}}})/"
        if first != "." and max_length != 0:
            rest = f"{{{max(min_length - 1, 0)},{'' if max_length is None else max_length - 1}}}"
            text = f"/(?s:({first}.{rest}){'' if min_length else '?'})/"
        if QUOTED_LITERAL_PATTERN.fullmatch(literal):
            return self.add_rule(text, f"[suffix={literal}]")
        # No text contains a control token. Text before it in the ending must end the terminal of the text.
        head = QUOTED_LITERAL_PATTERN.match(literal)
        if head is None:
            return self.add_rule(f"{text} {literal}")
        escaped = re.escape(json.loads(head[0])).replace("/", "\\/")
        return self.add_rule(f"{text[:-1]}{escaped}/ {literal[head.end() :]}")

    def add_pattern_until_rule(
        self, expressions: Sequence[str], ending: str, *, excluded: str, excluded_start: str = ""
    ) -> str:
        """Add a rule for a text that all of these expressions match, up to and including `ending`.

        The text does not contain `excluded`, with which a parser ends it, and does not begin with `excluded_start`.
        """
        literal = self._write_literal(ending)
        head = QUOTED_LITERAL_PATTERN.match(literal)
        is_text = head is not None and head.end() == len(literal)
        # Before a control token, the text of the ending must end the terminal.
        end = "" if head is None or is_text else escape_regex(json.loads(head[0]))
        forbidden = [f"(?s:.*){escape_regex(excluded)}(?s:.*)"]
        forbidden += [f"{escape_regex(excluded_start)}(?s:.*)"] if excluded_start else []
        terminal = self.add_terminal([f"(?:{expression}){end}" for expression in expressions], forbidden)
        if is_text:
            return self.add_rule(terminal, f"[suffix={literal}]")
        return self.add_rule(f"{terminal} {literal if head is None else literal[head.end() :]}")

    def add_terminal(self, expressions: Sequence[str], excluded: Sequence[str] = ()) -> str:
        """Add a terminal for a text that all of these expressions match, and none of the excluded ones."""
        name = f"T{len(self._rules)}"
        required = " & ".join(f"/{_escape_slashes(expression)}/" for expression in expressions)
        self._rules.append(f"{name}: {required}" + "".join(f" & ~/{_escape_slashes(other)}/" for other in excluded))
        return name

    def add_calls_rule(self, call: str, parallel: bool, separator: str) -> str:
        """Add a rule for a call. Return an expression for one call, or for one or more if `parallel`.

        Their number is bounded, because a model may repeat calls forever.
        """
        name = self.add_rule(call)
        return f"{name} ({separator} {name}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else name

    def to_lark(self, start: str) -> str:
        """Return the complete grammar."""
        return "\n".join([f"start: {start}", *self._rules, "SPACE: /[ \\n]/", ""])


def _escape_slashes(pattern: str) -> str:
    """Return a pattern as it is written between slashes."""
    return UNESCAPED_SLASH.sub(r"\1\\/", pattern)


def join_alternatives(expressions: Iterable[str]) -> str:
    """Return an expression that matches one of these."""
    return "( " + " | ".join(expressions) + " )"
