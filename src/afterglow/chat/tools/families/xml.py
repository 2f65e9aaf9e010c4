"""Families that write each argument between tags: Qwen3-Coder's XML and similar formats, GLM's keys and values, the
markup of DeepSeek V3.2 and of Kimi-K3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from afterglow.chat.constraints.schema_analysis import get_type
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.grammar.schema import (
    CDATA_END,
    CDATA_START,
    SchemaNode,
    ToolParameter,
    build_bare_or_json_rule,
    build_text_until_rule,
    create_root,
    list_properties,
)
from afterglow.chat.tools.parsing.json_values import get_parameter_types, text_to_json
from afterglow.chat.tools.parsing.parser import ArgumentsBuilder, CallIdFactory, ToolParser
from afterglow.chat.tools.parsing.scanner import ParseSteps, TextSink, is_name_char
from afterglow.chat.tools.tool import Tool

DSML = "｜DSML｜"  # noqa: RUF001 - full-width bars of the model's vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TagAttributes:
    """Attributes of tags. `call_pattern` is an expression for those of a call: literals and regular expressions."""

    type_of_string: str  # attribute of an unquoted string, e.g. `string="true"`
    types: Mapping[str, str]  # attribute by JSON type, for values in JSON
    call_pattern: tuple[str, ...] = ()  # texts, and regular expressions between slashes

    def narrow_types(self, types: frozenset[str], attributes: str) -> frozenset[str]:
        """Return the types that a value has by its attributes, if the schema allows one of them."""
        is_string = self.type_of_string in attributes
        narrowed = types & {"string"} if is_string else types - {"string"}
        return narrowed or types


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlTags:
    """Texts around the parts of a call. Whitespace between tags is ignored."""

    opening: str
    closing: str
    name: tuple[str, str]  # before and after the tool's name; if after is "", a tag or newline ends the name
    key: tuple[str, str]
    value: tuple[str, str]
    call_end: str = ""  # end of one call in the block; "" if the closing ends it
    values_on_own_lines: bool = False  # one newline before and one after a value are not part of it
    opening_optional: bool = False  # models may omit the opening before a call of an offered tool
    calls_share_block: bool = False  # one block contains several calls
    attributes_end: str = ""  # attributes follow the name and every key up to this text; "" if there are none
    attributes: TagAttributes | None = None
    has_cdata: bool = False  # a value may be in a CDATA section

    @property
    def argument_starts(self) -> tuple[str, ...]:
        """Tags that begin an argument or end the call."""
        return (self.key[0], self.closing, *filter(None, [self.call_end]))


class XmlToolParser(ToolParser):
    """Parses calls whose arguments are between tags."""

    def __init__(self, tools: Sequence[Tool], new_id: CallIdFactory, *, tags: XmlTags) -> None:
        self._tags = tags
        super().__init__(tools, new_id)

    def parse(self) -> ParseSteps[None]:
        tags, scanner = self._tags, self.scanner
        openings = (tags.opening, tags.name[0]) if tags.opening_optional else (tags.opening,)
        while opening := (yield from scanner.stream_until(*openings, sink=self.emit_text)):
            scanner.mark(len(opening))
            if opening != tags.opening:
                scanner.unread(opening)
            yield from self._parse_block(has_opening=opening == tags.opening)

    def _parse_block(self, *, has_opening: bool) -> ParseSteps[None]:
        """Parse the calls after the opening, and the closing."""
        tags, scanner = self._tags, self.scanner
        while (yield from self._parse_call(require_known_tool=not has_opening)):
            yield from scanner.take_whitespace()
            if not tags.call_end:
                return
            if not (yield from scanner.peek_any(tags.name[0])):
                yield from scanner.skip_any(tags.closing)
                return
            scanner.mark()
        self.reject_call(after_marker=has_opening)

    def _parse_call(self, *, require_known_tool: bool) -> ParseSteps[bool]:
        """Parse one call; return whether there is one. With `require_known_tool`, only a known name before a tag is a
        call: text may mention the tag of a name."""
        before, after = self._tags.name
        yield from self.scanner.take_whitespace()
        if before and not (yield from self.scanner.skip_any(before)):
            return False
        name = yield from self.scanner.take_while(is_name_char)
        if after:
            name_ends = yield from self.scanner.skip_any(after)
        else:  # a name without delimiters requires a tag after it
            yield from self.scanner.take_whitespace()
            name_ends = yield from self.scanner.peek_any(self._tags.key[0], self._tags.closing)
        if not name or not name_ends:
            return False
        if require_known_tool:
            yield from self.scanner.take_whitespace()
            if name not in self.tools or not (yield from self.scanner.peek_any(*self._tags.argument_starts)):
                return False
        if self._tags.attributes_end:
            yield from self.scanner.stream_until(self._tags.attributes_end, sink=ignore_text)
            if self.scanner.is_exhausted:
                return False
        self.begin_call(name)
        arguments = ArgumentsBuilder(self)
        while (yield from self._parse_argument(name, arguments)):
            pass
        return True

    def _parse_argument(self, name: str, arguments: ArgumentsBuilder) -> ParseSteps[bool]:
        """Parse one argument, or the end of the call; return False if the call ends or is truncated."""
        tags, scanner = self._tags, self.scanner
        # Text between two arguments belongs to neither and is dropped.
        ending = yield from scanner.stream_until(*tags.argument_starts, sink=ignore_text)
        if ending != tags.key[0]:
            if ending is not None:
                arguments.finish()
                # The model may omit the end of the call.
                scanner.unread(ending if ending != (tags.call_end or tags.closing) else "")
            return False
        key: list[str] = []
        if not (yield from scanner.stream_until(tags.key[1], sink=key.append)):
            return False
        if tags.value[0]:
            yield from scanner.skip_after_space(tags.value[0])
        return (yield from self._parse_value(name, "".join(key).strip(), arguments))

    def _parse_value(self, name: str, key: str, arguments: ArgumentsBuilder) -> ParseSteps[bool]:
        types = get_parameter_types(self.tools.get(name), key)
        if self._tags.attributes is not None:
            attributes: list[str] = []
            if not (yield from self.scanner.stream_until(self._tags.attributes_end, sink=attributes.append)):
                return False
            types = self._tags.attributes.narrow_types(types, "".join(attributes))
        is_new = arguments.begin_argument(key)
        value = NewlineTrimmer(
            arguments.add_text if is_new and types == {"string"} else None, strip=self._tags.values_on_own_lines
        )
        complete = yield from self._parse_value_text(value.feed)
        value.finish(complete=complete)
        if not is_new:
            return complete
        if types == {"string"}:
            arguments.end_text(complete=complete)
        else:
            arguments.add_json(text_to_json(value.text, types) if complete else value.text)
        return complete

    def _parse_value_text(self, sink: TextSink) -> ParseSteps[bool]:
        """Stream the text of a value; return whether it is complete."""
        if self._tags.has_cdata and (yield from self.scanner.skip_any(CDATA_START)):
            if not (yield from self.scanner.stream_until(CDATA_END, sink=sink)):
                return False
            sink = ignore_text  # between the section and the end tag
        return bool((yield from self.scanner.stream_until(self._tags.value[1], sink=sink)))


def ignore_text(text: str) -> None:
    """Drop text."""


class NewlineTrimmer:
    """Collects and streams the text of a value; with `strip`, without the newlines of a value on its own lines. The
    last newline of a value that begins on the line of its tag belongs to it."""

    def __init__(self, sink: TextSink | None, *, strip: bool) -> None:
        self._sink, self._strip = sink, strip
        self._pieces: list[str] = []
        self._started = False
        self._pending_newline = ""  # newline that may be the last character

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, piece: str) -> None:
        if self._strip and not self._started:
            self._started, self._strip = True, piece.startswith("\n")
            piece = piece.removeprefix("\n")
        if self._strip:
            piece = self._pending_newline + piece
            self._pending_newline = "\n" if piece.endswith("\n") else ""
            piece = piece.removesuffix("\n")
        self._emit(piece)

    def finish(self, *, complete: bool) -> None:
        """Drop the pending newline, or emit it if the value was truncated and the newline may not be its last."""
        if not complete:
            self._emit(self._pending_newline)

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._sink is not None:
                self._sink(piece)


def build_xml_family(
    name: str,
    tags: XmlTags,
    *,
    markers: tuple[str, ...] | None = None,
    other_starts: tuple[str, ...] = (),
    optional_lead: str = "",
) -> ToolFamily:
    """Return a family with these tags. By default, the opening and the closing are its markers."""

    def build_call(grammar: LarkGrammar, tool: Tool) -> str:
        pieces = [grammar.literals(tags.name[0], tool.name, tags.name[1])]
        if tags.attributes is not None:
            pieces += [text if text[0] == "/" else grammar.literal(text) for text in tags.attributes.call_pattern]
        pieces += [grammar.literals(tags.attributes_end), "SPACE?"]
        pieces += [build_argument(grammar, parameter) for parameter in list_properties(create_root(tool, name))]
        return grammar.add_rule(f"{' '.join(pieces)} {grammar.literal(tags.call_end) if tags.call_end else ''}")

    def build_argument(grammar: LarkGrammar, parameter: ToolParameter) -> str:
        key = grammar.literals(tags.key[0], parameter.name, tags.key[1])
        between = f"SPACE? {grammar.literal(tags.value[0])}" if tags.value[0] else ""
        node, end, own_lines = parameter.node, tags.value[1], tags.values_on_own_lines
        if tags.attributes is None:
            value = build_bare_or_json_rule(
                grammar, node, ending=end, allow_own_lines=own_lines, has_cdata=tags.has_cdata
            )
        else:
            choices = [build_typed_value(grammar, tags.attributes, choice) for choice in node.expand_choices()]
            value = join_alternatives(choices)
        return grammar.add_rule(f"{key} {between} {value} SPACE?") + ("" if parameter.required else "?")

    def build_typed_value(grammar: LarkGrammar, attributes: TagAttributes, node: SchemaNode) -> str:
        """Return a rule for the attribute of a value's type and the value."""
        allowed = node.allowed_types
        json_type = (
            get_type(node.allowed_values[0]) if node.allowed_values else min(allowed & set(attributes.types) or allowed)
        )
        if json_type == "string":
            text = build_text_until_rule(grammar, node, ending=tags.value[1])
            return f"{grammar.literal(f' {attributes.type_of_string}{tags.attributes_end}')} {text}"
        if len(allowed - {"integer"}) > 1:
            raise node.build_error("type", "requires a single type")
        opening = grammar.literal(f" {attributes.types[json_type]}{tags.attributes_end}")
        return f"{opening} {grammar.add_json_rule(node.standalone_schema)} {grammar.literal(tags.value[1])}"

    def build_block(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        space = "SPACE?" if tags.call_end else ""
        call = join_alternatives(build_call(grammar, tool) for tool in tools)
        calls = grammar.add_calls_rule(call, parallel and tags.calls_share_block, "SPACE?")
        return f"{space} {calls} {space} {grammar.literal(tags.closing)}"

    return ToolFamily(
        name=name,
        markers=(tags.opening, tags.closing) if markers is None else markers,
        triggers=(tags.opening,),
        other_starts=other_starts,
        parser_factory=partial(XmlToolParser, tags=tags),
        build_block_rule=build_block,
        block_separator=None if tags.calls_share_block else "SPACE?",
        optional_lead=optional_lead,
    )


def build_function_tags(opening: str, closing: str, *, opening_optional: bool = False) -> XmlTags:
    """Return the tags of `<function=name><parameter=key>value</parameter></function>`."""
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
    other_starts=("<function=",),
)
SEED = build_xml_family("seed", build_function_tags("<seed:tool_call>", "</seed:tool_call>"))
MINIMAX = build_xml_family(
    "minimax",
    XmlTags(
        opening="<minimax:tool_call>",
        closing="</minimax:tool_call>",
        name=('<invoke name="', '">'),
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        call_end="</invoke>",
        calls_share_block=True,
    ),
)
GLM = build_xml_family(
    "glm",
    XmlTags(
        opening="<tool_call>",
        closing="</tool_call>",
        name=("", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
    ),
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MINICPM = build_xml_family(
    "minicpm",
    XmlTags(
        opening='<function name="',
        closing="</function>",
        name=("", '">'),
        key=('<param name="', '">'),
        value=("", "</param>"),
        has_cdata=True,
    ),
    markers=(),
)
DSML_TYPES = TagAttributes(
    type_of_string='string="true"',
    types=dict.fromkeys(("boolean", "integer", "number", "array", "object", "null"), 'string="false"'),
)


def build_dsml_family(name: str, block: str) -> ToolFamily:
    """Return a family of DeepSeek's markup language, in which versions name the block of calls differently."""
    return build_xml_family(
        name,
        XmlTags(
            opening=f"<{DSML}{block}>",
            closing=f"</{DSML}{block}>",
            name=(f'<{DSML}invoke name="', '"'),
            key=(f'<{DSML}parameter name="', '"'),
            value=("", f"</{DSML}parameter>"),
            call_end=f"</{DSML}invoke>",
            calls_share_block=True,
            attributes_end=">",
            attributes=DSML_TYPES,
        ),
        markers=(DSML,),
    )


DEEPSEEK_DSML = build_dsml_family("deepseek-dsml", "function_calls")
DEEPSEEK_DSML_CALLS = build_dsml_family("deepseek-dsml-calls", "tool_calls")
KIMI_K3 = build_xml_family(
    "kimi-k3",
    XmlTags(
        opening="<|open|>tools<|sep|>",
        closing="<|close|>tools<|sep|>",
        name=('<|open|>call tool="', '"'),
        key=('<|open|>argument key="', '"'),
        value=("", "<|close|>argument<|sep|>"),
        call_end="<|close|>call<|sep|>",
        calls_share_block=True,
        attributes_end="<|sep|>",
        attributes=TagAttributes(
            type_of_string='type="string"',
            types={
                "integer": 'type="number"',
                **{json_type: f'type="{json_type}"' for json_type in ("boolean", "number", "array", "object", "null")},
            },
            call_pattern=(' index="', "/[1-9][0-9]?/", '"'),
        ),
    ),
    markers=("<|open|>", "<|close|>", "<|sep|>"),
    optional_lead="<|open|>response<|sep|><|close|>response<|sep|>",
)
