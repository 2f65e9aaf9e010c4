"""Parser and grammar rules of calls written as Python: `name(key="value", other=1)`."""

from __future__ import annotations

from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.grammar.schema import (
    SchemaNode,
    build_python_constants,
    build_separated_rule,
    create_root,
    list_properties,
)
from afterglow.chat.tools.parsing.json_values import get_parameter_types, python_to_json
from afterglow.chat.tools.parsing.parser import ArgumentsBuilder, ToolParser
from afterglow.chat.tools.parsing.scanner import CharPosition, ParseSteps, is_name_char
from afterglow.chat.tools.tool import Tool

SINGLE_QUOTED_TERMINAL = r"""/'([^'\\\n]|\\['"\\nrt])*'/"""


class PythonValueScanner:
    """Finds the end of an argument's value, one character at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def classify(self, char: str) -> CharPosition:
        if self._quote:
            if char == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = char == "\\" and not self._escaped
        elif self._depth == 0 and char in ",)":
            return CharPosition.OUTSIDE
        else:
            self._quote = char if char in "'\"" else ""
            self._depth += (char in "([{") - (char in ")]}")
        return CharPosition.INSIDE


class PythonCallParser:
    """Parses one call. With `require_known_tool`, the text is a call only if it begins with a known tool's name."""

    def __init__(self, parser: ToolParser, *, require_known_tool: bool) -> None:
        self._parser, self._scanner, self._require_known_tool = parser, parser.scanner, require_known_tool
        self._arguments = ArgumentsBuilder(parser)
        self._started = False

    def parse(self) -> ParseSteps[bool]:
        """Parse a call; return whether it is one. If not, the text read follows the scanner's mark."""
        name = yield from self._scanner.take_while(is_name_char)
        name = name.removesuffix(".call")  # Llama's notation for calls of its built-in tools
        if (
            not name
            or (self._require_known_tool and name not in self._parser.tools)
            or not (yield from self._scanner.skip_any("("))
        ):
            return False
        while True:
            if (yield from self._scanner.skip_after_space(")")):
                self._begin_call(name)
                self._arguments.finish()
                return True
            if not (yield from self._parse_argument(name)):
                return self._started
            yield from self._scanner.skip_after_space(",")

    def _begin_call(self, name: str) -> None:
        if not self._started:
            self._parser.begin_call(name)
        self._started = True

    def _parse_argument(self, name: str) -> ParseSteps[bool]:
        """Parse one `key=value`; return False if it is truncated or not an argument."""
        key = yield from self._scanner.take_while(lambda char: char.isalnum() or char in "_-")
        yield from self._scanner.take_whitespace()
        if not key or not (yield from self._scanner.skip_any("=")):
            return False
        self._begin_call(name)
        pieces: list[str] = []
        end = yield from self._scanner.stream_value(PythonValueScanner().classify, pieces.append)
        complete, text = end is CharPosition.OUTSIDE, "".join(pieces)
        if self._arguments.begin_argument(key):
            types = get_parameter_types(self._parser.tools.get(name), key)
            self._arguments.add_json(python_to_json(text, types) if complete else text.lstrip())
        return complete


def build_python_call_rule(grammar: LarkGrammar, tool: Tool, family: str) -> str:
    """Return a rule for a call of this tool with its arguments in schema order."""
    arguments = [
        (
            f"{grammar.literal(parameter.name + '=')} {_build_value_rule(grammar, parameter.node)}",
            parameter.required,
        )
        for parameter in list_properties(create_root(tool, family))
    ]
    return grammar.add_rule(
        f"{grammar.literal(tool.name + '(')} {build_separated_rule(grammar, arguments, ', ')} {grammar.literal(')')}"
    )


def _build_value_rule(grammar: LarkGrammar, node: SchemaNode) -> str:
    """Return a rule for a value: True, False and None as in Python, everything else as JSON."""
    alternatives = []
    for choice in node.expand_choices():
        constants = build_python_constants(grammar, choice)
        alternatives += constants or [
            grammar.add_json_rule(choice.standalone_schema),
            *_build_single_quoted_terminals(grammar, choice),
        ]
    return join_alternatives(alternatives)


def _build_single_quoted_terminals(grammar: LarkGrammar, node: SchemaNode) -> list[str]:
    """Return terminals for a single-quoted string if they can enforce its schema."""
    if node.allowed_types != {"string"} or not node.has_only(frozenset({"type", "enum", "const"})):
        return []
    if node.allowed_values is not None:
        return [grammar.literal(repr(value)) for value in node.allowed_values if repr(value).startswith("'")]
    return [SINGLE_QUOTED_TERMINAL]
