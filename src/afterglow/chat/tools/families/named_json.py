"""Families that write the name of the tool before JSON arguments: functionary 3.1 and 3.2, Apertus."""

from __future__ import annotations

from collections.abc import Sequence

from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.json_calls import load_json, read_json_value, stream_json_value
from afterglow.chat.tools.parsing.json_values import to_json_string
from afterglow.chat.tools.parsing.parser import ToolParser
from afterglow.chat.tools.parsing.scanner import ParseSteps, is_name_char
from afterglow.chat.tools.tool import Tool

FUNCTION_START, FUNCTION_END = "<function=", "</function>"
RECIPIENT, TEXT_RECIPIENT = ">>>", "all"
TOOLS_PREFIX, TOOLS_SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


class FunctionTagParser(ToolParser):
    """Parses `<function=name>{…}</function>` (functionary 3.1)."""

    def parse(self) -> ParseSteps[None]:
        scanner = self.scanner
        while opening := (yield from scanner.stream_until(FUNCTION_START, sink=self.emit_text)):
            scanner.mark(len(opening))
            name = yield from scanner.take_while(is_name_char)
            if not name or not (yield from scanner.skip_any(">")) or scanner.is_exhausted:
                self.reject_call(after_marker=True)
                continue
            self.begin_call(name)
            if (yield from scanner.skip_after_space(FUNCTION_END)):
                self.emit_arguments("{}")
            elif (yield from stream_json_value(scanner, self.emit_arguments)):
                yield from scanner.skip_after_space(FUNCTION_END)
            else:
                yield from scanner.stream_until(FUNCTION_END, sink=self.emit_arguments)


class RecipientParser(ToolParser):
    """Parses sections with a recipient: `>>>all`, then text; `>>>name`, then JSON (functionary 3.2).

    The prompt ends with `>>>`, so that the output begins with the first recipient. Text without one is an answer that
    continues the prompt.
    """

    def parse(self) -> ParseSteps[None]:
        scanner = self.scanner
        scanner.mark()
        while True:
            recipient = yield from scanner.take_while(is_name_char)
            is_header = yield from scanner.skip_any("\n")
            if is_header and recipient in self.tools:
                self.begin_call(recipient)
                yield from scanner.take_whitespace()
                if not (yield from stream_json_value(scanner, self.emit_arguments)):
                    if not (yield from self._stream_section(is_call=True)):
                        return
                    continue
                yield from scanner.take_whitespace()
            elif is_header and recipient == TEXT_RECIPIENT:
                scanner.clear_mark()
            else:
                self.reject_call(after_marker=False)
            if not (yield from self._stream_section(is_call=False)):
                return

    def _stream_section(self, *, is_call: bool) -> ParseSteps[bool]:
        """Stream the rest of a section; return whether another one follows."""
        sink = self.emit_arguments if is_call else self.emit_text
        ending = yield from self.scanner.stream_until(RECIPIENT, sink=sink)
        if ending:
            self.scanner.mark(len(ending))
        return bool(ending)


class NameAsKeyParser(ToolParser):
    """Parses `<|tools_prefix|>[{"name": {…}}]<|tools_suffix|>` (Apertus)."""

    def parse(self) -> ParseSteps[None]:
        scanner = self.scanner
        while opening := (yield from scanner.stream_until(TOOLS_PREFIX, sink=self.emit_text)):
            scanner.mark(len(opening))
            yield from scanner.skip_after_space("[")
            has_call = False
            while (yield from self._parse_call()):
                has_call = True
                yield from scanner.take_while(lambda char: char in "}," or char.isspace())
            if has_call:
                yield from scanner.take_while(lambda char: char == "]" or char.isspace())
                yield from scanner.skip_any(TOOLS_SUFFIX)
            else:
                self.reject_call(after_marker=True)

    def _parse_call(self) -> ParseSteps[bool]:
        """Parse one object; return whether it is a call."""
        scanner = self.scanner
        if not (yield from scanner.skip_after_space("{")):
            return False
        yield from scanner.take_whitespace()
        name = load_json((yield from read_json_value(scanner))[0])
        yield from scanner.take_whitespace()
        if not isinstance(name, str) or not name or not (yield from scanner.skip_any(":")):
            return False
        yield from scanner.take_whitespace()
        if scanner.is_exhausted:
            return False
        self.begin_call(name)
        if not (yield from stream_json_value(scanner, self.emit_arguments)):
            yield from scanner.stream_until(TOOLS_SUFFIX, sink=self.emit_arguments)
        return True


def _build_function_tag_call(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    """Return an expression for the text after `<function=`."""
    return join_alternatives(
        f"{grammar.literal(tool.name + '>')} {grammar.add_json_rule(tool.parameters)} {grammar.literal(FUNCTION_END)}"
        for tool in tools
    )


def _build_recipient_calls(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    """Return an expression for the text after `>>>`."""
    call = join_alternatives(
        f"{grammar.literal(tool.name + chr(10))} {grammar.add_json_rule(tool.parameters)}" for tool in tools
    )
    return grammar.add_calls_rule(call, parallel, grammar.literal(RECIPIENT))


def _build_name_as_key_calls(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    """Return an expression for the text after `<|tools_prefix|>`."""
    call = join_alternatives(
        f"{grammar.literal('{' + to_json_string(tool.name) + ': ')} {grammar.add_json_rule(tool.parameters)} "
        f"{grammar.literal('}')}"
        for tool in tools
    )
    calls = grammar.add_calls_rule(call, parallel, grammar.literal(", "))
    return f"{grammar.literal('[')} {calls} {grammar.literals(']', TOOLS_SUFFIX)}"


FUNCTIONARY_TAGS = ToolFamily(
    name="functionary-tags",
    stops=("<|eom_id|>",),
    triggers=(FUNCTION_START,),
    parser_factory=FunctionTagParser,
    build_block_rule=_build_function_tag_call,
    block_separator="SPACE?",
)
FUNCTIONARY = ToolFamily(
    name="functionary",
    tool_trigger=f"{RECIPIENT}{{}}\n",
    text_start=f"{TEXT_RECIPIENT}\n",
    parser_factory=RecipientParser,
    build_block_rule=_build_recipient_calls,
)
APERTUS = ToolFamily(
    name="apertus",
    markers=(TOOLS_PREFIX, TOOLS_SUFFIX),
    triggers=(TOOLS_PREFIX,),
    parser_factory=NameAsKeyParser,
    build_block_rule=_build_name_as_key_calls,
)
