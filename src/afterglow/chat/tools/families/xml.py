"""Families that write each argument between tags: Qwen3-Coder's XML and its kin, GLM's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.grammar.schema import ToolParameter, build_bare_or_json_rule, list_parameters
from afterglow.chat.tools.parsing.arguments import ArgumentsBuilder
from afterglow.chat.tools.parsing.json_values import get_parameter_types, text_to_json
from afterglow.chat.tools.parsing.parser import CallIdFactory, ToolParser
from afterglow.chat.tools.parsing.scanner import ParseSteps, TextSink, is_name_char
from afterglow.chat.tools.tool import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlTags:
    """The texts around the pieces of a call. Spaces and newlines between tags mean nothing."""

    opening: str
    closing: str
    name: tuple[str, str]  # before and after the tool's name; where after is "", the name ends at a tag or a newline
    key: tuple[str, str]
    value: tuple[str, str]
    call_end: str  # of one call in the block; "" where the closing is its end
    values_on_own_lines: (
        bool  # a value may stand on lines of its own: one newline before it and one after it are not part of it
    )
    opening_optional: bool = False  # calls may come without the opening
    calls_share_block: bool = False  # several calls stand in one block

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening, self.name[0]) if self.opening_optional else (self.opening,)


class XmlToolParser(ToolParser):
    """Reads calls whose arguments stand between tags."""

    def __init__(self, tools: Sequence[Tool], new_id: CallIdFactory, *, tags: XmlTags) -> None:
        self._tags = tags
        super().__init__(tools, new_id)

    def parse(self) -> ParseSteps[None]:
        tags, scanner = self._tags, self.scanner
        while opening := (yield from scanner.stream_until(*tags.openings, sink=self.emit_text)):
            scanner.mark(len(opening))
            if opening != tags.opening:
                scanner.unread(opening)
            yield from self._parse_block()

    def _parse_block(self) -> ParseSteps[None]:
        """The calls between the opening, which was read, and the closing."""
        tags, scanner = self._tags, self.scanner
        while True:
            if not (yield from self._parse_call()):
                self.reject_call(after_marker=True)
                return
            yield from scanner.take_whitespace()
            if not tags.call_end or not (yield from scanner.peek_any(tags.name[0])):
                break
            scanner.mark()
        if tags.call_end:
            yield from scanner.skip_any(tags.closing)

    def _parse_call(self) -> ParseSteps[bool]:
        """One call; false where there is none."""
        before, after = self._tags.name
        yield from self.scanner.take_whitespace()
        if before and not (yield from self.scanner.skip_any(before)):
            return False
        name = yield from self.scanner.take_while(is_name_char)
        told = (yield from self.scanner.skip_any(after)) if after else (yield from self._has_tag_next())
        if not name or not told:
            return False
        self.begin_call(name)
        yield from self._parse_arguments(name)
        return True

    def _has_tag_next(self) -> ParseSteps[bool]:
        """A bare name is one only when a tag follows."""
        yield from self.scanner.take_whitespace()
        return bool((yield from self.scanner.peek_any(self._tags.key[0], self._tags.closing)))

    def _parse_arguments(self, name: str) -> ParseSteps[None]:
        tags, scanner, members = self._tags, self.scanner, ArgumentsBuilder(self)
        end = tags.call_end or tags.closing
        while True:
            yield from scanner.take_whitespace()
            if (yield from scanner.skip_any(end)):
                members.finish()
                return
            if (yield from scanner.peek_any(tags.closing)):
                members.finish()  # the call's own end was forgotten
                return
            if not (yield from self._parse_argument(name, members)):
                return

    def _parse_argument(self, name: str, arguments: ArgumentsBuilder) -> ParseSteps[bool]:
        """One argument; false where the call broke off."""
        tags, scanner = self._tags, self.scanner
        skipped: list[str] = []
        # Words between two arguments belong to no argument: they are left out.
        endings = (tags.key[0], tags.closing, *filter(None, [tags.call_end]))
        found = yield from scanner.stream_until(*endings, sink=skipped.append)
        if found is not None and found != tags.key[0]:
            arguments.finish()
            scanner.unread(found if found != (tags.call_end or tags.closing) else "")
        if found != tags.key[0]:
            return False
        key: list[str] = []
        if not (yield from scanner.stream_until(tags.key[1], sink=key.append)):
            return False
        if tags.value[0]:
            yield from scanner.take_whitespace()
            yield from scanner.skip_any(tags.value[0])
        return (yield from self._parse_value(name, "".join(key).strip(), arguments))

    def _parse_value(self, name: str, key: str, arguments: ArgumentsBuilder) -> ParseSteps[bool]:
        types = get_parameter_types(self.tools.get(name), key)
        fresh = arguments.begin_argument(key)
        text = NewlineTrimmer(
            arguments.add_text if fresh and types == {"string"} else None, strip=self._tags.values_on_own_lines
        )
        whole = bool((yield from self.scanner.stream_until(self._tags.value[1], sink=text.feed)))
        text.finish(complete=whole)
        if not fresh:
            return whole
        if types == {"string"}:
            arguments.end_text(complete=whole)
        else:
            arguments.add_json(text_to_json(text.text, types) if whole else text.text)
        return whole


class NewlineTrimmer:
    """A value's text, without the newline that begins it and the one that ends it where those are not part of it."""

    def __init__(self, sink: TextSink | None, *, strip: bool) -> None:
        self._sink, self._strip = sink, strip
        self._pieces: list[str] = []
        self._started = False
        self._pending_newline = ""  # a newline that may be the last

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, piece: str) -> None:
        if self._strip:
            piece = piece if self._started else piece.removeprefix("\n")
            self._started = True
            piece = self._pending_newline + piece
            self._pending_newline = "\n" if piece.endswith("\n") else ""
            piece = piece.removesuffix("\n")
        self._emit(piece)

    def finish(self, *, complete: bool) -> None:
        """No more comes: what is held is dropped, unless the value broke off and nothing says it was the last."""
        if not complete:
            self._emit(self._pending_newline)

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._sink is not None:
                self._sink(piece)


def build_xml_family(name: str, tags: XmlTags, *, markers: tuple[str, ...]) -> ToolFamily:
    """A family of these tags."""

    def call(grammar: LarkGrammar, tool: Tool) -> str:
        pieces = [grammar.literals(tags.name[0], tool.name, tags.name[1]), "SPACE?"]
        pieces += [argument(grammar, parameter) for parameter in list_parameters(tool, name)]
        return grammar.add_rule(f"{' '.join(pieces)} {grammar.literal(tags.call_end) if tags.call_end else ''}")

    def argument(grammar: LarkGrammar, parameter: ToolParameter) -> str:
        key = grammar.literals(tags.key[0], parameter.name, tags.key[1])
        between = f"SPACE? {grammar.literal(tags.value[0])}" if tags.value[0] else ""
        value = build_bare_or_json_rule(
            grammar, parameter.node, name, ending=tags.value[1], allow_own_lines=tags.values_on_own_lines
        )
        return grammar.add_rule(f"{key} {between} {value} SPACE?") + ("" if parameter.required else "?")

    def body(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        space = "SPACE?" if tags.call_end else ""
        calls = grammar.add_rule(join_alternatives(call(grammar, tool) for tool in tools))
        more = f"(SPACE? {calls})*" if parallel and tags.calls_share_block else ""
        return f"{space} {calls} {more} {space} {grammar.literal(tags.closing)}"

    def write(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        whole = grammar.add_rule(f"{grammar.literal(tags.opening)} {body(grammar, tools, parallel)}")
        return f"{whole} (SPACE? {whole})*" if parallel and not tags.calls_share_block else whole

    return ToolFamily(
        name=name,
        markers=markers,
        triggers=(tags.opening,),
        parser_factory=partial(XmlToolParser, tags=tags),
        build_calls_rule=write,
        build_after_trigger_rule=lambda grammar, tools, trigger: body(grammar, tools, True),
    )


def build_function_tags(opening: str, closing: str, *, opening_optional: bool = False) -> XmlTags:
    """`<function=name><parameter=key>value</parameter></function>`"""
    return XmlTags(
        opening=opening,
        closing=closing,
        name=("<function=", ">"),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        call_end="</function>",
        values_on_own_lines=True,
        opening_optional=opening_optional,
    )


QWEN_CODER = build_xml_family(
    "qwen-coder",
    build_function_tags("<tool_call>", "</tool_call>", opening_optional=True),
    markers=("<tool_call>", "</tool_call>"),
)
SEED = build_xml_family(
    "seed",
    build_function_tags("<seed:tool_call>", "</seed:tool_call>"),
    markers=("<seed:tool_call>", "</seed:tool_call>"),
)
MINIMAX = build_xml_family(
    "minimax",
    XmlTags(
        opening="<minimax:tool_call>",
        closing="</minimax:tool_call>",
        name=('<invoke name="', '">'),
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        call_end="</invoke>",
        values_on_own_lines=False,
        calls_share_block=True,
    ),
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
)
GLM = build_xml_family(
    "glm",
    XmlTags(
        opening="<tool_call>",
        closing="</tool_call>",
        name=("", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        call_end="",
        values_on_own_lines=False,
    ),
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
