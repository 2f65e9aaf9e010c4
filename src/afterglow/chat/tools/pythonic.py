"""Families that write calls as Python: a bare list (Llama 3.2 and 4), a list between markers, Gemma's `tool_code`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from afterglow.chat.tools.family import Family
from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.parser import FENCE, NewId, Parser
from afterglow.chat.tools.python_calls import PythonCall, python_call
from afterglow.chat.tools.scanner import Steps
from afterglow.chat.tools.tool import Tool


class PythonList(Parser):
    """Reads `[f(a=1), g()]` where a line begins, fenced or not. Only known names are calls: prose has brackets too."""

    def read(self) -> Steps[None]:
        while True:
            self.say((yield from self.scanner.spaces()))
            if (yield from self._list()):
                continue
            ending = yield from self.scanner.until("\n", sink=self.say)
            if ending is None:
                return
            self.say(ending)

    def _list(self) -> Steps[bool]:
        """Whether a list of calls was read."""
        self.scanner.mark()
        fence = yield from self.fence("python")
        if not (yield from self.scanner.skip("[")):
            self.give_back(marked=False)
            return False
        made = yield from calls(self, known=True, marked=False)
        if made and fence:
            yield from self.scanner.spaces()
            yield from self.scanner.skip(fence)
        return made


class TaggedPython(Parser):
    """Reads Python calls between an opening and a closing."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId, *, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        super().__init__(tools, new_id)

    def read(self) -> Steps[None]:
        scanner = self.scanner
        while opening := (yield from scanner.until(self._opening, sink=self.say)):
            scanner.mark(len(opening))
            yield from scanner.spaces()
            yield from scanner.skip("[", "print(")
            if (yield from calls(self, known=False, marked=True)):
                yield from scanner.run(lambda char: char in "])" or char.isspace())
                yield from scanner.skip(self._closing)


def calls(parser: Parser, *, known: bool, marked: bool) -> Steps[bool]:
    """Calls with commas or line ends between them, to the end of their list; whether there was one."""
    scanner, made = parser.scanner, False
    while True:
        yield from scanner.spaces()
        if made:
            if (yield from scanner.skip("]")) or not (yield from scanner.peek()).isalnum():
                return True
            scanner.mark()
        if not (yield from PythonCall(parser, known=known).read()):
            parser.give_back(marked=marked)
            return made
        made = True
        yield from scanner.spaces()
        yield from scanner.skip(",")


def listed(grammar: Grammar, tools: Sequence[Tool], parallel: bool, family: str) -> str:
    """A list of calls."""
    call = grammar.rule(one_of(python_call(grammar, tool, family) for tool in tools))
    more = f"({grammar.text(', ')} {call})*" if parallel else ""
    return f"{grammar.text('[')} {call} {more} {grammar.text(']')}"


PYTHONIC = Family(
    name="pythonic",
    parser=PythonList,
    stops=("<|eom_id|>",),
    write=partial(listed, family="pythonic"),
    write_after=lambda grammar, tools, trigger: listed(grammar, tools, True, "pythonic"),
)


def tagged_family(name: str, opening: str, closing: str) -> Family:
    """A family that writes a list between two markers."""

    def body(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return f"{listed(grammar, tools, parallel, name)} {grammar.text(closing)}"

    return Family(
        name=name,
        markers=(opening, closing),
        triggers=(opening,),
        parser=partial(TaggedPython, opening=opening, closing=closing),
        write=lambda grammar, tools, parallel: f"{grammar.text(opening)} {body(grammar, tools, parallel)}",
        write_after=lambda grammar, tools, trigger: body(grammar, tools, True),
    )


def _code(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
    call = grammar.rule(one_of(python_call(grammar, tool, "tool-code") for tool in tools))
    newline = grammar.text("\n")
    more = f"({newline} {call})*" if parallel else ""
    return f"{newline} {call} {more} {newline} {grammar.text(FENCE)}"


LFM = tagged_family("lfm", "<|tool_call_start|>", "<|tool_call_end|>")
TOOL_CODE = Family(
    name="tool-code",
    triggers=("```tool_code",),
    parser=partial(TaggedPython, opening="```tool_code", closing=FENCE),
    write=lambda grammar, tools, parallel: f"{grammar.text('```tool_code')} {_code(grammar, tools, parallel)}",
    write_after=lambda grammar, tools, trigger: _code(grammar, tools, True),
)
