"""Families that write calls as JSON behind a marker: one object, several, or a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from afterglow.chat.tools.family import Family
from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.json_calls import JsonCall
from afterglow.chat.tools.parser import NewId, Parser, new_id
from afterglow.chat.tools.scanner import Steps
from afterglow.chat.tools.tool import Tool


class TaggedJson(Parser):
    """Reads JSON calls between an opening and a closing, which models now and then forget."""

    def __init__(
        self, tools: Sequence[Tool], new_id: NewId, *, openings: tuple[str, ...], closings: tuple[str, ...] = ()
    ) -> None:
        self._openings, self._closings = openings, closings
        super().__init__(tools, new_id)

    def read(self) -> Steps[None]:
        while opening := (yield from self.scanner.until(*self._openings, sink=self.say)):
            self.scanner.mark(len(opening))
            yield from self.block()

    def block(self) -> Steps[None]:
        """What stands behind the opening, which is marked."""
        scanner = self.scanner
        yield from scanner.spaces()
        listed = yield from scanner.skip("[")
        made = 0
        while True:
            yield from scanner.spaces()
            if (yield from scanner.peek()) != "{":
                break
            if made:
                scanner.mark()
            if not (yield from self._call()):
                return
            made += 1
            yield from scanner.run(lambda char: char in ",;}" or char.isspace())
        if made or (listed and (yield from scanner.comes("]"))):
            yield from self._close()
        else:
            self.give_back(marked=True)

    def _call(self) -> Steps[bool]:
        """Whether a call was read, and more may follow in this block."""
        call = JsonCall(self, known=False)
        if not (yield from call.read()):
            self.give_back(marked=True)
            return False
        if call.broken:
            yield from self.scanner.until(*self._closings or self._openings, sink=self.argue)
        return not call.broken

    def _close(self) -> Steps[None]:
        """Brackets too many and the closing, if they are there."""
        self.scanner.release()
        if not self._closings:
            yield from self.scanner.skip("]")
            return
        yield from self.scanner.run(lambda char: char in "]}" or char.isspace())
        yield from self.scanner.skip(*self._closings)


def json_calls(grammar: Grammar, tools: Sequence[Tool], **shape: Any) -> str:
    """One call of one of these tools as a JSON object."""
    return one_of(grammar.json_call(tool, **shape) for tool in tools)


def tag_family(name: str, opening: str, closing: str, *, markers: tuple[str, ...]) -> Family:
    """A family that writes each call as an object between two tags."""

    def body(grammar: Grammar, tools: Sequence[Tool]) -> str:
        space = "SPACE?"
        return f"{space} {json_calls(grammar, tools)} {space} {grammar.text(closing)}"

    def write(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = grammar.rule(f"{grammar.text(opening)} {body(grammar, tools)}")
        return f"{call} (SPACE? {call})*" if parallel else call

    return Family(
        name=name,
        markers=markers,
        triggers=(opening,),
        parser=partial(TaggedJson, openings=(opening,), closings=(closing,)),
        write=write,
        write_after=lambda grammar, tools, trigger: body(grammar, tools),
    )


def list_family(
    name: str, opening: str, closing: str = "", *, also: tuple[str, ...] = (), new_id: NewId = new_id, **shape: Any
) -> Family:
    """A family that writes all calls as one list behind a marker. `also` are openings that models confuse with it."""

    def body(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = grammar.rule(json_calls(grammar, tools, **shape))
        more = f"(SPACE? {grammar.text(',')} SPACE? {call})*" if parallel else ""
        end = f"SPACE? {grammar.text(closing)}" if closing else ""
        return f"SPACE? {grammar.text('[')} {call} {more} {grammar.text(']')} {end}"

    closings = (closing,) if closing else ("</tool_call>",) if also else ()
    return Family(
        name=name,
        markers=(opening, closing) if closing else (opening, *also),
        triggers=(opening,),
        parser=partial(TaggedJson, openings=(opening, *also), closings=closings),
        write=lambda grammar, tools, parallel: f"{grammar.text(opening)} {body(grammar, tools, parallel)}",
        write_after=lambda grammar, tools, trigger: body(grammar, tools, True),
        new_id=new_id,
    )


TAGS = ("<tool_call>", "</tool_call>")
HERMES = tag_family("hermes", *TAGS, markers=TAGS)
GENERIC = tag_family("generic", *TAGS, markers=TAGS)
GRANITE = list_family("granite", "<|tool_call|>", also=("<tool_call>",))
NEMOTRON = list_family("nemotron", "<TOOLCALL>", "</TOOLCALL>")
APRIEL = list_family("apriel", "<tool_calls>", "</tool_calls>", more={"id": {"type": "string", "maxLength": 64}})
