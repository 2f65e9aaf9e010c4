"""Schemas of arguments that are not written as JSON: taken apart for a grammar, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afterglow.chat.tools.grammars import DATA, Grammar, one_of
from afterglow.chat.tools.tool import Tool
from afterglow.chat.tools.values import referred, type_of, types_of
from afterglow.errors import UnsupportedOption

NOTES = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
)
DEFINITIONS = ("$defs", "definitions")
OF_ARGUMENTS = frozenset({"type", "properties", "required", "additionalProperties", *DEFINITIONS})
OF_TEXT = frozenset({"type", "enum", "const", "minLength", "maxLength"})
# What llguidance cannot enforce in any family. It refuses these too, but cannot say in which tool they stand.
UNENFORCEABLE = frozenset(
    {"not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"}
    | {
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
    }
)
NAMED = frozenset({"properties", "patternProperties", *DEFINITIONS})  # keywords whose members are names
DEPTH = 8  # references inside references; a schema that contains itself cannot be written out


def check(tool: Tool) -> None:
    """Refuse a tool whose schema no grammar can enforce, by the keyword's name."""
    _check(tool.parameters, f"tools.{tool.name}.parameters")


def _check(schema: Any, where: str) -> None:
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            _check(item, f"{where}[{index}]")
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in UNENFORCEABLE:
            raise UnsupportedOption(f"{where}.{keyword}", "no grammar of calls can enforce it: leave it out")
        if keyword in NAMED and isinstance(value, Mapping):
            for name, inner in value.items():
                _check(inner, f"{where}.{keyword}.{name}")
        elif keyword not in DATA:
            _check(value, f"{where}.{keyword}")


@dataclass(frozen=True, slots=True)
class Place:
    """A schema and where it stands: in which tool, under which name, and in which document its references begin."""

    schema: Mapping[str, Any]
    where: str
    root: Mapping[str, Any]
    depth: int = DEPTH

    def inside(self, schema: Any, name: str = "") -> Place:
        """A schema that stands in this one."""
        where = f"{self.where}.{name}" if name else self.where
        return Place(schema if isinstance(schema, Mapping) else {}, where, self.root, self.depth)

    @property
    def types(self) -> frozenset[str]:
        return types_of(self.schema, self.root)

    def only(self, keywords: frozenset[str], family: str) -> None:
        """Refuse keywords that are not among these."""
        for keyword in self.schema:
            if keyword not in keywords and keyword not in NOTES:
                raise UnsupportedOption(f"{self.where}.{keyword}", f"calls as {family} writes them cannot enforce it")

    def choices(self, family: str) -> list[Place]:
        """The schemas of which one must hold, each of one kind; references are followed."""
        schema = self.schema
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self.only(frozenset({keyword}), family)
                if keyword == "oneOf":
                    self._apart(schema[keyword], family)
                return [place for choice in schema[keyword] for place in self.inside(choice).choices(family)]
        if "$ref" in schema:
            if self.depth == 0:
                raise UnsupportedOption(f"{self.where}.$ref", f"calls as {family} writes them cannot enforce recursion")
            self.only(frozenset({"$ref"}), family)
            found = referred(str(schema["$ref"]), self.root)
            return Place(found, self.where, self.root, self.depth - 1).choices(family)
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return [self.inside({**schema, "type": kind}) for kind in kinds]
        if kinds is None and "enum" in schema:
            return [self.inside({**schema, "enum": [value]}) for value in schema["enum"]]
        return [self]

    def _apart(self, schemas: Sequence[Any], family: str) -> None:
        """Only one of these may hold: they must be of different types."""
        kinds = [kind for schema in schemas for kind in types_of(schema, self.root)]
        if len(kinds) != len(set(kinds)):
            raise UnsupportedOption(
                f"{self.where}.oneOf", f"calls as {family} writes them need choices of different types"
            )

    @property
    def alone(self) -> dict[str, Any]:
        """The schema as a document of its own."""
        definitions = {key: self.root[key] for key in DEFINITIONS if key in self.root}
        return {**self.schema, **definitions}

    @property
    def values(self) -> list[Any] | None:
        """The only values that are allowed, where they are listed."""
        if "const" in self.schema:
            return [self.schema["const"]]
        listed: list[Any] | None = self.schema.get("enum")
        return listed


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool."""

    name: str
    place: Place
    required: bool


def parameters(tool: Tool, family: str) -> list[Parameter]:
    """The parameters of a tool in its schema's order."""
    return members(Place(tool.parameters, f"tools.{tool.name}.parameters", tool.parameters), family)


def members(place: Place, family: str) -> list[Parameter]:
    """The members of an object in its schema's order."""
    place.only(OF_ARGUMENTS, family)
    properties, required = place.schema.get("properties", {}), place.schema.get("required", ())
    if missing := [name for name in required if name not in properties]:
        raise UnsupportedOption(f"{place.where}.required", f"{missing[0]!r} has no schema among the properties")
    return [Parameter(name, place.inside(schema, name), name in required) for name, schema in properties.items()]


def text_until(grammar: Grammar, place: Place, family: str, *, ending: str, lines: bool = False) -> str:
    """Bare text of a string's schema up to and including `ending`; with `lines`, it may stand on lines of its own."""
    place.only(OF_TEXT, family)
    newline = f"{grammar.text(chr(10))}?" if lines else ""
    if place.values is not None:
        allowed = [value for value in place.values if isinstance(value, str)]
        texts = one_of(grammar.text(value) for value in allowed if value)
        return f"{newline} {texts}{'?' if '' in allowed else ''} {newline} {grammar.text(ending)}"
    shortest, longest = place.schema.get("minLength", 0), place.schema.get("maxLength")
    if lines and (shortest or longest is not None):
        newline = grammar.text("\n")
        return f"{newline} {grammar.free(chr(10) + ending, shortest=shortest, longest=longest)}"
    return grammar.free(ending, shortest=shortest, longest=longest)


def bare_or_json(grammar: Grammar, place: Place, family: str, *, ending: str, lines: bool) -> str:
    """A value whose text is bare and whose other kinds are JSON, up to and including `ending`."""
    written = []
    for choice in place.choices(family):
        only_text = "string" in choice.types and (choice.values is None or type_of(choice.values[0]) == "string")
        if only_text:
            written.append(text_until(grammar, choice, family, ending=ending, lines=lines))
        else:
            space = "SPACE?" if lines else ""
            value = one_of([grammar.json(choice.alone), *_python_words(grammar, choice)])
            written.append(f"{space} {value} {space} {grammar.text(ending)}")
    return one_of(written)


def _python_words(grammar: Grammar, place: Place) -> list[str]:
    """Many templates write truth and nothing as Python does, and so do their models."""
    allowed = [True, False] if place.values is None else place.values
    words = [str(value) for value in allowed if isinstance(value, bool)] if place.types == {"boolean"} else []
    return [grammar.text(word) for word in (["None"] if place.types == {"null"} else words)]


def separated(grammar: Grammar, written: list[tuple[str, bool]], separator: str) -> str:
    """These members in their order, the required ones and any of the others, with separators between them."""
    after = before = ""  # what may follow when something, or nothing, was written
    for member, required in reversed(written):
        more = f"{grammar.text(separator)} {member} {after}"
        first = f"{member} {after}"
        before = first if required else f"({first} | {before})" if before else f"({first})?"
        after = grammar.rule(more) if required else grammar.rule(f"({more})?" if not after else f"{more} | {after}")
    return grammar.rule(before) if before else ""
