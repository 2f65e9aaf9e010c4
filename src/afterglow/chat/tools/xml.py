"""Families that write each argument between tags: Qwen3-Coder's XML and its kin, GLM's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from afterglow.chat.tools.family import Family
from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.members import Members
from afterglow.chat.tools.parser import NewId, Parser
from afterglow.chat.tools.scanner import Sink, Steps, is_of_name
from afterglow.chat.tools.schemas import Parameter, bare_or_json, parameters
from afterglow.chat.tools.tool import Tool
from afterglow.chat.tools.values import from_text, parameter_types


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The texts around the pieces of a call. Spaces and newlines between tags mean nothing."""

    opening: str
    closing: str
    name: tuple[str, str]  # before and after the tool's name; where after is "", the name ends at a tag or a newline
    key: tuple[str, str]
    value: tuple[str, str]
    end: str  # of one call in the block; "" where the closing is its end
    lines: bool  # a value may stand on lines of its own: one newline before it and one after it are not part of it
    bare: bool = False  # calls may come without the opening
    block: bool = False  # several calls stand in one block

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening, self.name[0]) if self.bare else (self.opening,)


class TaggedValues(Parser):
    """Reads calls whose arguments stand between tags."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId, *, tags: Tags) -> None:
        self._tags = tags
        super().__init__(tools, new_id)

    def read(self) -> Steps[None]:
        tags, scanner = self._tags, self.scanner
        while opening := (yield from scanner.until(*tags.openings, sink=self.say)):
            scanner.mark(len(opening))
            if opening != tags.opening:
                scanner.unread(opening)
            yield from self._block()

    def _block(self) -> Steps[None]:
        """The calls between the opening, which was read, and the closing."""
        tags, scanner = self._tags, self.scanner
        while True:
            if not (yield from self._call()):
                self.give_back(marked=True)
                return
            yield from scanner.spaces()
            if not tags.end or not (yield from scanner.comes(tags.name[0])):
                break
            scanner.mark()
        if tags.end:
            yield from scanner.skip(tags.closing)

    def _call(self) -> Steps[bool]:
        """One call; false where there is none."""
        before, after = self._tags.name
        yield from self.scanner.spaces()
        if before and not (yield from self.scanner.skip(before)):
            return False
        name = yield from self.scanner.run(is_of_name)
        told = (yield from self.scanner.skip(after)) if after else (yield from self._name_ends())
        if not name or not told:
            return False
        self.begin(name)
        yield from self._arguments(name)
        return True

    def _name_ends(self) -> Steps[bool]:
        """A bare name is one only when a tag follows."""
        yield from self.scanner.spaces()
        return bool((yield from self.scanner.comes(self._tags.key[0], self._tags.closing)))

    def _arguments(self, name: str) -> Steps[None]:
        tags, scanner, members = self._tags, self.scanner, Members(self)
        end = tags.end or tags.closing
        while True:
            yield from scanner.spaces()
            if (yield from scanner.skip(end)):
                members.end()
                return
            if (yield from scanner.comes(tags.closing)):
                members.end()  # the call's own end was forgotten
                return
            if not (yield from self._member(name, members)):
                return

    def _member(self, name: str, members: Members) -> Steps[bool]:
        """One argument; false where the call broke off."""
        tags, scanner = self._tags, self.scanner
        skipped: list[str] = []
        # Words between two arguments belong to no argument: they are left out.
        endings = (tags.key[0], tags.closing, *filter(None, [tags.end]))
        found = yield from scanner.until(*endings, sink=skipped.append)
        if found is not None and found != tags.key[0]:
            members.end()
            scanner.unread(found if found != (tags.end or tags.closing) else "")
        if found != tags.key[0]:
            return False
        key: list[str] = []
        if not (yield from scanner.until(tags.key[1], sink=key.append)):
            return False
        if tags.value[0]:
            yield from scanner.spaces()
            yield from scanner.skip(tags.value[0])
        return (yield from self._value(name, "".join(key).strip(), members))

    def _value(self, name: str, key: str, members: Members) -> Steps[bool]:
        types = parameter_types(self.tools.get(name), key)
        fresh = members.key(key)
        text = Lines(members.text if fresh and types == {"string"} else None, strip=self._tags.lines)
        whole = bool((yield from self.scanner.until(self._tags.value[1], sink=text.add)))
        text.end(whole=whole)
        if not fresh:
            return whole
        if types == {"string"}:
            members.end_text(whole=whole)
        else:
            members.value(from_text(text.whole, types) if whole else text.whole)
        return whole


class Lines:
    """A value's text, without the newline that begins it and the one that ends it where those are not part of it."""

    def __init__(self, sink: Sink | None, *, strip: bool) -> None:
        self._sink, self._strip = sink, strip
        self._pieces: list[str] = []
        self._begun = False
        self._held = ""  # a newline that may be the last

    @property
    def whole(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        if self._strip:
            piece = piece if self._begun else piece.removeprefix("\n")
            self._begun = True
            piece = self._held + piece
            self._held = "\n" if piece.endswith("\n") else ""
            piece = piece.removesuffix("\n")
        self._put(piece)

    def end(self, *, whole: bool) -> None:
        """No more comes: what is held is dropped, unless the value broke off and nothing says it was the last."""
        if not whole:
            self._put(self._held)

    def _put(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._sink is not None:
                self._sink(piece)


def tags_family(name: str, tags: Tags, *, markers: tuple[str, ...]) -> Family:
    """A family of these tags."""

    def call(grammar: Grammar, tool: Tool) -> str:
        pieces = [grammar.texts(tags.name[0], tool.name, tags.name[1]), "SPACE?"]
        pieces += [argument(grammar, parameter) for parameter in parameters(tool, name)]
        return grammar.rule(f"{' '.join(pieces)} {grammar.text(tags.end) if tags.end else ''}")

    def argument(grammar: Grammar, parameter: Parameter) -> str:
        key = grammar.texts(tags.key[0], parameter.name, tags.key[1])
        between = f"SPACE? {grammar.text(tags.value[0])}" if tags.value[0] else ""
        value = bare_or_json(grammar, parameter.place, name, ending=tags.value[1], lines=tags.lines)
        return grammar.rule(f"{key} {between} {value} SPACE?") + ("" if parameter.required else "?")

    def body(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        space = "SPACE?" if tags.end else ""
        calls = grammar.rule(one_of(call(grammar, tool) for tool in tools))
        more = f"(SPACE? {calls})*" if parallel and tags.block else ""
        return f"{space} {calls} {more} {space} {grammar.text(tags.closing)}"

    def write(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        whole = grammar.rule(f"{grammar.text(tags.opening)} {body(grammar, tools, parallel)}")
        return f"{whole} (SPACE? {whole})*" if parallel and not tags.block else whole

    return Family(
        name=name,
        markers=markers,
        triggers=(tags.opening,),
        parser=partial(TaggedValues, tags=tags),
        write=write,
        write_after=lambda grammar, tools, trigger: body(grammar, tools, True),
    )


def function_tags(opening: str, closing: str, *, bare: bool = False) -> Tags:
    """`<function=name><parameter=key>value</parameter></function>`"""
    return Tags(
        opening=opening,
        closing=closing,
        name=("<function=", ">"),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        end="</function>",
        lines=True,
        bare=bare,
    )


QWEN_CODER = tags_family(
    "qwen-coder",
    function_tags("<tool_call>", "</tool_call>", bare=True),
    markers=("<tool_call>", "</tool_call>"),
)
SEED = tags_family(
    "seed",
    function_tags("<seed:tool_call>", "</seed:tool_call>"),
    markers=("<seed:tool_call>", "</seed:tool_call>"),
)
MINIMAX = tags_family(
    "minimax",
    Tags(
        opening="<minimax:tool_call>",
        closing="</minimax:tool_call>",
        name=('<invoke name="', '">'),
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        end="</invoke>",
        lines=False,
        block=True,
    ),
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
)
GLM = tags_family(
    "glm",
    Tags(
        opening="<tool_call>",
        closing="</tool_call>",
        name=("", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        end="",
        lines=False,
    ),
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
