"""Llama 3: untagged JSON objects, optionally after `<|python_tag|>`, separated by `;`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from afterglow.chat.tools.families.hermes import build_json_call_rule
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.json_calls import JsonCallParser
from afterglow.chat.tools.parsing.parser import ToolParser
from afterglow.chat.tools.parsing.python_calls import PythonCallParser
from afterglow.chat.tools.parsing.scanner import ParseSteps
from afterglow.chat.tools.tool import Tool

PYTHON_TAG = "<|python_tag|>"
CALL_OBJECT_PREFIX = '{"name": "'
PARAMETERS_KEY = '"parameters":'


class Llama3JsonToolParser(ToolParser):
    """Parses objects at the start of a line, fenced or not.

    Only an object with a known tool's name and parameters is a call: answers contain JSON too.
    """

    def parse(self) -> ParseSteps[None]:
        while True:
            self.emit_text((yield from self.scanner.take_whitespace()))
            tagged = yield from self.scanner.skip_any(PYTHON_TAG)
            if (yield from self._parse_call(bool(tagged))):
                continue
            ending = yield from self.scanner.stream_until("\n", PYTHON_TAG, sink=self.emit_text)
            if ending is None:
                return
            if ending == PYTHON_TAG:
                self.scanner.unread(PYTHON_TAG)
            else:
                self.emit_text(ending)

    def _parse_call(self, after_tag: bool) -> ParseSteps[bool]:
        """Parse a call; return whether it is one. After the tag, Llama may call a built-in tool in Python notation."""
        scanner = self.scanner
        if after_tag:
            yield from scanner.take_whitespace()
        scanner.mark()
        fence = yield from self.skip_fence("json")
        if (yield from scanner.peek()) == "{":
            call = JsonCallParser(self, require_known_tool=True)
            is_call = yield from call.parse()
            if call.has_invalid_arguments:
                yield from scanner.stream_until(PYTHON_TAG, sink=self.emit_arguments)
        else:
            is_call = after_tag and not fence and (yield from PythonCallParser(self, require_known_tool=True).parse())
        if not is_call:
            self.reject_call(after_marker=False)
            return False
        yield from scanner.take_while(lambda char: char in ",;}" or char.isspace())
        if fence:
            yield from scanner.skip_any(fence)
        return True


def _build_calls_rule(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    call = build_json_call_rule(grammar, tools, arguments_key="parameters")
    return grammar.add_calls_rule(call, parallel, f"SPACE? {grammar.literal(';')} SPACE?")


def _build_trigger_rule(grammar: LarkGrammar, tools: Sequence[Tool], trigger: str) -> str:
    if trigger == PYTHON_TAG:
        return _build_calls_rule(grammar, tools, True)
    calls = []
    for tool in tools:
        name, arguments = grammar.literal(f'{json.dumps(tool.name)[1:-1]}"'), grammar.add_json_rule(tool.parameters)
        key, end = grammar.literal(PARAMETERS_KEY), grammar.literal("}")
        calls.append(f'{name} SPACE? "," SPACE? {key} SPACE? {arguments} SPACE? {end}')
    return join_alternatives(calls)


LLAMA = ToolFamily(
    name="llama",
    markers=(PYTHON_TAG,),
    stops=("<|eom_id|>",),
    triggers=(PYTHON_TAG, CALL_OBJECT_PREFIX),
    parser_factory=Llama3JsonToolParser,
    build_block_rule=_build_calls_rule,
    build_calls_rule=_build_calls_rule,
    build_trigger_rule=_build_trigger_rule,
)
