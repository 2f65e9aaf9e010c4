"""Gemma's calls: `call:name{key:value}` with strings between quotes of its own (FunctionGemma and Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from afterglow.chat.tools.family import Family
from afterglow.chat.tools.grammars import Grammar, one_of
from afterglow.chat.tools.json_calls import value
from afterglow.chat.tools.parser import NewId, Parser
from afterglow.chat.tools.scanner import Steps, is_of_name
from afterglow.chat.tools.schemas import Place, members, separated, text_until
from afterglow.chat.tools.tool import Tool
from afterglow.chat.tools.values import ANY, escaped, from_text, parameter_types, quoted
from afterglow.errors import UnsupportedOption

ARRAY = frozenset({"type", "items", "minItems", "maxItems"})


class GemmaCalls(Parser):
    """Reads Gemma's notation and writes JSON while it comes."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId, *, opening: str, closing: str, quote: str) -> None:
        self._opening, self._closing, self._quote = opening, closing, quote
        super().__init__(tools, new_id)

    def read(self) -> Steps[None]:
        scanner = self.scanner
        while opening := (yield from scanner.until(self._opening, sink=self.say)):
            scanner.mark(len(opening))
            yield from scanner.spaces()
            told = yield from scanner.skip("call:")
            name = (yield from scanner.run(is_of_name)) if told else ""
            if not name or (yield from scanner.peek()) != "{":
                self.give_back(marked=True)
                continue
            self.begin(name)
            if not (yield from self._object(name)):
                yield from scanner.until(self._closing, sink=self.argue)
                continue
            yield from scanner.spaces()
            yield from scanner.skip(self._closing)

    def _object(self, tool: str | None = None) -> Steps[bool]:
        """An object; false where it broke off. Of a call's own arguments, the schema is known."""
        self.argue(self.scanner.take(1))
        first = True
        while True:
            yield from self.scanner.spaces()
            if (yield from self.scanner.skip("}")):
                self.argue("}")
                return True
            key = yield from self._key()
            if not (yield from self.scanner.skip(":")):
                return False
            self.argue(("" if first else ", ") + quoted(key) + ": ")
            first = False
            known = self.tools.get(tool) if tool is not None else None
            if not (yield from self._value(parameter_types(known, key))):
                return False
            yield from self.scanner.spaces()
            yield from self.scanner.skip(",")

    def _key(self) -> Steps[str]:
        pieces: list[str] = []
        if (yield from self.scanner.skip(self._quote)):
            yield from self.scanner.until(self._quote, sink=pieces.append)
            return "".join(pieces)
        return (yield from self.scanner.run(lambda char: char not in ':,{}[]<"')).strip()

    def _array(self) -> Steps[bool]:
        self.argue(self.scanner.take(1))
        first = True
        while True:
            yield from self.scanner.spaces()
            if (yield from self.scanner.skip("]")):
                self.argue("]")
                return True
            if not (yield from self.scanner.peek()):
                return False
            self.argue("" if first else ", ")
            first = False
            if not (yield from self._value(ANY)):
                return False
            yield from self.scanner.spaces()
            yield from self.scanner.skip(",")

    def _value(self, types: frozenset[str]) -> Steps[bool]:
        """One value; false where it broke off."""
        yield from self.scanner.spaces()
        if (yield from self.scanner.skip(self._quote)):
            self.argue('"')
            ending = yield from self.scanner.until(self._quote, sink=lambda piece: self.argue(escaped(piece)))
            self.argue('"' if ending else "")
            return bool(ending)
        match (yield from self.scanner.peek()):
            case "{":
                return (yield from self._object())
            case "[":
                return (yield from self._array())
            case '"':
                return (yield from value(self.scanner, self.argue))
        text = yield from self.scanner.run(lambda char: char not in ',{}[]<"')
        whole = bool((yield from self.scanner.peek()))
        self.argue(from_text(text.strip(), types) if whole else text)
        return whole and bool(text)


class Writer:
    """Writes schemas as a grammar of Gemma's notation."""

    def __init__(self, grammar: Grammar, family: str, quote: str) -> None:
        self._grammar, self._family, self._quote = grammar, family, quote

    def object(self, place: Place) -> str:
        """An object with the members of its schema, in the order of the alphabet as the templates write them."""
        found = sorted(members(place, self._family), key=lambda member: member.name.lower())
        if (
            not found
            and place.schema.get("additionalProperties", True) is not False
            and "properties" not in place.schema
        ):
            raise UnsupportedOption(f"{place.where}.properties", f"calls as {self._family} writes them need them named")
        written = [(f"{self._grammar.text(f'{one.name}:')} {self.value(one.place)}", one.required) for one in found]
        return f"{self._grammar.text('{')} {separated(self._grammar, written, ',')} {self._grammar.text('}')}"

    def value(self, place: Place) -> str:
        return one_of(self._choice(choice) for choice in place.choices(self._family))

    def _choice(self, place: Place) -> str:
        match sorted(place.types):
            case ["string"]:
                text = text_until(self._grammar, place, self._family, ending=self._quote)
                return f"{self._grammar.text(self._quote)} {text}"
            case ["array"]:
                return self._array(place)
            case ["object"]:
                return self._grammar.rule(self.object(place))
            case [_]:
                return self._grammar.json(place.alone)
        raise UnsupportedOption(f"{place.where}.type", f"calls as {self._family} writes them need one type")

    def _array(self, place: Place) -> str:
        place.only(ARRAY, self._family)
        least, most = place.schema.get("minItems", 0), place.schema.get("maxItems")
        if most == 0:
            return self._grammar.text("[]")
        item = self._grammar.rule(self.value(place.inside(place.schema.get("items"), "items")))
        bounds = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"({item} ({self._grammar.text(',')} {item}){bounds}){'' if least else '?'}"
        return f"{self._grammar.text('[')} {items} {self._grammar.text(']')}"


def gemma_family(name: str, opening: str, closing: str, quote: str, *, stop: str) -> Family:
    """A family of these markers. Behind its calls a model goes on with the tool's answer, so that must stop it."""

    def body(grammar: Grammar, tools: Sequence[Tool]) -> str:
        writer = Writer(grammar, name, quote)
        calls = []
        for tool in tools:
            place = Place(tool.parameters, f"tools.{tool.name}.parameters", tool.parameters)
            calls.append(f"{grammar.text(f'call:{tool.name}')} {writer.object(place)}")
        return f"{one_of(calls)} {grammar.text(closing)}"

    def write(grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = grammar.rule(f"{grammar.text(opening)} {body(grammar, tools)}")
        return f"{call}+" if parallel else call

    return Family(
        name=name,
        markers=(opening, closing, quote),
        stops=(stop,),
        triggers=(opening,),
        parser=partial(GemmaCalls, opening=opening, closing=closing, quote=quote),
        write=write,
        write_after=lambda grammar, tools, trigger: body(grammar, tools),
    )


GEMMA = gemma_family("gemma", "<|tool_call>", "<tool_call|>", '<|"|>', stop="<|tool_response>")
FUNCTION_GEMMA = gemma_family(
    "function-gemma",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    stop="<start_function_response>",
)
