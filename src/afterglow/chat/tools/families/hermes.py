"""Families that write calls as JSON after a marker: one object, several objects, or a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.json_calls import JsonCallParser
from afterglow.chat.tools.parsing.parser import CallIdFactory, ToolParser, generate_call_id
from afterglow.chat.tools.parsing.scanner import ParseSteps
from afterglow.chat.tools.tool import Tool


class TaggedJsonToolParser(ToolParser):
    """Parses JSON calls between an opening and a closing. Models sometimes omit the closing."""

    def __init__(
        self, tools: Sequence[Tool], new_id: CallIdFactory, *, openings: tuple[str, ...], closings: tuple[str, ...] = ()
    ) -> None:
        self._openings, self._closings = openings, closings
        super().__init__(tools, new_id)

    def parse(self) -> ParseSteps[None]:
        while opening := (yield from self.scanner.stream_until(*self._openings, sink=self.emit_text)):
            self.scanner.mark(len(opening))
            yield from self.parse_block()

    def parse_block(self) -> ParseSteps[None]:
        """Parse the calls after the opening. The scanner's mark is before the opening."""
        scanner = self.scanner
        is_list = yield from scanner.skip_after_space("[")
        call_count = 0
        while True:
            yield from scanner.take_whitespace()
            if (yield from scanner.peek()) != "{":
                break
            if call_count:
                scanner.mark()
            if not (yield from self._parse_call()):
                return
            call_count += 1
            yield from scanner.take_while(lambda char: char in ",;}" or char.isspace())
        if not call_count and not (is_list and (yield from scanner.peek_any("]"))):
            self.reject_call(after_marker=True)
            return
        scanner.clear_mark()
        if not self._closings:
            yield from scanner.skip_any("]")
            return
        yield from scanner.take_while(lambda char: char in "]}" or char.isspace())  # surplus brackets
        yield from scanner.skip_any(*self._closings)

    def _parse_call(self) -> ParseSteps[bool]:
        """Parse one call; return whether it is one and more may follow in this block."""
        call = JsonCallParser(self, require_known_tool=False)
        if not (yield from call.parse()):
            self.reject_call(after_marker=True)
            return False
        if call.has_invalid_arguments:
            yield from self.scanner.stream_until(*self._closings or self._openings, sink=self.emit_arguments)
        return not call.has_invalid_arguments


def build_json_call_rule(
    grammar: LarkGrammar,
    tools: Sequence[Tool],
    *,
    name_key: str = "name",
    arguments_key: str = "arguments",
    properties_before: Mapping[str, Any] | None = None,
    optional_properties: Mapping[str, Any] | None = None,
) -> str:
    """Return an expression for a call of one of these tools as a JSON object."""
    return join_alternatives(
        grammar.add_json_call_rule(
            tool,
            name_key=name_key,
            arguments_key=arguments_key,
            properties_before=properties_before,
            optional_properties=optional_properties,
        )
        for tool in tools
    )


def build_json_object_family(name: str, opening: str, closing: str = "") -> ToolFamily:
    """Return a family that writes each call as an object between two tags, or ends its turn with one call after a
    marker if there is no closing."""

    def build_block(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        end = f"SPACE? {grammar.literal(closing)}" if closing else ""
        return f"SPACE? {build_json_call_rule(grammar, tools)} {end}"

    closings = (closing,) if closing else ()
    return ToolFamily(
        name=name,
        markers=(opening, *closings),
        triggers=(opening,),
        parser_factory=partial(TaggedJsonToolParser, openings=(opening,), closings=closings),
        build_block_rule=build_block,
        block_separator="SPACE?" if closing else None,
    )


def build_json_list_family(
    name: str,
    opening: str,
    closing: str = "",
    *,
    alternative_openings: tuple[str, ...] = (),
    new_id: CallIdFactory = generate_call_id,
    optional_properties: Mapping[str, Any] | None = None,
) -> ToolFamily:
    """Return a family that writes all calls as one list after a marker.

    `alternative_openings` are other openings that its models write by mistake.
    """

    def build_block(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = build_json_call_rule(grammar, tools, optional_properties=optional_properties)
        calls = grammar.add_calls_rule(call, parallel, f"SPACE? {grammar.literal(',')} SPACE?")
        end = f"SPACE? {grammar.literal(closing)}" if closing else ""
        return f"SPACE? {grammar.literal('[')} {calls} {grammar.literal(']')} {end}"

    closings = (closing,) if closing else ("</tool_call>",) if alternative_openings else ()
    return ToolFamily(
        name=name,
        markers=(opening, closing) if closing else (opening, *alternative_openings),
        triggers=(opening,),
        parser_factory=partial(TaggedJsonToolParser, openings=(opening, *alternative_openings), closings=closings),
        build_block_rule=build_block,
        new_id=new_id,
    )


def _build_cohere_calls(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    """Return an expression for the list of calls after `<|START_ACTION|>`."""
    id = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"}}
    call = build_json_call_rule(grammar, tools, name_key="tool_name", arguments_key="parameters", properties_before=id)
    space = "/[ \\n]{1,8}/?"
    calls = grammar.add_calls_rule(call, parallel, f"SPACE? {grammar.literal(',')} {space}")
    return f"SPACE? {grammar.literal('[')} {space} {calls} SPACE? {grammar.literals(']', '<|END_ACTION|>')}"


def _build_functools_calls(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    separator = f"SPACE? {grammar.literal(',')} SPACE?"
    calls = grammar.add_calls_rule(build_json_call_rule(grammar, tools), parallel, separator)
    return f"SPACE? {calls} SPACE? {grammar.literal(']')}"


HERMES = build_json_object_family("hermes", "<tool_call>", "</tool_call>")
GENERIC = build_json_object_family("generic", "<tool_call>", "</tool_call>")
GRANITE = build_json_list_family("granite", "<|tool_call|>", alternative_openings=("<tool_call>",))
NEMOTRON = build_json_list_family("nemotron", "<TOOLCALL>", "</TOOLCALL>")
APRIEL = build_json_list_family(
    "apriel", "<tool_calls>", "</tool_calls>", optional_properties={"id": {"type": "string", "maxLength": 64}}
)
COHERE = ToolFamily(
    name="cohere",
    markers=("<|START_ACTION|>", "<|END_ACTION|>"),
    triggers=("<|START_ACTION|>",),
    parser_factory=partial(TaggedJsonToolParser, openings=("<|START_ACTION|>",), closings=("<|END_ACTION|>",)),
    build_block_rule=_build_cohere_calls,
)
GIGACHAT = build_json_object_family("gigachat", "<|function_call|>")
GIGACHAT_ROLE = build_json_object_family("gigachat-role", "<|message_sep|>\n\nfunction call<|role_sep|>\n")
FIREFUNCTION = ToolFamily(
    name="firefunction",
    triggers=("functools[",),  # with the bracket: answers mention Python's functools
    parser_factory=partial(TaggedJsonToolParser, openings=("functools",)),
    build_block_rule=_build_functools_calls,
    optional_lead=" ",
)
