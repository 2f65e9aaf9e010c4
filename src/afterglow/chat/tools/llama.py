"""Llama 3's calls: bare JSON objects, perhaps behind `<|python_tag|>`, several with `;` between them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from afterglow.chat.tools.family import Family
from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.json_calls import JsonCall
from afterglow.chat.tools.parser import Parser
from afterglow.chat.tools.python_calls import PythonCall
from afterglow.chat.tools.scanner import Steps
from afterglow.chat.tools.tool import Tool

PYTHON_TAG = "<|python_tag|>"
OBJECT = '{"name": "'


class BareJson(Parser):
    """Reads objects where a line begins, fenced or not.

    Only known names with parameters are calls: answers hold JSON too.
    """

    def read(self) -> Steps[None]:
        while True:
            self.say((yield from self.scanner.spaces()))
            tagged = yield from self.scanner.skip(PYTHON_TAG)
            if (yield from self._call(bool(tagged))):
                continue
            ending = yield from self.scanner.until("\n", PYTHON_TAG, sink=self.say)
            if ending is None:
                return
            if ending == PYTHON_TAG:
                self.scanner.unread(PYTHON_TAG)
            else:
                self.say(ending)

    def _call(self, tagged: bool) -> Steps[bool]:
        """Whether a call was read. Behind the tag, one of Llama's own tools may be called as in Python."""
        scanner = self.scanner
        if tagged:
            yield from scanner.spaces()
        scanner.mark()
        fence = yield from self.fence("json")
        if (yield from scanner.peek()) == "{":
            call = JsonCall(self, known=True)
            made = yield from call.read()
            if call.broken:
                yield from scanner.until(PYTHON_TAG, sink=self.argue)
        else:
            made = tagged and not fence and (yield from PythonCall(self, known=True).read())
        if not made:
            self.give_back(marked=False)
            return False
        yield from scanner.run(lambda char: char in ",;}" or char.isspace())
        if fence:
            yield from scanner.skip(fence)
        return True


def _write(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
    call = grammar.rule(one_of(grammar.json_call(tool, arguments="parameters") for tool in tools))
    return f"{call} (SPACE? {grammar.text(';')} SPACE? {call})*" if parallel else call


def _write_after(grammar: Grammar, tools: Sequence[Tool], trigger: str) -> str:
    if trigger == PYTHON_TAG:
        return _write(grammar, tools, True)
    calls = []
    for tool in tools:
        name, arguments = grammar.text(f'{json.dumps(tool.name)[1:-1]}"'), grammar.json(tool.parameters)
        calls.append(
            f'{name} SPACE? "," SPACE? {grammar.text(PARAMETERS)} SPACE? {arguments} SPACE? {grammar.text("}")}'
        )
    return one_of(calls)


PARAMETERS = '"parameters":'
LLAMA = Family(
    name="llama",
    markers=(PYTHON_TAG,),
    stops=("<|eom_id|>",),
    triggers=(PYTHON_TAG, OBJECT),
    parser=BareJson,
    write=_write,
    write_after=_write_after,
)
