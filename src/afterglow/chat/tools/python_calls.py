"""Calls written as Python: `name(key="value", other=1)`."""

from __future__ import annotations

from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.members import Members
from afterglow.chat.tools.parser import Parser
from afterglow.chat.tools.scanner import Steps, Verdict, is_of_name
from afterglow.chat.tools.schemas import NOTES, Place, parameters, separated
from afterglow.chat.tools.tool import Tool
from afterglow.chat.tools.values import from_python, parameter_types

SINGLE_QUOTED = r"""/'([^'\\\n]|\\['"\\nrt])*'/"""


class PythonValue:
    """Finds the end of one argument, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def judge(self, char: str) -> Verdict:
        if self._quote:
            if char == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = char == "\\" and not self._escaped
        elif self._depth == 0 and char in ",)":
            return Verdict.OUTSIDE
        else:
            self._quote = char if char in "'\"" else ""
            self._depth += (char in "([{") - (char in ")]}")
        return Verdict.INSIDE


class PythonCall:
    """Reads one call. `known` asks for the name of a tool before anything is believed."""

    def __init__(self, parser: Parser, *, known: bool) -> None:
        self._parser, self._scanner, self._known = parser, parser.scanner, known
        self._members = Members(parser)
        self._begun = False

    def read(self) -> Steps[bool]:
        """Whether this was a call. What was read lies behind the scanner's mark."""
        name = yield from self._scanner.run(is_of_name)
        name = name.removesuffix(".call")  # Llama's way to write a call of one of its own tools
        if not name or (self._known and name not in self._parser.tools) or not (yield from self._scanner.skip("(")):
            return False
        while True:
            yield from self._scanner.spaces()
            if (yield from self._scanner.skip(")")):
                self._begin(name)
                self._members.end()
                return True
            if not (yield from self._argument(name)):
                return self._begun
            yield from self._scanner.spaces()
            yield from self._scanner.skip(",")

    def _begin(self, name: str) -> None:
        if not self._begun:
            self._parser.begin(name)
        self._begun = True

    def _argument(self, name: str) -> Steps[bool]:
        """One `key=value`; false where it broke off or is none."""
        key = yield from self._scanner.run(lambda char: char.isalnum() or char in "_-")
        yield from self._scanner.spaces()
        if not key or not (yield from self._scanner.skip("=")):
            return False
        self._begin(name)
        pieces: list[str] = []
        verdict = yield from self._scanner.scan(PythonValue().judge, pieces.append)
        text = "".join(pieces)
        if self._members.key(key):
            types = parameter_types(self._parser.tools.get(name), key)
            self._members.value(from_python(text, types) if verdict is Verdict.OUTSIDE else text.lstrip())
        return verdict is Verdict.OUTSIDE


def python_call(grammar: Grammar, tool: Tool, family: str) -> str:
    """A call of this tool, its arguments in the schema's order."""
    arguments = [
        (f"{grammar.text(parameter.name + '=')} {_value(grammar, parameter.place, family)}", parameter.required)
        for parameter in parameters(tool, family)
    ]
    return grammar.rule(f"{grammar.text(tool.name + '(')} {separated(grammar, arguments, ', ')} {grammar.text(')')}")


def _value(grammar: Grammar, place: Place, family: str) -> str:
    """Python's own words for truth and nothing; everything else is written as in JSON."""
    written = []
    for choice in place.choices(family):
        if choice.types == {"boolean"}:
            allowed = [True, False] if choice.values is None else choice.values
            written += [grammar.text(str(value)) for value in allowed]
        elif choice.types == {"null"}:
            written.append(grammar.text("None"))
        else:
            written += [grammar.json(choice.alone), *_single_quoted(grammar, choice)]
    return one_of(written)


def _single_quoted(grammar: Grammar, place: Place) -> list[str]:
    """Text between single quotes, where its schema can be kept there."""
    if place.types != {"string"}:
        return []
    if place.values is not None:
        return [grammar.text(repr(value)) for value in place.values if repr(value).startswith("'")]
    return [SINGLE_QUOTED] if not set(place.schema) - NOTES - {"type"} else []
