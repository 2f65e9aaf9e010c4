"""Tool family: the tool-call format that a family of models shares, with its parser and its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from afterglow.chat.constraints.grammar import LiteralFormatter
from afterglow.chat.constraints.json_schema import to_enforceable_schema
from afterglow.chat.output.parts import OutputParser
from afterglow.chat.tools.grammar.lark import LarkGrammar
from afterglow.chat.tools.parsing.parser import CallIdFactory, generate_call_id
from afterglow.chat.tools.text_input import build_enforced_parameters
from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidArgument, UnsupportedOption

ParserFactory: TypeAlias = Callable[[Sequence[Tool], CallIdFactory], OutputParser]
RuleBuilder: TypeAlias = Callable[[LarkGrammar, Sequence[Tool], bool], str]  # the last: whether calls are parallel
TriggerRuleBuilder: TypeAlias = Callable[[LarkGrammar, Sequence[Tool], str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """Tool-call format of a family of models.

    `markers`: control tokens whose text the parser must see. `stops`: texts that end a turn with calls. `triggers`:
    texts that begin a call inside free text; empty if no text reliably does. `tool_trigger`: the same with `{}` for the
    name of the tool, if only the name tells a call from text. `other_starts`: texts with which models
    begin a call by mistake. `text_start`: text before the visible text of every answer, which the parser drops.
    `instructions`: describes the call format, for templates that render calls but not the tools.

    An enforced turn is `optional_lead`, then blocks: the first trigger and what `build_block_rule` matches. With a
    `block_separator` (an expression), there is one block for each call; otherwise one block has all calls. Families
    that differ have a rule of their own for enforced calls, or for what follows each trigger.

    >>> from afterglow.chat.tools.families.hermes import HERMES
    >>> parser = HERMES.create_parser([Tool(name="now")])
    >>> parts = parser.feed('<tool_call>{"name": "now", "arguments": {}}</tool_call>') + parser.finish()
    >>> parts[0].name
    'now'
    """

    name: str
    parser_factory: ParserFactory
    build_block_rule: RuleBuilder
    block_separator: str | None = None
    build_calls_rule: RuleBuilder | None = None
    build_trigger_rule: TriggerRuleBuilder | None = None
    optional_lead: str = ""
    markers: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    tool_trigger: str = ""
    other_starts: tuple[str, ...] = ()
    text_start: str = ""
    instructions: str = ""
    new_id: CallIdFactory = generate_call_id

    def create_parser(self, tools: Sequence[Tool], new_id: CallIdFactory | None = None) -> OutputParser:
        """Return a parser of one completion."""
        return self.parser_factory(tools, new_id or self.new_id)

    def build_calls_grammar(self, tools: Sequence[Tool], parallel: bool, write_literal: LiteralFormatter) -> str:
        """Return a grammar (llguidance's Lark) of exactly one call, or of one or more calls if `parallel`."""
        tools = _to_enforceable_tools(tools)
        grammar = LarkGrammar(write_literal)
        if self.build_calls_rule is not None:
            return grammar.to_lark(self.build_calls_rule(grammar, tools, parallel))
        opening = grammar.literals(*self.triggers[:1])
        block = f"{opening} {self.build_block_rule(grammar, tools, parallel)}"
        if parallel and self.block_separator is not None:
            # A separator may follow the last call: a model that writes a newline there is not forced into another one.
            calls = f"{grammar.add_calls_rule(block, parallel, self.block_separator)} {self.block_separator}"
        else:
            calls = grammar.add_rule(block)
        lead = f"({grammar.literals(self.optional_lead)})?" if self.optional_lead else ""
        return grammar.to_lark(f"{lead} {calls}")

    def list_triggers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the texts that begin a call of these tools inside free text."""
        named = tuple(self.tool_trigger.format(tool.name) for tool in tools) if self.tool_trigger else ()
        return (*self.triggers, *named)

    def build_after_trigger_grammar(
        self, tools: Sequence[Tool], write_literal: LiteralFormatter, trigger: str | None = None
    ) -> str:
        """Return the grammar of the text after a trigger (default: the first) to the end of that block of calls."""
        triggers = self.list_triggers(tools)
        if not triggers:
            raise UnsupportedOption("tools", f"no text reliably begins a call of the family {self.name!r}")
        if trigger is not None and trigger not in triggers:
            raise InvalidArgument("trigger", f"must be one of {', '.join(map(repr, triggers))}, not {trigger!r}")
        grammar = LarkGrammar(write_literal)
        if self.tool_trigger:
            (tool,) = _to_enforceable_tools([tools[triggers.index(trigger or triggers[0])]])
            return grammar.to_lark(grammar.add_json_rule(tool.parameters))
        tools = _to_enforceable_tools(tools)
        if self.build_trigger_rule is not None:
            return grammar.to_lark(self.build_trigger_rule(grammar, tools, trigger or self.triggers[0]))
        return grammar.to_lark(self.build_block_rule(grammar, tools, True))


def _to_enforceable_tools(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools with schemas that a grammar can enforce; raise an error that names the keyword otherwise."""
    if not tools:
        raise InvalidArgument("tools", "must not be empty if a call is enforced")
    return [
        replace(
            tool, parameters=to_enforceable_schema(build_enforced_parameters(tool), f"tools.{tool.name}.parameters")
        )
        for tool in tools
    ]
