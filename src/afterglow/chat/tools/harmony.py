"""Harmony, gpt-oss's format: messages on channels. Thoughts, words and calls all come through it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from afterglow.chat.tools.family import Family
from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.parser import Parser
from afterglow.chat.tools.scanner import Sink, Steps
from afterglow.chat.tools.tool import Tool

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START, CHANNEL)
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
ON_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class Harmony(Parser):
    """Reads messages: `analysis` is thought, a recipient makes a call, the rest is said.

    A prompt ends behind `<|start|>assistant`, or, where its template fills in more, inside a message.
    """

    def read(self) -> Steps[None]:
        said = thought = False
        header = yield from self._first_header()
        while header is not None:
            recipient, channel = RECIPIENT.search(header), ON_CHANNEL.search(header)
            if recipient:
                yield from self._call(recipient[1])
            elif channel and channel[1] == "analysis":
                yield from self._message(self.think, apart=thought)
                thought = True
            else:
                yield from self._message(self.say, apart=said)
                said = True
            header = yield from self._header()

    def _first_header(self) -> Steps[str | None]:
        """The header that the answer begins with; an empty one where the prompt wrote it."""
        space = yield from self.scanner.spaces()
        if (yield from self.scanner.comes(START, CHANNEL, MESSAGE, "to=", "assistant")):
            return (yield from self._header())
        self.say(space)
        return ""

    def _header(self) -> Steps[str | None]:
        pieces: list[str] = []
        found = yield from self.scanner.until(MESSAGE, sink=pieces.append)
        return None if found is None else "".join(pieces)

    def _message(self, sink: Sink, *, apart: bool) -> Steps[None]:
        """A message's text. Two of a kind are set apart, as two messages are."""
        if apart and (yield from self.scanner.peek()):
            sink("\n\n")
        yield from self._body(sink)

    def _call(self, name: str) -> Steps[None]:
        self.begin(name)
        yield from self.scanner.spaces()
        if (yield from self.scanner.comes(*ENDS)):
            self.argue("{}")
        yield from self._body(self.argue)

    def _body(self, sink: Sink) -> Steps[None]:
        ending = yield from self.scanner.until(*ENDS, sink=sink)
        if ending in (START, CHANNEL):
            self.scanner.unread(ending)


def _named(grammar: Grammar, tool: Tool) -> str:
    """From the tool's name to the end of the call, with the channel before or after the recipient."""
    channel = f"({grammar.text(CHANNEL)} {grammar.text('commentary')})?"
    kind = f"( SPACE? {grammar.text(CONSTRAIN)} SPACE? {grammar.text('json')} | {grammar.text(' json')} | SPACE )?"
    return (
        f"{grammar.text(tool.name)} {channel} {kind} {grammar.text(MESSAGE)} "
        f"{grammar.json(tool.parameters)} {grammar.text(CALL)}"
    )


def _write(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
    """One call, also where several are allowed: `<|call|>` ends the turn."""
    calls = one_of(_named(grammar, tool) for tool in tools)
    return f"({grammar.text(CHANNEL)} {grammar.text('commentary')})? {grammar.text(' to=functions.')} {calls}"


HARMONY = Family(
    name="harmony",
    markers=(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
    stops=(CALL,),
    triggers=("to=functions.",),
    parser=Harmony,
    write=_write,
    write_after=lambda grammar, tools, trigger: one_of(_named(grammar, tool) for tool in tools),
)
