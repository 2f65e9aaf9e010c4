"""Families that write calls as Python: an untagged list (Llama 3.2 and 4), a tagged list (LFM), Gemma's `tool_code`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.parser import FENCE, CallIdFactory, ToolParser
from afterglow.chat.tools.parsing.python_calls import PythonCallParser, build_python_call_rule
from afterglow.chat.tools.parsing.scanner import ParseSteps
from afterglow.chat.tools.tool import Tool


class PythonicToolParser(ToolParser):
    """Parses `[f(a=1), g()]` at the start of a line, fenced or not.

    Only known names are calls: answers contain brackets too.
    """

    def parse(self) -> ParseSteps[None]:
        while True:
            self.emit_text((yield from self.scanner.take_whitespace()))
            if (yield from self._parse_list()):
                continue
            ending = yield from self.scanner.stream_until("\n", sink=self.emit_text)
            if ending is None:
                return
            self.emit_text(ending)

    def _parse_list(self) -> ParseSteps[bool]:
        """Parse a list of calls; return whether it has one."""
        self.scanner.mark()
        fence = yield from self.skip_fence("python")
        if not (yield from self.scanner.skip_any("[")):
            self.reject_call(after_marker=False)
            return False
        has_call = yield from parse_calls(self, require_known_tool=True, after_marker=False)
        if has_call and fence:
            yield from self.scanner.skip_after_space(fence)
        return has_call


class TaggedPythonicToolParser(ToolParser):
    """Parses Python calls between an opening and a closing."""

    def __init__(self, tools: Sequence[Tool], new_id: CallIdFactory, *, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        super().__init__(tools, new_id)

    def parse(self) -> ParseSteps[None]:
        scanner = self.scanner
        while opening := (yield from scanner.stream_until(self._opening, sink=self.emit_text)):
            scanner.mark(len(opening))
            yield from scanner.skip_after_space("[", "print(")
            if (yield from parse_calls(self, require_known_tool=False, after_marker=True)):
                yield from scanner.take_while(lambda char: char in "])" or char.isspace())
                yield from scanner.skip_any(self._closing)


def parse_calls(parser: ToolParser, *, require_known_tool: bool, after_marker: bool) -> ParseSteps[bool]:
    """Parse calls separated by commas or newlines to the end of their list; return whether there is one."""
    scanner, has_call = parser.scanner, False
    while True:
        yield from scanner.take_whitespace()
        if has_call:
            if (yield from scanner.skip_any("]")) or not (yield from scanner.peek()).isalnum():
                return True
            scanner.mark()
        if not (yield from PythonCallParser(parser, require_known_tool=require_known_tool).parse()):
            parser.reject_call(after_marker=after_marker)
            return has_call
        has_call = True
        yield from scanner.skip_after_space(",")


def build_call_list_rule(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool, family: str) -> str:
    """Return an expression for a list of calls."""
    call = join_alternatives(build_python_call_rule(grammar, tool, family) for tool in tools)
    calls = grammar.add_calls_rule(call, parallel, grammar.literal(", "))
    return f"{grammar.literal('[')} {calls} {grammar.literal(']')}"


PYTHONIC = ToolFamily(
    name="pythonic",
    parser_factory=PythonicToolParser,
    stops=("<|eom_id|>",),
    build_block_rule=partial(build_call_list_rule, family="pythonic"),
)


def _build_tool_code_rule(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    call = join_alternatives(build_python_call_rule(grammar, tool, "tool-code") for tool in tools)
    newline = grammar.literal("\n")
    return f"{newline} {grammar.add_calls_rule(call, parallel, newline)} {newline} {grammar.literal(FENCE)}"


LFM_START, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
LFM = ToolFamily(
    name="lfm",
    markers=(LFM_START, LFM_END),
    triggers=(LFM_START,),
    parser_factory=partial(TaggedPythonicToolParser, opening=LFM_START, closing=LFM_END),
    build_block_rule=lambda grammar, tools, parallel: (
        f"{build_call_list_rule(grammar, tools, parallel, 'lfm')} {grammar.literal(LFM_END)}"
    ),
)
TOOL_CODE = ToolFamily(
    name="tool-code",
    triggers=("```tool_code",),
    parser_factory=partial(TaggedPythonicToolParser, opening="```tool_code", closing=FENCE),
    build_block_rule=_build_tool_code_rule,
)
