"""Harmony, gpt-oss's format: messages on channels. Thoughts, words and calls all come through it."""

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
RECIPIENT_PATTERN = re.compile(r"to=(?:functions\.)?([^\s<]+)")
CHANNEL_PATTERN = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyParser(ToolParser):
    """Reads messages: `analysis` is thought, a recipient makes a call, the rest is said.

    A prompt ends behind `<|start|>assistant`, or, where its template fills in more, inside a message.
    """

    def parse(self) -> ParseSteps[None]:
        said = thought = False
        header = yield from self._parse_first_header()
        while header is not None:
            recipient, channel = RECIPIENT_PATTERN.search(header), CHANNEL_PATTERN.search(header)
            if recipient:
                yield from self._parse_call(recipient[1])
            elif channel and channel[1] == "analysis":
                yield from self._parse_message(self.emit_reasoning, needs_separator=thought)
                thought = True
            else:
                yield from self._parse_message(self.emit_text, needs_separator=said)
                said = True
            header = yield from self._parse_header()

    def _parse_first_header(self) -> ParseSteps[str | None]:
        """The header that the answer begins with; an empty one where the prompt wrote it."""
        space = yield from self.scanner.take_whitespace()
        if (yield from self.scanner.peek_any(START, CHANNEL, MESSAGE, "to=", "assistant")):
            return (yield from self._parse_header())
        self.emit_text(space)
        return ""

    def _parse_header(self) -> ParseSteps[str | None]:
        pieces: list[str] = []
        found = yield from self.scanner.stream_until(MESSAGE, sink=pieces.append)
        return None if found is None else "".join(pieces)

    def _parse_message(self, sink: TextSink, *, needs_separator: bool) -> ParseSteps[None]:
        """A message's text. Two of a kind are set apart, as two messages are."""
        if needs_separator and (yield from self.scanner.peek()):
            sink("\n\n")
        yield from self._parse_body(sink)

    def _parse_call(self, name: str) -> ParseSteps[None]:
        self.begin_call(name)
        yield from self.scanner.take_whitespace()
        if (yield from self.scanner.peek_any(*MESSAGE_ENDS)):
            self.emit_arguments("{}")
        yield from self._parse_body(self.emit_arguments)

    def _parse_body(self, sink: TextSink) -> ParseSteps[None]:
        ending = yield from self.scanner.stream_until(*MESSAGE_ENDS, sink=sink)
        if ending in (START, CHANNEL):
            self.scanner.unread(ending)


def _build_named_call_rule(grammar: LarkGrammar, tool: Tool) -> str:
    """From the tool's name to the end of the call, with the channel before or after the recipient."""
    channel = f"({grammar.literal(CHANNEL)} {grammar.literal('commentary')})?"
    kind = f"( SPACE? {grammar.literal(CONSTRAIN)} SPACE? {grammar.literal('json')} | {grammar.literal(' json')} | SPACE )?"
    return (
        f"{grammar.literal(tool.name)} {channel} {kind} {grammar.literal(MESSAGE)} "
        f"{grammar.add_json_rule(tool.parameters)} {grammar.literal(CALL)}"
    )


def _build_calls_rule(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
    """One call, also where several are allowed: `<|call|>` ends the turn."""
    calls = join_alternatives(_build_named_call_rule(grammar, tool) for tool in tools)
    return f"({grammar.literal(CHANNEL)} {grammar.literal('commentary')})? {grammar.literal(' to=functions.')} {calls}"


HARMONY = ToolFamily(
    name="harmony",
    markers=(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
    stops=(CALL,),
    triggers=("to=functions.",),
    parser_factory=HarmonyParser,
    build_calls_rule=_build_calls_rule,
    build_after_trigger_rule=lambda grammar, tools, trigger: join_alternatives(
        _build_named_call_rule(grammar, tool) for tool in tools
    ),
)
