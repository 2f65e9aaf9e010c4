"""Families that write a head and JSON between five markers: DeepSeek's two forms and Kimi's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from afterglow.chat.tools.family import Family
from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.json_calls import value
from afterglow.chat.tools.parser import FENCE, NewId, Parser
from afterglow.chat.tools.scanner import Steps, is_of_name
from afterglow.chat.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class Marks:
    """The markers around all calls, around one, and between its head and its arguments."""

    begin: str
    call: str
    separator: str
    call_end: str
    end: str

    @property
    def all(self) -> tuple[str, ...]:
        return self.begin, self.call, self.separator, self.call_end, self.end


class Sections(Parser):
    """Reads a head, the separator, and JSON; or, as DeepSeek's first models write it, the name and fenced JSON."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId, *, marks: Marks) -> None:
        self._marks = marks
        super().__init__(tools, new_id)

    def read(self) -> Steps[None]:
        marks, scanner = self._marks, self.scanner
        while opening := (yield from scanner.until(marks.begin, marks.call, sink=self.say)):
            scanner.mark(len(opening))
            if opening == marks.begin:
                yield from scanner.spaces()
                yield from scanner.skip(marks.call)
            while (yield from self._call()):
                yield from scanner.spaces()
                if not (yield from scanner.skip(marks.call)):
                    yield from scanner.skip(marks.end)
                    break
                scanner.mark(len(marks.call))

    def _call(self) -> Steps[bool]:
        """One call behind its marker; where there is none, what was read is given back."""
        scanner, marks = self.scanner, self._marks
        head = yield from scanner.run(lambda char: is_of_name(char) or char == ":")
        told = yield from scanner.skip(marks.separator)
        line = (yield from self._line()) if told else ""
        if not told or not (line or head).strip() or scanner.finished:
            self.give_back(marked=True)
            return False
        if line:
            self.begin(line)
        else:
            self._begin(head.strip())
        yield from self._arguments()
        return True

    def _line(self) -> Steps[str]:
        """The name that stands alone on the line before fenced JSON; nothing where JSON follows at once."""
        yield from self.scanner.spaces()
        if (yield from self.scanner.peek()) in ("{", "["):
            return ""
        return (yield from self.scanner.run(lambda char: char not in "\n`<{")).strip()

    def _begin(self, head: str) -> None:
        """Kimi's heads are ids as well: `functions.name:0`. The template will write the same again."""
        numbered = re.fullmatch(r"(?:functions\.)?(.+):\d+", head)
        self.begin(numbered[1] if numbered else head.removeprefix("functions."), head if numbered else None)

    def _arguments(self) -> Steps[None]:
        scanner, marks = self.scanner, self._marks
        yield from scanner.spaces()
        fence = yield from scanner.skip(FENCE)
        yield from scanner.skip("json")
        yield from scanner.spaces()
        if (yield from scanner.skip(marks.call_end)):
            self.argue("{}")
            return
        if not (yield from value(scanner, self.argue)):
            yield from scanner.until(marks.call_end, sink=self.argue)
            return
        yield from scanner.spaces()
        if fence:
            yield from scanner.skip(FENCE)
            yield from scanner.spaces()
        yield from scanner.skip(marks.call_end)


def sections_family(name: str, marks: Marks, call: Callable[[Grammar, Tool], str]) -> Family:
    """A family of these markers; `call` writes what stands between a call's markers."""

    def body(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        inside = one_of(call(grammar, tool) for tool in tools)
        one = grammar.rule(f"{grammar.text(marks.call)} {inside} {grammar.text(marks.call_end)}")
        more = f"(SPACE? {one})*" if parallel else ""
        return f"{one} {more} SPACE? {grammar.text(marks.end)}"

    return Family(
        name=name,
        markers=marks.all,
        triggers=(marks.begin,),
        parser=partial(Sections, marks=marks),
        write=lambda grammar, tools, parallel: f"{grammar.text(marks.begin)} {body(grammar, tools, parallel)}",
        write_after=lambda grammar, tools, trigger: body(grammar, tools, True),
    )


def _fenced(grammar: Grammar, tool: Tool) -> str:
    head = grammar.texts("function", DEEPSEEK_MARKS.separator, tool.name + "\n```json\n")
    return f"{head} {grammar.json(tool.parameters)} {grammar.texts(chr(10) + FENCE)}"


def _named(grammar: Grammar, tool: Tool) -> str:
    return f"{grammar.texts(tool.name, DEEPSEEK_MARKS.separator)} {grammar.json(tool.parameters)}"


def _numbered(grammar: Grammar, tool: Tool) -> str:
    head = f"{grammar.text(f'functions.{tool.name}:')} /[0-9]{{1,4}}/"
    return f"{head} {grammar.text(KIMI_MARKS.separator)} {grammar.json(tool.parameters)}"


DEEPSEEK_MARKS = Marks(
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001 - the models' own bars
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "<｜tool▁sep｜>",  # noqa: RUF001
    "<｜tool▁call▁end｜>",  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
)
KIMI_MARKS = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
DEEPSEEK = sections_family("deepseek", DEEPSEEK_MARKS, _fenced)
DEEPSEEK_NAMED = sections_family("deepseek-named", DEEPSEEK_MARKS, _named)
KIMI = sections_family("kimi", KIMI_MARKS, _numbered)
