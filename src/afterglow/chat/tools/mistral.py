"""Mistral's calls: a JSON list behind `[TOOL_CALLS]`, and the newer `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from functools import partial

from afterglow.chat.tools.family import Family
from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.json_calls import value
from afterglow.chat.tools.scanner import Steps, is_of_name
from afterglow.chat.tools.tagged_json import TaggedJson, list_family
from afterglow.chat.tools.tool import Tool

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9
ALPHABET = string.ascii_letters + string.digits


def new_id() -> str:
    """Mistral's templates take ids of nine letters and digits, and no others."""
    return "".join(secrets.choice(ALPHABET) for _ in range(ID_LENGTH))


class Named(TaggedJson):
    """Reads both forms. An id that the model wrote is kept: the template will write the same again."""

    def block(self) -> Steps[None]:
        scanner = self.scanner
        if (yield from scanner.peek()) in ("[", "{", " ", "\n"):
            yield from super().block()
            return
        name = yield from scanner.run(is_of_name)
        id = ""
        if (yield from scanner.skip(CALL_ID)):
            id = yield from scanner.run(str.isalnum)
        begins = yield from scanner.comes(ARGUMENTS, "{")
        if not name or not begins:
            self.give_back(marked=True)
            return
        self.begin(name, id if len(id) == ID_LENGTH else None)
        yield from scanner.skip(ARGUMENTS)
        yield from scanner.spaces()
        if not (yield from value(scanner, self.argue)) and (yield from scanner.until(CALLS, sink=self.argue)):
            scanner.unread(CALLS)  # another call follows one that is not JSON


def named_family(name: str, *, ids: bool) -> Family:
    """The newer form, with or without ids."""

    def after(grammar: Grammar, tools: Sequence[Tool]) -> str:
        id = f"{grammar.text(CALL_ID)} /[a-zA-Z0-9]{{9}}/" if ids else ""
        return one_of(
            f"{grammar.text(tool.name)} {id} {grammar.text(ARGUMENTS)} {grammar.json(tool.parameters)}"
            for tool in tools
        )

    def write(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = grammar.rule(f"{grammar.text(CALLS)} {after(grammar, tools)}")
        return f"{call}+" if parallel else call

    return Family(
        name=name,
        markers=(CALLS, CALL_ID, ARGUMENTS),
        triggers=(CALLS,),
        parser=partial(Named, openings=(CALLS,)),
        write=write,
        write_after=lambda grammar, tools, trigger: after(grammar, tools),
        new_id=new_id,
    )


MISTRAL = list_family("mistral", CALLS, new_id=new_id, more={"id": {"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"}})
MISTRAL_NAMED = named_family("mistral-named", ids=False)
MISTRAL_IDS = named_family("mistral-ids", ids=True)
