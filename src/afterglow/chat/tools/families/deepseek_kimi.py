"""Families that write a head and JSON between five markers: DeepSeek's two forms and Kimi's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.json_calls import stream_json_value
from afterglow.chat.tools.parsing.parser import FENCE, CallIdFactory, ToolParser
from afterglow.chat.tools.parsing.scanner import ParseSteps, is_name_char
from afterglow.chat.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class SectionMarkers:
    """The markers around all calls, around one, and between its head and its arguments."""

    calls_begin: str
    call_begin: str
    separator: str
    call_end: str
    calls_end: str

    @property
    def texts(self) -> tuple[str, ...]:
        return self.calls_begin, self.call_begin, self.separator, self.call_end, self.calls_end


class SectionToolParser(ToolParser):
    """Reads a head, the separator, and JSON; or, as DeepSeek's first models write it, the name and fenced JSON."""

    def __init__(self, tools: Sequence[Tool], new_id: CallIdFactory, *, markers: SectionMarkers) -> None:
        self._markers = markers
        super().__init__(tools, new_id)

    def parse(self) -> ParseSteps[None]:
        marks, scanner = self._markers, self.scanner
        while opening := (yield from scanner.stream_until(marks.calls_begin, marks.call_begin, sink=self.emit_text)):
            scanner.mark(len(opening))
            if opening == marks.calls_begin:
                yield from scanner.take_whitespace()
                yield from scanner.skip_any(marks.call_begin)
            while (yield from self._parse_call()):
                yield from scanner.take_whitespace()
                if not (yield from scanner.skip_any(marks.call_begin)):
                    yield from scanner.skip_any(marks.calls_end)
                    break
                scanner.mark(len(marks.call_begin))

    def _parse_call(self) -> ParseSteps[bool]:
        """One call behind its marker; where there is none, what was read is given back."""
        scanner, marks = self.scanner, self._markers
        head = yield from scanner.take_while(lambda char: is_name_char(char) or char == ":")
        told = yield from scanner.skip_any(marks.separator)
        line = (yield from self._parse_name_line()) if told else ""
        if not told or not (line or head).strip() or scanner.is_exhausted:
            self.reject_call(after_marker=True)
            return False
        if line:
            self.begin_call(line)
        else:
            self._begin_from_header(head.strip())
        yield from self._parse_arguments()
        return True

    def _parse_name_line(self) -> ParseSteps[str]:
        """The name that stands alone on the line before fenced JSON; nothing where JSON follows at once."""
        yield from self.scanner.take_whitespace()
        if (yield from self.scanner.peek()) in ("{", "["):
            return ""
        return (yield from self.scanner.take_while(lambda char: char not in "\n`<{")).strip()

    def _begin_from_header(self, header: str) -> None:
        """Kimi's heads are ids as well: `functions.name:0`. The template will write the same again."""
        numbered = re.fullmatch(r"(?:functions\.)?(.+):\d+", header)
        self.begin_call(numbered[1] if numbered else header.removeprefix("functions."), header if numbered else None)

    def _parse_arguments(self) -> ParseSteps[None]:
        scanner, marks = self.scanner, self._markers
        yield from scanner.take_whitespace()
        fence = yield from scanner.skip_any(FENCE)
        yield from scanner.skip_any("json")
        yield from scanner.take_whitespace()
        if (yield from scanner.skip_any(marks.call_end)):
            self.emit_arguments("{}")
            return
        if not (yield from stream_json_value(scanner, self.emit_arguments)):
            yield from scanner.stream_until(marks.call_end, sink=self.emit_arguments)
            return
        yield from scanner.take_whitespace()
        if fence:
            yield from scanner.skip_any(FENCE)
            yield from scanner.take_whitespace()
        yield from scanner.skip_any(marks.call_end)


def build_section_family(
    name: str, markers: SectionMarkers, build_call_rule: Callable[[LarkGrammar, Tool], str]
) -> ToolFamily:
    """A family of these markers; `call` writes what stands between a call's markers."""

    def body(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        inside = join_alternatives(build_call_rule(grammar, tool) for tool in tools)
        one = grammar.add_rule(f"{grammar.literal(markers.call_begin)} {inside} {grammar.literal(markers.call_end)}")
        more = f"(SPACE? {one})*" if parallel else ""
        return f"{one} {more} SPACE? {grammar.literal(markers.calls_end)}"

    return ToolFamily(
        name=name,
        markers=markers.texts,
        triggers=(markers.calls_begin,),
        parser_factory=partial(SectionToolParser, markers=markers),
        build_calls_rule=lambda grammar, tools, parallel: (
            f"{grammar.literal(markers.calls_begin)} {body(grammar, tools, parallel)}"
        ),
        build_after_trigger_rule=lambda grammar, tools, trigger: body(grammar, tools, True),
    )


def _build_fenced_call_rule(grammar: LarkGrammar, tool: Tool) -> str:
    head = grammar.literals("function", DEEPSEEK_MARKERS.separator, tool.name + "\n```json\n")
    return f"{head} {grammar.add_json_rule(tool.parameters)} {grammar.literals(chr(10) + FENCE)}"


def _build_named_call_rule(grammar: LarkGrammar, tool: Tool) -> str:
    return f"{grammar.literals(tool.name, DEEPSEEK_MARKERS.separator)} {grammar.add_json_rule(tool.parameters)}"


def _build_numbered_call_rule(grammar: LarkGrammar, tool: Tool) -> str:
    head = f"{grammar.literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/"
    return f"{head} {grammar.literal(KIMI_MARKERS.separator)} {grammar.add_json_rule(tool.parameters)}"


DEEPSEEK_MARKERS = SectionMarkers(
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001 - the models' own bars
    "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "<｜tool▁sep｜>",  # noqa: RUF001
    "<｜tool▁call▁end｜>",  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
)
KIMI_MARKERS = SectionMarkers(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
DEEPSEEK = build_section_family("deepseek", DEEPSEEK_MARKERS, _build_fenced_call_rule)
DEEPSEEK_NAMED = build_section_family("deepseek-named", DEEPSEEK_MARKERS, _build_named_call_rule)
KIMI = build_section_family("kimi", KIMI_MARKERS, _build_numbered_call_rule)
