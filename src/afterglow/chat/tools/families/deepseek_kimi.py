"""Families that write a header and JSON between five markers: DeepSeek (two formats) and Kimi."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.json_calls import stream_json_value
from afterglow.chat.tools.parsing.parser import FENCE, CallIdFactory, ToolParser
from afterglow.chat.tools.parsing.scanner import ParseSteps, is_name_char
from afterglow.chat.tools.tool import Tool


class SectionMarkers(NamedTuple):
    """Markers around all calls, around one call, and between its header and its arguments."""

    calls_begin: str
    call_begin: str
    separator: str
    call_end: str
    calls_end: str


class SectionToolParser(ToolParser):
    """Parses a header, the separator and JSON; or, in DeepSeek's first format, a name and fenced JSON."""

    def __init__(self, tools: Sequence[Tool], new_id: CallIdFactory, *, markers: SectionMarkers) -> None:
        self._markers = markers
        super().__init__(tools, new_id)

    def parse(self) -> ParseSteps[None]:
        markers, scanner = self._markers, self.scanner
        while opening := (
            yield from scanner.stream_until(markers.calls_begin, markers.call_begin, sink=self.emit_text)
        ):
            scanner.mark(len(opening))
            if opening == markers.calls_begin:
                yield from scanner.skip_after_space(markers.call_begin)
            while (yield from self._parse_call()):
                if not (yield from scanner.skip_after_space(markers.call_begin)):
                    yield from scanner.skip_any(markers.calls_end)
                    break
                scanner.mark(len(markers.call_begin))

    def _parse_call(self) -> ParseSteps[bool]:
        """Parse one call after its marker; return False and emit the text if it is not a call."""
        scanner = self.scanner
        header = yield from scanner.take_while(lambda char: is_name_char(char) or char == ":" or char.isspace())
        has_separator = yield from scanner.skip_any(self._markers.separator)
        name = (yield from self._parse_name_line()) if has_separator else ""
        if not has_separator or not (name or header).strip() or scanner.is_exhausted:
            self.reject_call(after_marker=True)
            return False
        if name:
            self.begin_call(name)
        else:  # Kimi's headers are also call ids (`functions.name:0`), which its template renders again
            header = header.strip()
            numbered = re.fullmatch(r"(?:functions\.)?(.+):\d+", header)
            name = numbered[1] if numbered else header.removeprefix("functions.")
            self.begin_call(name, header if numbered else None)
        yield from self._parse_arguments()
        return True

    def _parse_name_line(self) -> ParseSteps[str]:
        """Return the name on the line before fenced JSON; empty if JSON follows immediately."""
        yield from self.scanner.take_whitespace()
        if (yield from self.scanner.peek()) in ("{", "["):
            return ""
        return (yield from self.scanner.take_while(lambda char: char not in "\n`<{")).strip()

    def _parse_arguments(self) -> ParseSteps[None]:
        scanner, call_end = self.scanner, self._markers.call_end
        fence = yield from scanner.skip_after_space(FENCE)
        yield from scanner.skip_any("json")
        if (yield from scanner.skip_after_space(call_end)):
            self.emit_arguments("{}")
            return
        if not (yield from stream_json_value(scanner, self.emit_arguments)):
            yield from scanner.stream_until(call_end, sink=self.emit_arguments)
            return
        yield from scanner.take_whitespace()
        if fence:
            yield from scanner.skip_any(FENCE)
            yield from scanner.take_whitespace()
        yield from scanner.skip_any(call_end)


def build_section_family(
    name: str, markers: SectionMarkers, build_call_rule: Callable[[LarkGrammar, Tool], str], *, instructions: str = ""
) -> ToolFamily:
    """Return a family with these markers. `build_call_rule` matches the text between a call's markers."""

    def build_block(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        content = join_alternatives(build_call_rule(grammar, tool) for tool in tools)
        call = f"{grammar.literal(markers.call_begin)} {content} {grammar.literal(markers.call_end)}"
        return f"{grammar.add_calls_rule(call, parallel, 'SPACE?')} SPACE? {grammar.literal(markers.calls_end)}"

    return ToolFamily(
        name=name,
        markers=markers,
        triggers=(markers.calls_begin,),
        other_starts=(markers.call_begin,),
        instructions=instructions,
        parser_factory=partial(SectionToolParser, markers=markers),
        build_block_rule=build_block,
    )


def _build_fenced_call_rule(grammar: LarkGrammar, tool: Tool) -> str:
    header = grammar.literals("function", DEEPSEEK_MARKERS.separator, tool.name + "\n```json\n")
    return f"{header} {grammar.add_json_rule(tool.parameters)} {grammar.literals(chr(10) + FENCE)}"


def _build_named_call_rule(grammar: LarkGrammar, tool: Tool) -> str:
    return f"{grammar.literals(tool.name, DEEPSEEK_MARKERS.separator)} {grammar.add_json_rule(tool.parameters)}"


def _build_numbered_call_rule(grammar: LarkGrammar, tool: Tool) -> str:
    header = f"{grammar.literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/"
    return f"{header} {grammar.literal(KIMI_MARKERS.separator)} {grammar.add_json_rule(tool.parameters)}"


DEEPSEEK_MARKERS = SectionMarkers(
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001 - full-width bars of the model's vocabulary
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
DEEPSEEK_NAMED = build_section_family(
    "deepseek-named",
    DEEPSEEK_MARKERS,
    _build_named_call_rule,
    # The template of DeepSeek V3.1 renders calls and results, but not the tools.
    instructions="".join(
        (
            "To call tools, write this and nothing after it, with one part from begin to end for each call:\n",
            *(*DEEPSEEK_MARKERS[:2], "the tool's name", DEEPSEEK_MARKERS.separator, "its arguments as JSON"),
            *DEEPSEEK_MARKERS[3:],
        )
    ),
)
KIMI = build_section_family("kimi", KIMI_MARKERS, _build_numbered_call_rule)
