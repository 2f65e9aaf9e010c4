"""A family of models: how they write calls of tools, and how that is read and enforced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from afterglow.chat.parts import Reader
from afterglow.chat.tools.grammars import Grammar, Literal
from afterglow.chat.tools.parser import NewId, new_id
from afterglow.chat.tools.schemas import check
from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidArgument, UnsupportedOption

NewParser: TypeAlias = Callable[[Sequence[Tool], NewId], Reader]
Write: TypeAlias = Callable[[Grammar, Sequence[Tool], bool], str]
WriteAfter: TypeAlias = Callable[[Grammar, Sequence[Tool], str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family of models writes calls of tools.

    `markers` are the texts of control tokens that its reader must see; `stops` end a turn that calls; `triggers` begin
    a call inside free text (none where no text is sure to).

    >>> reader = family_of(template).reader(tools)
    >>> parts = reader.feed("<tool_call>") + reader.finish()
    """

    name: str
    parser: NewParser
    write: Write
    write_after: WriteAfter
    markers: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    new_id: NewId = new_id

    def reader(self, tools: Sequence[Tool], new_id: NewId | None = None) -> Reader:
        """A reader of one answer."""
        return self.parser(tools, new_id or self.new_id)

    def calls_grammar(self, tools: Sequence[Tool], parallel: bool, literal: Literal) -> str:
        """A grammar (llguidance's Lark) of exactly one call of these tools, or of one or more where `parallel`."""
        self._check(tools)
        grammar = Grammar(literal)
        return grammar.lark(self.write(grammar, tools, parallel))

    def after_trigger_grammar(self, tools: Sequence[Tool], literal: Literal, trigger: str | None = None) -> str:
        """What may follow a trigger (the first, unless another is named), to the end of that block of calls."""
        self._check(tools)
        if not self.triggers:
            raise UnsupportedOption("tools", f"no text surely begins a call of the family {self.name!r}")
        if trigger is not None and trigger not in self.triggers:
            raise InvalidArgument("trigger", f"must be one of {', '.join(map(repr, self.triggers))}, not {trigger!r}")
        grammar = Grammar(literal)
        return grammar.lark(self.write_after(grammar, tools, trigger or self.triggers[0]))

    def _check(self, tools: Sequence[Tool]) -> None:
        if not tools:
            raise InvalidArgument("tools", "must be at least one where a call is enforced")
        for tool in tools:
            check(tool)
