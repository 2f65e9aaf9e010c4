"""MiniMax-M3: arguments as nested elements, each tag after a namespace token. The name of an element is its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from afterglow.chat.constraints.schema_analysis import build_resolver, get_types, iter_in_place
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.grammar.schema import (
    ARRAY_KEYWORDS,
    OBJECT_KEYWORDS,
    SchemaNode,
    build_items_rule,
    build_text_until_rule,
    create_root,
    has_named_properties,
    list_properties,
)
from afterglow.chat.tools.parsing.json_values import MAX_NESTED_SCHEMAS, text_to_json, to_json_string
from afterglow.chat.tools.parsing.parser import ToolParser
from afterglow.chat.tools.parsing.scanner import ParseSteps, is_name_char
from afterglow.chat.tools.tool import Tool

NAMESPACE = "]<]minimax[>["
BLOCK_START, BLOCK_END = f"{NAMESPACE}<tool_call>", f"{NAMESPACE}</tool_call>"
CALL_START, CALL_END = f'{NAMESPACE}<invoke name="', f"{NAMESPACE}</invoke>"
ELEMENT_START, ELEMENT_END = f"{NAMESPACE}<", f"{NAMESPACE}</"
ITEM = "item"  # element of a list
EMPTY_VALUES = (("array", "[]"), ("object", "{}"), ("null", "null"))  # which the template writes without text
ITEM_START = f"{ELEMENT_START}{ITEM}>"


class MinimaxM3ToolParser(ToolParser):
    """Parses nested elements and streams JSON. The schema decides which values are strings."""

    def parse(self) -> ParseSteps[None]:
        scanner = self.scanner
        while opening := (yield from scanner.stream_until(BLOCK_START, sink=self.emit_text)):
            scanner.mark(len(opening))
            has_call = False
            while (yield from self._parse_call()):
                has_call = True
            if has_call:
                yield from scanner.skip_any(BLOCK_END)
            else:
                self.reject_call(after_marker=True)

    def _parse_call(self) -> ParseSteps[bool]:
        scanner = self.scanner
        if not (yield from scanner.skip_after_space(CALL_START)):
            return False
        name = yield from scanner.take_while(is_name_char)
        if not name or not (yield from scanner.skip_any('">')):
            return False
        self.begin_call(name)
        tool = self.tools.get(name)
        schema, root = (True, {}) if tool is None else (tool.parameters, tool.parameters)
        if (yield from self._parse_elements(schema, root, CALL_END, is_list=False)):
            yield from scanner.take_whitespace()
            return True
        yield from scanner.stream_until(CALL_END, sink=self.emit_arguments)
        return not scanner.is_exhausted

    def _parse_elements(self, schema: Any, root: Mapping[str, Any], end: str, *, is_list: bool) -> ParseSteps[bool]:
        """Parse elements up to `end` as an object or a list; return False if it is truncated."""
        self.emit_arguments("[" if is_list else "{")
        separator, count = "", 0
        while True:
            if (yield from self.scanner.skip_after_space(end)):
                self.emit_arguments("]" if is_list else "}")
                return True
            key = yield from self._parse_element_name()
            if not key:
                return False
            self.emit_arguments(separator if is_list else f"{separator}{to_json_string(key)}: ")
            separator = ", "
            member = get_item_schema(schema, root, count) if is_list else get_member_schema(schema, root, key)
            count += 1
            if not (yield from self._parse_value(member, root, key)):
                return False

    def _parse_element_name(self) -> ParseSteps[str]:
        """Return the name in an opening tag; empty if there is none."""
        name: list[str] = []
        if not (yield from self.scanner.skip_any(ELEMENT_START)):
            return ""
        return "".join(name) if (yield from self.scanner.stream_until(">", sink=name.append)) else ""

    def _parse_value(self, schema: Any, root: Mapping[str, Any], key: str) -> ParseSteps[bool]:
        """Parse the content and the closing tag of an element; return False if it is truncated."""
        types, end = get_types(schema, build_resolver(root), MAX_NESTED_SCHEMAS), f"{ELEMENT_END}{key}>"
        if types == {"string"}:
            return (yield from self.stream_string(end))
        space = yield from self.scanner.take_whitespace()
        ahead = yield from self.scanner.peek(len(ITEM_START))
        is_element = ahead.startswith(ELEMENT_START) and not ahead.startswith(ELEMENT_END)
        if is_element and types & {"array", "object"}:
            is_list = "array" in types and (ahead == ITEM_START or "object" not in types)
            return (yield from self._parse_elements(schema, root, end, is_list=is_list))
        pieces = [space]
        if not (yield from self.scanner.stream_until(end, sink=pieces.append)):
            self.emit_arguments("".join(pieces))
            return False
        text = "".join(pieces)
        is_empty = not text.strip() and "string" not in types
        empty = next((empty for json_type, empty in EMPTY_VALUES if is_empty and json_type in types), None)
        self.emit_arguments(text_to_json(text, types) if empty is None else empty)
        return True


def get_member_schema(schema: Any, root: Mapping[str, Any], key: str) -> Any:
    """Return the schema of a property; True (any value) if there is none."""
    alternatives = list(iter_in_place(schema, build_resolver(root)))
    for alternative in alternatives:
        if key in alternative.get("properties", {}):
            return alternative["properties"][key]
    others = (alternative.get("additionalProperties") for alternative in alternatives)
    return next(filter(None, others), True)


def get_item_schema(schema: Any, root: Mapping[str, Any], index: int) -> Any:
    """Return the schema of an item of a list; True (any value) if there is none."""
    for found in iter_in_place(schema, build_resolver(root)):
        items = found.get("items", True)
        first = items if isinstance(items, list) else found.get("prefixItems", [])  # a list in older drafts
        if index < len(first):
            return first[index]
        if "items" in found:
            return found.get("additionalItems", True) if isinstance(items, list) else items
    return True


def _build_members(grammar: LarkGrammar, node: SchemaNode) -> str:
    """Return an expression for the elements of an object in schema order."""
    if not has_named_properties(node):
        raise node.build_error("properties", "requires named properties")
    members = []
    for member in list_properties(node):
        element = grammar.add_rule(_build_element(grammar, member.name, member.node))
        members.append(element if member.required else f"{element}?")
    return " ".join(members)


def _build_element(grammar: LarkGrammar, name: str, node: SchemaNode) -> str:
    values = [_build_value(grammar, choice, f"{ELEMENT_END}{name}>") for choice in node.expand_choices()]
    return f"{grammar.literal(f'{ELEMENT_START}{name}>')} {join_alternatives(values)}"


def _build_value(grammar: LarkGrammar, node: SchemaNode, end: str) -> str:
    """Return an expression for a value and its closing tag."""
    match sorted(node.allowed_types):
        case ["string"]:
            return build_text_until_rule(grammar, node, ending=end)
        case ["array"] if node.has_only(ARRAY_KEYWORDS) and {"items", "prefixItems"} & set(node.schema):
            value = build_items_rule(grammar, node, partial(_build_element, grammar, ITEM))
        case ["object"] if node.has_only(OBJECT_KEYWORDS) and has_named_properties(node):
            value = _build_members(grammar, node)
        case [_] | ["integer", "number"]:  # also what elements cannot enforce: a grammar cannot repeat a free name
            value = grammar.add_json_rule(node.standalone_schema)
        case _:
            raise node.build_error("type", "requires a single type")
    return f"{value} {grammar.literal(end)}"


def _build_block(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    """Return an expression for the text after the start of a block."""
    calls = []
    for tool in tools:
        start = grammar.literal(f'{CALL_START}{tool.name}">')
        members = _build_members(grammar, create_root(tool, "minimax-m3"))
        calls.append(f"{start} {members} {grammar.literal(CALL_END)}")
    block = grammar.add_calls_rule(f"{join_alternatives(calls)} SPACE?", parallel, separator="")
    return f"SPACE? {block} {grammar.literal(BLOCK_END)}"


MINIMAX_M3 = ToolFamily(
    name="minimax-m3",
    markers=(NAMESPACE, "<tool_call>", "</tool_call>"),
    triggers=(BLOCK_START,),
    parser_factory=MinimaxM3ToolParser,
    build_block_rule=_build_block,
)
