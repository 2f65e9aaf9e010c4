"""A family of models: how they write calls of tools, and how that is read and enforced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from afterglow.chat.output.parts import OutputParser
from afterglow.chat.tools.grammar.lark import LarkGrammar, LiteralWriter
from afterglow.chat.tools.grammar.schema import check_enforceable
from afterglow.chat.tools.parsing.parser import CallIdFactory, generate_call_id
from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidArgument, UnsupportedOption

ParserFactory: TypeAlias = Callable[[Sequence[Tool], CallIdFactory], OutputParser]
CallsRuleBuilder: TypeAlias = Callable[[LarkGrammar, Sequence[Tool], bool], str]
AfterTriggerRuleBuilder: TypeAlias = Callable[[LarkGrammar, Sequence[Tool], str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """How a family of models writes calls of tools.

    `markers` are the texts of control tokens that its reader must see; `stops` end a turn that calls; `triggers` begin
    a call inside free text (none where no text is sure to).

    >>> reader = family_of(template).reader(tools)
    >>> parts = reader.feed("<tool_call>") + reader.finish()
    """

    name: str
    parser_factory: ParserFactory
    build_calls_rule: CallsRuleBuilder
    build_after_trigger_rule: AfterTriggerRuleBuilder
    markers: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    new_id: CallIdFactory = generate_call_id

    def create_parser(self, tools: Sequence[Tool], new_id: CallIdFactory | None = None) -> OutputParser:
        """A reader of one answer."""
        return self.parser_factory(tools, new_id or self.new_id)

    def build_calls_grammar(self, tools: Sequence[Tool], parallel: bool, write_literal: LiteralWriter) -> str:
        """A grammar (llguidance's Lark) of exactly one call of these tools, or of one or more where `parallel`."""
        self._check_tools(tools)
        grammar = LarkGrammar(write_literal)
        return grammar.to_lark(self.build_calls_rule(grammar, tools, parallel))

    def build_after_trigger_grammar(
        self, tools: Sequence[Tool], write_literal: LiteralWriter, trigger: str | None = None
    ) -> str:
        """What may follow a trigger (the first, unless another is named), to the end of that block of calls."""
        self._check_tools(tools)
        if not self.triggers:
            raise UnsupportedOption("tools", f"no text surely begins a call of the family {self.name!r}")
        if trigger is not None and trigger not in self.triggers:
            raise InvalidArgument("trigger", f"must be one of {', '.join(map(repr, self.triggers))}, not {trigger!r}")
        grammar = LarkGrammar(write_literal)
        return grammar.to_lark(self.build_after_trigger_rule(grammar, tools, trigger or self.triggers[0]))

    def _check_tools(self, tools: Sequence[Tool]) -> None:
        if not tools:
            raise InvalidArgument("tools", "must be at least one where a call is enforced")
        for tool in tools:
            check_enforceable(tool)
