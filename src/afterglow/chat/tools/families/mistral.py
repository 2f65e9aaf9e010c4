"""Mistral: a JSON list after `[TOOL_CALLS]`, and the newer format `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from functools import partial

from afterglow.chat.tools.families.hermes import TaggedJsonToolParser, build_json_list_family
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.json_calls import stream_json_value
from afterglow.chat.tools.parsing.scanner import ParseSteps, is_name_char
from afterglow.chat.tools.tool import Tool

TOOL_CALLS_MARKER, CALL_ID_MARKER, ARGS_MARKER = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALL_ID_CHARACTERS = 9
CALL_ID_ALPHABET = string.ascii_letters + string.digits


def generate_mistral_call_id() -> str:
    """Return a new call id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(CALL_ID_ALPHABET) for _ in range(CALL_ID_CHARACTERS))


class MistralToolParser(TaggedJsonToolParser):
    """Parses both formats. Preserves the model's call ids, so that the template renders the same text again."""

    def parse_block(self) -> ParseSteps[None]:
        scanner = self.scanner
        if (yield from scanner.peek()) in ("[", "{", " ", "\n"):
            yield from super().parse_block()
            return
        name = yield from scanner.take_while(is_name_char)
        id = ""
        if (yield from scanner.skip_any(CALL_ID_MARKER)):
            id = yield from scanner.take_while(str.isalnum)
        has_arguments = yield from scanner.peek_any(ARGS_MARKER, "{")
        if not name or not has_arguments:
            self.reject_call(after_marker=True)
            return
        self.begin_call(name, id if len(id) == CALL_ID_CHARACTERS else None)
        yield from scanner.skip_any(ARGS_MARKER)
        yield from scanner.take_whitespace()
        if not (yield from stream_json_value(scanner, self.emit_arguments)) and (
            yield from scanner.stream_until(TOOL_CALLS_MARKER, sink=self.emit_arguments)
        ):
            scanner.unread(TOOL_CALLS_MARKER)  # the next call follows invalid JSON


def build_mistral_family(name: str, *, with_ids: bool) -> ToolFamily:
    """Return a family of the newer format, with or without call ids."""

    def build_block(grammar: LarkGrammar, tools: Sequence[Tool], parallel: bool) -> str:
        id = f"{grammar.literal(CALL_ID_MARKER)} /[a-zA-Z0-9]{{9}}/" if with_ids else ""
        return join_alternatives(
            f"{grammar.literal(tool.name)} {id} {grammar.literal(ARGS_MARKER)} {grammar.add_json_rule(tool.parameters)}"
            for tool in tools
        )

    return ToolFamily(
        name=name,
        markers=(TOOL_CALLS_MARKER, CALL_ID_MARKER, ARGS_MARKER),
        triggers=(TOOL_CALLS_MARKER,),
        parser_factory=partial(MistralToolParser, openings=(TOOL_CALLS_MARKER,)),
        build_block_rule=build_block,
        block_separator="",
        new_id=generate_mistral_call_id,
    )


MISTRAL = build_json_list_family(
    "mistral",
    TOOL_CALLS_MARKER,
    new_id=generate_mistral_call_id,
    optional_properties={"id": {"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"}},
)
MISTRAL_NAMED = build_mistral_family("mistral-named", with_ids=False)
MISTRAL_IDS = build_mistral_family("mistral-ids", with_ids=True)
