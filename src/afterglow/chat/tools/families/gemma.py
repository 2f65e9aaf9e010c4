"""Gemma (FunctionGemma and Gemma 4): `call:name{key:value}` with a control token as string quote."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.grammar.patterns import build_choice_expression
from afterglow.chat.tools.grammar.schema import (
    ARRAY_KEYWORDS,
    OBJECT_KEYWORDS,
    SchemaNode,
    build_items_rule,
    build_separated_rule,
    build_text_until_rule,
    create_root,
    has_named_properties,
    list_properties,
)
from afterglow.chat.tools.parsing.json_calls import load_json, read_json_value, stream_json_value
from afterglow.chat.tools.parsing.json_values import get_parameter_types, text_to_json, to_json_string
from afterglow.chat.tools.parsing.parser import CallIdFactory, ToolParser
from afterglow.chat.tools.parsing.scanner import ParseSteps, is_name_char
from afterglow.chat.tools.tool import Tool

KEY_EXPRESSION = r'[^:,{}\[\]<"\s]([^:,{}\[\]<"\n]*[^:,{}\[\]<"\s])?'  # of what the parser reads as a key


class GemmaToolParser(ToolParser):
    """Parses Gemma's notation and streams JSON."""

    def __init__(self, tools: Sequence[Tool], new_id: CallIdFactory, *, opening: str, closing: str, quote: str) -> None:
        self._opening, self._closing, self._quote = opening, closing, quote
        super().__init__(tools, new_id)

    def parse(self) -> ParseSteps[None]:
        scanner = self.scanner
        while opening := (yield from scanner.stream_until(self._opening, sink=self.emit_text)):
            scanner.mark(len(opening))
            has_prefix = yield from scanner.skip_after_space("call:")
            name = (yield from scanner.take_while(is_name_char)) if has_prefix else ""
            if not name or (yield from scanner.peek()) != "{":
                self.reject_call(after_marker=True)
                continue
            self.begin_call(name)
            if not (yield from self._parse_container(self.tools.get(name))):
                yield from scanner.stream_until(self._closing, sink=self.emit_arguments)
                continue
            yield from scanner.skip_after_space(self._closing)

    def _parse_container(self, tool: Tool | None = None) -> ParseSteps[bool]:
        """Parse an object or a list; return False if it is truncated. `tool`: the one whose arguments the object is."""
        opening = self.scanner.take(1)
        closing = "}" if opening == "{" else "]"
        self.emit_arguments(opening)
        separator = ""
        while True:
            if (yield from self.scanner.skip_after_space(closing)):
                self.emit_arguments(closing)
                return True
            key = ""
            if opening == "{":
                key = yield from self._parse_key()
                if not (yield from self.scanner.skip_any(":")):
                    return False
                self.emit_arguments(f"{separator}{to_json_string(key)}: ")
            elif (yield from self.scanner.peek()):
                self.emit_arguments(separator)
            else:
                return False
            separator = ", "
            if not (yield from self._parse_value(get_parameter_types(tool, key))):
                return False
            yield from self.scanner.skip_after_space(",")

    def _parse_key(self) -> ParseSteps[str]:
        pieces: list[str] = []
        if (yield from self.scanner.skip_any(self._quote)):
            yield from self.scanner.stream_until(self._quote, sink=pieces.append)
            return "".join(pieces)
        if (yield from self.scanner.peek()) == '"':
            return str(load_json((yield from read_json_value(self.scanner))[0]) or "")
        return (yield from self.scanner.take_while(lambda char: char not in ':,{}[]<"')).strip()

    def _parse_value(self, types: frozenset[str]) -> ParseSteps[bool]:
        """Parse one value; return False if it is truncated."""
        if (yield from self.scanner.skip_after_space(self._quote)):
            return (yield from self.stream_string(self._quote))
        match (yield from self.scanner.peek()):
            case "{" | "[":
                return (yield from self._parse_container())
            case '"':
                return (yield from stream_json_value(self.scanner, self.emit_arguments))
        text = yield from self.scanner.take_while(lambda char: char not in ',{}[]<"')
        complete = bool((yield from self.scanner.peek()))
        self.emit_arguments(text_to_json(text.strip(), types) if complete else text)
        return complete and bool(text)


class GemmaRuleBuilder:
    """Builds grammar rules of Gemma's notation from schemas."""

    def __init__(self, grammar: LarkGrammar, quote: str) -> None:
        self._grammar, self._quote = grammar, quote
        self._any = ""  # the rule of any value, if there is one

    def build_object(self, node: SchemaNode) -> str:
        """Return an expression for an object with its members in alphabetical order, as the templates write them."""
        grammar = self._grammar
        properties = sorted(list_properties(node), key=lambda member: member.name.lower())
        members = [
            (f"{grammar.literal(f'{member.name}:')} {self.build_value(member.node)}", member.required)
            for member in properties
        ]
        if not has_named_properties(node):
            others = node.schema.get("additionalProperties")
            key = grammar.add_terminal(
                [KEY_EXPRESSION], [build_choice_expression([member.name for member in properties])]
            )
            value = self.build_value(node.create_child(others, "additionalProperties"))
            member_rule = grammar.add_rule(f"{key} {grammar.literal(':')} {value}")
            members.append((f"{member_rule} ({grammar.literal(',')} {member_rule})*", False))
        return f"{grammar.literal('{')} {build_separated_rule(grammar, members, ',')} {grammar.literal('}')}"

    def build_value(self, node: SchemaNode) -> str:
        """Return an expression for a value."""
        if not node.schema:
            return self._build_any(node)
        return join_alternatives(self._build_choice(choice) for choice in node.expand_choices())

    def _build_any(self, node: SchemaNode) -> str:
        """Return the rule of any value."""

        def build(name: str) -> str:
            self._any = name  # what arrays and objects contain
            return join_alternatives(self._build_choice(choice) for choice in node.expand_choices())

        return self._any or self._grammar.add_recursive_rule(build)

    def _build_choice(self, node: SchemaNode) -> str:
        grammar = self._grammar
        match sorted(node.allowed_types):
            case ["string"]:
                return f"{grammar.literal(self._quote)} {build_text_until_rule(grammar, node, ending=self._quote)}"
            case ["array"] if node.has_only(ARRAY_KEYWORDS):
                items = build_items_rule(grammar, node, self.build_value, ",")
                return f"{grammar.literal('[')} {items} {grammar.literal(']')}"
            case ["object"] if node.has_only(OBJECT_KEYWORDS):
                return grammar.add_rule(self.build_object(node))
            case [_] | ["integer", "number"]:  # the parser reads JSON too, of which the grammar enforces more
                return grammar.add_json_rule(node.standalone_schema)
        raise node.build_error("type", "requires a single type")


def build_gemma_family(name: str, opening: str, closing: str, quote: str, *, stop: str) -> ToolFamily:
    """Return a family with these markers. `stop` ends the turn before the model writes the tool's result itself."""

    def build_block(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        builder = GemmaRuleBuilder(grammar, quote)
        call = join_alternatives(
            f"{grammar.literal(f'call:{tool.name}')} {builder.build_object(create_root(tool, name))}" for tool in tools
        )
        return f"{call} {grammar.literal(closing)}"

    return ToolFamily(
        name=name,
        markers=(opening, closing, quote),
        stops=(stop,),
        triggers=(opening,),
        parser_factory=partial(GemmaToolParser, opening=opening, closing=closing, quote=quote),
        build_block_rule=build_block,
        block_separator="",
    )


GEMMA = build_gemma_family("gemma", "<|tool_call>", "<tool_call|>", '<|"|>', stop="<|tool_response>")
FUNCTION_GEMMA = build_gemma_family(
    "function-gemma", "<start_function_call>", "<end_function_call>", "<escape>", stop="<start_function_response>"
)
