"""Harmony, the format of gpt-oss: reasoning, answers and calls are messages on channels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.parser import ToolParser
from afterglow.chat.tools.parsing.scanner import ParseSteps, TextSink
from afterglow.chat.tools.tool import Tool

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MESSAGE_ENDS = (END, CALL, RETURN, START, CHANNEL)
RECIPIENT_PATTERN = re.compile(r"to=(functions\.)?([^\s<]+)")
CHANNEL_PATTERN = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyParser(ToolParser):
    """Parses messages: one to an offered function is a call, one on the `analysis` channel is reasoning, others are
    text. Without tools, there are no calls: the model may address its built-in tools, which nobody offered.

    A prompt ends after `<|start|>assistant`, or inside a message if its template writes more.
    """

    def parse(self) -> ParseSteps[None]:
        has_text = has_reasoning = False
        header: str | None = ""  # if the prompt contains the first header
        space = yield from self.scanner.take_whitespace()
        if (yield from self.scanner.peek_any(START, CHANNEL, MESSAGE, "to=", "assistant")):
            header = yield from self._parse_header()
        else:
            self.emit_text(space)
        while header is not None:
            tool_name, channels = self._find_tool_name(header), CHANNEL_PATTERN.findall(header)
            if f"{CHANNEL} " in header:
                yield from self.scanner.skip_any(" ")  # models with a SentencePiece vocabulary write one after a marker
            if tool_name is not None:
                self.begin_call(tool_name)
                yield from self.scanner.take_whitespace()
                if (yield from self.scanner.peek_any(*MESSAGE_ENDS)):
                    self.emit_arguments("{}")
                yield from self._parse_body(self.emit_arguments)
            elif channels[-1:] == ["analysis"]:  # the last one if the model wrote several
                yield from self._parse_message(self.emit_reasoning, needs_separator=has_reasoning)
                has_reasoning = True
            else:
                yield from self._parse_message(self.emit_text, needs_separator=has_text)
                has_text = True
            header = yield from self._parse_header()

    def _find_tool_name(self, header: str) -> str | None:
        """Return the function that a message is addressed to; None if its recipient is none of the functions."""
        for is_function, name in RECIPIENT_PATTERN.findall(header) if self.tools else ():
            if is_function or name in self.tools:
                return str(name)
        return None

    def _parse_header(self) -> ParseSteps[str | None]:
        pieces: list[str] = []
        ending = yield from self.scanner.stream_until(MESSAGE, sink=pieces.append)
        return None if ending is None else "".join(pieces)

    def _parse_message(self, sink: TextSink, *, needs_separator: bool) -> ParseSteps[None]:
        """Stream the text of a message, after a blank line if a message of the same kind precedes it."""
        if needs_separator and (yield from self.scanner.peek()):
            sink("\n\n")
        yield from self._parse_body(sink)

    def _parse_body(self, sink: TextSink) -> ParseSteps[None]:
        ending = yield from self.scanner.stream_until(*MESSAGE_ENDS, sink=sink)
        if ending in (START, CHANNEL):
            self.scanner.unread(ending)


def _build_block_rule(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    """Return an expression from a tool's name to the end of the call; the channel may follow the recipient."""
    channel = f"({grammar.literals(CHANNEL, 'commentary')})?"
    constrain = f"SPACE? {grammar.literal(CONSTRAIN)} SPACE? {grammar.literal('json')}"
    content_type = f"( {constrain} | {grammar.literal(' json')} | SPACE )?"
    header = f"{channel} {content_type} {grammar.literal(MESSAGE)}"
    return join_alternatives(
        f"{grammar.literal(tool.name)} {header} {grammar.add_json_rule(tool.parameters)} {grammar.literal(CALL)}"
        for tool in tools
    )


def _build_calls_rule(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    """Return an expression for one call, even if several are allowed: `<|call|>` ends the turn."""
    calls = _build_block_rule(grammar, tools, parallel)
    return f"({grammar.literals(CHANNEL, 'commentary')})? {grammar.literal(' to=functions.')} {calls}"


HARMONY = ToolFamily(
    name="harmony",
    markers=(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
    stops=(CALL,),
    triggers=("to=functions.",),
    parser_factory=HarmonyParser,
    build_block_rule=_build_block_rule,
    build_calls_rule=_build_calls_rule,
)
