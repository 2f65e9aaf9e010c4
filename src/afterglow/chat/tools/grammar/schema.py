"""Schemas of arguments that are not written as JSON: taken apart for a grammar, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afterglow.chat.constraints.json_schema import to_enforceable_schema
from afterglow.chat.tools.grammar.lark import LarkGrammar, join_alternatives
from afterglow.chat.tools.parsing.json_values import get_json_type, get_schema_types, resolve_reference
from afterglow.chat.tools.tool import Tool
from afterglow.errors import UnsupportedOption

ANNOTATION_KEYWORDS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
)
DEFINITION_KEYWORDS = ("$defs", "definitions")
OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", *DEFINITION_KEYWORDS})
STRING_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
MAX_REFERENCE_DEPTH = 8  # references inside references; a schema that contains itself cannot be written out


def check_enforceable(tool: Tool) -> None:
    """Refuse a tool whose schema no grammar can enforce, by the keyword's name."""
    to_enforceable_schema(tool.parameters, f"tools.{tool.name}.parameters")


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """A schema and where it stands: in which tool, under which name, and in which document its references begin."""

    schema: Mapping[str, Any]
    where: str
    root: Mapping[str, Any]
    references_left: int = MAX_REFERENCE_DEPTH

    def create_child(self, schema: Any, name: str = "") -> SchemaNode:
        """A schema that stands in this one."""
        where = f"{self.where}.{name}" if name else self.where
        return SchemaNode(schema if isinstance(schema, Mapping) else {}, where, self.root, self.references_left)

    @property
    def allowed_types(self) -> frozenset[str]:
        return get_schema_types(self.schema, self.root)

    def check_keywords(self, supported: frozenset[str], family: str) -> None:
        """Refuse keywords that are not among these."""
        for keyword in self.schema:
            if keyword not in supported and keyword not in ANNOTATION_KEYWORDS:
                raise UnsupportedOption(f"{self.where}.{keyword}", f"calls as {family} writes them cannot enforce it")

    def expand_choices(self, family: str) -> list[SchemaNode]:
        """The schemas of which one must hold, each of one kind; references are followed."""
        schema = self.schema
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self.check_keywords(frozenset({keyword}), family)
                if keyword == "oneOf":
                    self._check_disjoint(schema[keyword], family)
                return [
                    place for choice in schema[keyword] for place in self.create_child(choice).expand_choices(family)
                ]
        if "$ref" in schema:
            if self.references_left == 0:
                raise UnsupportedOption(f"{self.where}.$ref", f"calls as {family} writes them cannot enforce recursion")
            self.check_keywords(frozenset({"$ref"}), family)
            found = resolve_reference(str(schema["$ref"]), self.root)
            return SchemaNode(found, self.where, self.root, self.references_left - 1).expand_choices(family)
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return [self.create_child({**schema, "type": kind}) for kind in kinds]
        if kinds is None and "enum" in schema:
            return [self.create_child({**schema, "enum": [value]}) for value in schema["enum"]]
        return [self]

    def _check_disjoint(self, schemas: Sequence[Any], family: str) -> None:
        """Only one of these may hold: they must be of different types."""
        kinds = [kind for schema in schemas for kind in get_schema_types(schema, self.root)]
        if len(kinds) != len(set(kinds)):
            raise UnsupportedOption(
                f"{self.where}.oneOf", f"calls as {family} writes them need choices of different types"
            )

    @property
    def standalone_schema(self) -> dict[str, Any]:
        """The schema as a document of its own."""
        definitions = {key: self.root[key] for key in DEFINITION_KEYWORDS if key in self.root}
        return {**self.schema, **definitions}

    @property
    def allowed_values(self) -> list[Any] | None:
        """The only values that are allowed, where they are listed."""
        if "const" in self.schema:
            return [self.schema["const"]]
        listed: list[Any] | None = self.schema.get("enum")
        return listed


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """One parameter of a tool."""

    name: str
    node: SchemaNode
    required: bool


def list_parameters(tool: Tool, family: str) -> list[ToolParameter]:
    """The parameters of a tool in its schema's order."""
    return list_properties(SchemaNode(tool.parameters, f"tools.{tool.name}.parameters", tool.parameters), family)


def list_properties(node: SchemaNode, family: str) -> list[ToolParameter]:
    """The members of an object in its schema's order."""
    node.check_keywords(OBJECT_KEYWORDS, family)
    properties, required = node.schema.get("properties", {}), node.schema.get("required", ())
    if missing := [name for name in required if name not in properties]:
        raise UnsupportedOption(f"{node.where}.required", f"{missing[0]!r} has no schema among the properties")
    return [
        ToolParameter(name, node.create_child(schema, name), name in required) for name, schema in properties.items()
    ]


def build_text_until_rule(
    grammar: LarkGrammar, node: SchemaNode, family: str, *, ending: str, allow_own_lines: bool = False
) -> str:
    """Bare text of a string's schema up to and including `ending`; with `lines`, it may stand on lines of its own."""
    node.check_keywords(STRING_KEYWORDS, family)
    newline = f"{grammar.literal(chr(10))}?" if allow_own_lines else ""
    if node.allowed_values is not None:
        allowed = [value for value in node.allowed_values if isinstance(value, str)]
        texts = join_alternatives(grammar.literal(value) for value in allowed if value)
        return f"{newline} {texts}{'?' if '' in allowed else ''} {newline} {grammar.literal(ending)}"
    shortest, longest = node.schema.get("minLength", 0), node.schema.get("maxLength")
    if allow_own_lines and (shortest or longest is not None):
        newline = grammar.literal("\n")
        return f"{newline} {grammar.add_text_until_rule(chr(10) + ending, min_length=shortest, max_length=longest)}"
    return grammar.add_text_until_rule(ending, min_length=shortest, max_length=longest)


def build_bare_or_json_rule(
    grammar: LarkGrammar, node: SchemaNode, family: str, *, ending: str, allow_own_lines: bool
) -> str:
    """A value whose text is bare and whose other kinds are JSON, up to and including `ending`."""
    written = []
    for choice in node.expand_choices(family):
        only_text = "string" in choice.allowed_types and (
            choice.allowed_values is None or get_json_type(choice.allowed_values[0]) == "string"
        )
        if only_text:
            written.append(
                build_text_until_rule(grammar, choice, family, ending=ending, allow_own_lines=allow_own_lines)
            )
        else:
            space = "SPACE?" if allow_own_lines else ""
            value = join_alternatives(
                [grammar.add_json_rule(choice.standalone_schema), *_build_python_constants(grammar, choice)]
            )
            written.append(f"{space} {value} {space} {grammar.literal(ending)}")
    return join_alternatives(written)


def _build_python_constants(grammar: LarkGrammar, node: SchemaNode) -> list[str]:
    """Many templates write truth and nothing as Python does, and so do their models."""
    allowed = [True, False] if node.allowed_values is None else node.allowed_values
    words = [str(value) for value in allowed if isinstance(value, bool)] if node.allowed_types == {"boolean"} else []
    return [grammar.literal(word) for word in (["None"] if node.allowed_types == {"null"} else words)]


def build_separated_rule(grammar: LarkGrammar, members: list[tuple[str, bool]], separator: str) -> str:
    """These members in their order, the required ones and any of the others, with separators between them."""
    after = before = ""  # what may follow when something, or nothing, was written
    for member, required in reversed(members):
        more = f"{grammar.literal(separator)} {member} {after}"
        first = f"{member} {after}"
        before = first if required else f"({first} | {before})" if before else f"({first})?"
        after = (
            grammar.add_rule(more) if required else grammar.add_rule(f"({more})?" if not after else f"{more} | {after}")
        )
    return grammar.add_rule(before) if before else ""
